"""Aligned columns of format 1.1 in an archive: numbers, fixed shapes and lists, whole and in ranges, damaged too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray

from routeplane.archive import compact, delete, open_archive, recover, save_archive, verify
from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.record.aligned import AlignedColumn
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Sampling
from routeplane.record.validate import WeightsMeaning
from tests.archive.archives import SPEC, flip, shard_files
from tests.archive.places import Place
from tests.stream.streams import record

LENGTHS = (300, 1_100, 5, 40)
SIGMOID = WeightsMeaning(score="sigmoid", renormalised=False, scaling="none", multiplied="after", dtype="float32")


def columns(tokens: int, *, seed: int) -> dict[str, Any]:
    """One column of every kind; rows that were not fed have NaN as weights."""
    rng = np.random.default_rng(seed)
    weights = rng.random((tokens, 3, 2), dtype=np.float32)
    weights[-1] = np.nan
    lists = [rng.integers(0, 9, rng.integers(0, 7)) for _ in range(tokens)]
    known = rng.random(tokens) < 0.8
    return {
        "plain": np.arange(tokens, dtype=np.int16),
        "route_weights": AlignedColumn.of(weights, aligned="fed", axes=("layers", "topk")),
        "wide": AlignedColumn.of(rng.random((tokens, 2, 3)), aligned="sampled", axes=("topk", "layers")),
        "kept": AlignedColumn.of_lists(lists, dtype="int32", aligned="sampled"),
        "unknown": AlignedColumn.of_lists(
            [one if known[index] else None for index, one in enumerate(lists)],
            dtype="float16",
            aligned="sampled",
            nullable=True,
        ),
        "score": AlignedColumn.of(rng.random(tokens), aligned="sampled", valid=known),
    }


def made(index: int, tokens: int, **changes: Any) -> RouteRecord:
    """A record with all of them."""
    return record(
        index,
        tokens,
        spec=SPEC,
        **{"columns": columns(tokens, seed=index), "attributes": {"weights_meaning": SIGMOID.to_text()}, **changes},
    )


def records() -> list[RouteRecord]:
    """Records that cross chunks."""
    return [made(index, tokens) for index, tokens in enumerate(LENGTHS)]


def test_every_column_comes_back(place: Place) -> None:
    """Whole records keep their checksums, over runs and shards."""
    saved = records()
    place.save(saved[:2], shard_bytes=1)
    place.save(saved[2:])
    found = list(place.open().values())

    assert [item.checksum for item in saved] == [item.checksum for item in found]
    assert all(one.equals(other) for one, other in zip(saved, found, strict=True))
    assert verify(place.where, options=place.options).problems == ()


@pytest.mark.parametrize("tokens", [(0, 1), (0, 300), (299, 300), (500, 1_030), (1_099, 1_100), (13, 14)])
@pytest.mark.parametrize("layers", [None, [4], [1, 5]])
def test_a_range_is_the_slice_of_the_record(
    tmp_path_factory: pytest.TempPathFactory, tokens: tuple[int, int], layers: list[int] | None
) -> None:
    """Lists, shapes and unknown entries are cut with the tokens; axes of layers with the layers."""
    where = tmp_path_factory.getbasetemp() / "columns-archive"
    saved = records()
    if not where.exists():
        save_archive(saved, where, spec=SPEC)
    archive = open_archive(where)
    for item in saved:
        if tokens[1] > item.num_tokens:
            continue
        expected = item.slice(*tokens)
        expected = expected if layers is None else expected.select(layers)
        found = archive.read(item.key, tokens=tokens, layer_ids=layers)
        assert expected.equals(found)
        assert expected.checksum == found.checksum


def test_what_else_format_1_1_brings_comes_back(place: Place) -> None:
    """Sampling parameters of spans, a continued record whose tokens begin with its rows."""
    base = made(1, 9)
    sampling = Sampling(temperature=0.7, top_k=40, processors=("min_p", "mask"))
    scored = replace(base, spans=tuple(replace(span, sampling=sampling) for span in base.spans), checksum=None)
    tail = replace(
        made(2, 9),
        token_ids=scored.token_ids[4:],
        routes=scored.routes[4:],
        routes_start=4,
        prefix=Prefix(sample_id=scored.sample_id, stop=4, checksum=scored.checksum),
        columns={name: column[4:] for name, column in scored.columns.items()},
        checksum=None,
    )
    saved = [scored, tail, made(3, 30)]
    place.save(saved)
    archive = place.open()

    assert [4, 9] == [tail.tokens_start, tail.num_tokens]
    assert all(one.equals(other) for one, other in zip(saved, archive.values(), strict=True))
    assert tail.slice(5, 8).equals(archive.read(tail.key, tokens=(5, 8)))
    assert sampling == archive[scored.key].spans[0].sampling
    assert 48 == archive.num_tokens


def test_compaction_copies_columns(place: Place) -> None:
    """The records that stay are what they were."""
    saved = records()
    place.save(saved)
    delete(place.where, keys=[saved[1].key], options=place.options)
    compact(place.where, options=place.options)
    kept = [saved[0], *saved[2:]]
    assert all(one.equals(other) for one, other in zip(kept, place.open().values(), strict=True))
    assert verify(place.where, options=place.options).problems == ()


@pytest.mark.parametrize("array", ["columns/0", "columns/0_ends", "columns/2", "columns/3_valid"])
def test_damage_in_a_column_is_an_error_and_listed(tmp_path: Path, array: str) -> None:
    """In values, ends and marks of unknown entries; the name of the column is in the finding."""
    where = tmp_path / "a"
    save_archive(records(), where, spec=SPEC, run="run")
    names = sorted(columns(5, seed=0))
    archive = open_archive(where)
    name = names[int(array.split("/")[1].split("_")[0])]
    flip(shard_files(where, array)[0], 20)

    with pytest.raises(FormatError) as caught:
        list(archive.values())
    assert ErrorKind.CORRUPT_CHUNK == caught.value.kind
    problems = verify(where).problems
    assert problems
    assert all(f"column {name}" in problem.message for problem in problems)


def test_recover_keeps_columns_and_blanks_weights_of_lost_rows(tmp_path: Path) -> None:
    """Rows of a damaged chunk become MISSING, and their weights NaN; other columns stay."""
    where = tmp_path / "a"
    saved = records()
    save_archive(saved, where, spec=SPEC, run="run")
    flip(shard_files(where, "routes")[0], 3)
    found = recover(where, tmp_path / "b")

    assert (0, 4) == (found.lost, found.intact + found.partial)
    for key, item in open_archive(tmp_path / "b").items():
        before = next(one for one in saved if one.key == key)
        assert before.columns["kept"].equals(item.columns["kept"])
        missing = (item.routes == -1).all(axis=2)
        assert np.array_equal(np.isnan(item.columns["route_weights"].values).all(axis=2), missing)
    assert verify(tmp_path / "b").intact


def test_bfloat16_weights_come_back_as_bits(tmp_path: Path) -> None:
    """Across chunks, with NaN where there is no row; a record that is put back has the checksum that it had."""
    bits = np.random.default_rng(0).integers(0, 0x3F80, (1_100, 3, 2), dtype=np.uint16)
    bits[-1] = 0x7FC0
    column = AlignedColumn.of(bits, aligned="fed", axes=("layers", "topk"))
    meaning = {"weights_meaning": replace(SIGMOID, dtype="bfloat16").to_text()}
    saved = made(0, 1_100, columns={"route_weights": column}, attributes=meaning)
    save_archive([saved], tmp_path / "a", spec=SPEC)
    (found,) = open_archive(tmp_path / "a").values()

    assert found.columns["route_weights"].equals(column)
    assert saved.checksum == found.verify().checksum
    assert saved.attributes == found.attributes


def test_a_run_has_the_same_columns_throughout(tmp_path: Path) -> None:
    """Another shape, another alignment or unknown entries are another column."""
    first = made(0, 5)
    other = made(1, 5, columns={**columns(5, seed=1), "plain": AlignedColumn.of(np.zeros(5), aligned="fed")})
    with pytest.raises(DataError) as caught:
        save_archive([first, other], tmp_path / "a", spec=SPEC)
    assert ErrorKind.TOKEN_COLUMN == caught.value.kind


def test_columns_open_in_xarray(tmp_path: Path) -> None:
    """Under the names of their axes."""
    where = tmp_path / "a"
    saved = records()
    save_archive(saved, where, spec=SPEC, run="run")
    found = xarray.open_zarr(where / open_archive(where).group("run") / "columns", consolidated=False)
    index = sorted(columns(5, seed=0)).index("route_weights")

    assert ("tokens", "layers", "topk") == found[str(index)].dims
    assert np.array_equal(saved[0].columns["route_weights"].values, found[str(index)][:300].to_numpy(), equal_nan=True)
