"""An archive that was damaged: typed errors and never other content; all damage listed; what is intact kept.

Flipped bits are tried in a process of its own: what a decoder that trusts its input does is to end it.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from routeplane.archive import open_archive, recover, save_archive, verify
from routeplane.archive.layout import seal
from routeplane.batch import microbatches
from routeplane.errors import ChecksumError, DataError, ErrorKind, FormatError, RouteplaneError, UsageError
from routeplane.record.record import RouteRecord
from tests.archive.archives import (
    SPEC,
    WIDE,
    every_flip,
    files,
    flip,
    rich_records,
    run_folder,
    saved,
    shard_files,
    sized,
)
from tests.archive.test_aligned_columns import made
from tests.stream.streams import content, contents

# ----------------------------------------------------------------------------------------------------------------------
# Flipped bits, anywhere
# ----------------------------------------------------------------------------------------------------------------------


def flip_outcomes(where: Path, places: list[tuple[Path, int, int]]) -> Counter[str]:
    """What reading everything gives with one byte of a file changed; and whether `verify` says so too."""
    expected = contents(open_archive(where).values())
    outcomes: Counter[str] = Counter()
    for path, position, mask in places:
        flip(path, position, mask)
        try:
            found = contents(open_archive(where).values())
            outcome = "same" if found == expected else f"other content: {path.name} {position}"
        except RouteplaneError:
            outcome = "refused" if not verify(where).intact else f"refused, and verify saw nothing: {path.name}"
        except Exception as error:  # noqa: BLE001  whatever comes is the finding
            outcome = f"{type(error).__name__}: {path.name} {position}"
        outcomes[outcome] += 1
        flip(path, position, mask)
    return outcomes


@pytest.mark.parametrize("made", ["one byte", "two bytes", "many shards"])
def test_flipped_bits_are_refused_or_harmless(tmp_path: Path, made: str) -> None:
    """One bit of any file: the same records, or a typed error that `verify` confirms."""
    spec = WIDE if made == "two bytes" else SPEC
    records = sized([700, 300]) if made == "many shards" else rich_records(spec=spec)
    where = saved(tmp_path / "a", records, spec=spec, shard_bytes=1)
    save_archive(sized([40], first=9, spec=spec), where, spec=spec)
    places = [
        (path, position, mask)
        for path in files(where)
        for position, mask in every_flip(path.stat().st_size, step=max(1, path.stat().st_size // 2))
    ]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        outcomes = pool.submit(flip_outcomes, where, places).result()

    assert {"same", "refused"} == set(outcomes)
    assert outcomes["refused"] > len(places) // 3  # the rest: documents for zarr, which `verify` compares


def refusals(where: Path, places: list[tuple[Path, int, int]]) -> Counter[str]:
    """Whether reading refuses each flip; of every 16th, whether `verify` lists it too."""
    outcomes: Counter[str] = Counter()
    for index, (path, position, mask) in enumerate(places):
        flip(path, position, mask)
        try:
            for _ in open_archive(where).values():
                pass
            outcomes[f"taken: {path.name} {position}"] += 1
        except RouteplaneError:
            missed = index % 16 == 0 and verify(where).intact
            outcomes[f"refused, and verify saw nothing: {path.name}" if missed else "refused"] += 1
        flip(path, position, mask)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("made_of", ["logprobs", "columns"])
def test_every_bit_of_every_shard(tmp_path: Path, made_of: str) -> None:
    """All bits of chunks, checksums and indices: routes, tokens, log-probabilities, and every kind of column."""
    where = saved(tmp_path / "a", rich_records()[1:2] if made_of == "logprobs" else [made(9, 5)])
    shards = [path for path in files(where) if "c" in path.relative_to(where).parts[2:-1]]
    assert (5 if made_of == "logprobs" else 12) == len(shards)
    places = [
        (path, position, 1 << bit) for path in shards for position in range(path.stat().st_size) for bit in range(8)
    ]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        outcomes = pool.submit(refusals, where, places).result()

    assert {"refused": len(places)} == outcomes


@dataclass(frozen=True, kw_only=True)
class RangeRead:
    """A read that no record's checksum stands behind."""

    tokens: tuple[int, int] | None
    layers: tuple[int, ...] | None


RANGE_READS = {
    "all rows": RangeRead(tokens=None, layers=None),
    "one row": RangeRead(tokens=(699, 700), layers=None),
    "one layer": RangeRead(tokens=(10, 690), layers=(4,)),
    "the last chunk": RangeRead(tokens=(520, 690), layers=(4, 5)),
}


def range_outcomes(where: Path, wanted: RangeRead, places: list[tuple[Path, int, int]]) -> Counter[str]:
    """What reading rows of a range gives with one byte changed: the same rows, or an error of the chunk's."""
    key = ("sample-0", 0, 0)
    expected = open_archive(where).read_rows(key, tokens=wanted.tokens, layer_ids=wanted.layers)
    outcomes: Counter[str] = Counter()
    for path, position, mask in places:
        flip(path, position, mask)
        try:
            found = open_archive(where).read_rows(key, tokens=wanted.tokens, layer_ids=wanted.layers)
            outcomes["same" if np.array_equal(expected, found) else f"other rows: {position}"] += 1
        except FormatError as error:
            outcomes[str(error.kind)] += 1
        flip(path, position, mask)
    return outcomes


@pytest.mark.parametrize("read", RANGE_READS)
def test_a_flip_in_a_range_is_refused(tmp_path: Path, read: str) -> None:
    """A range has no checksum to compare: the chunks' alone stand for it, also where a chunk is wanted in part."""
    where = saved(tmp_path / "a", sized([700]))
    (shard,) = shard_files(where)
    places = [(shard, position, mask) for position, mask in every_flip(shard.stat().st_size, step=29)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        outcomes = pool.submit(range_outcomes, where, RANGE_READS[read], places).result()

    assert set(outcomes) <= {"same", "corrupt_chunk"}
    assert outcomes["corrupt_chunk"] > 0


# ----------------------------------------------------------------------------------------------------------------------
# Files that are gone
# ----------------------------------------------------------------------------------------------------------------------

#: What is done to a file.
LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("array", ["routes", "token_ids"])
def test_a_lost_shard_is_an_error(tmp_path: Path, array: str, loss: str) -> None:
    """Never fill values: not for the record, not for a range, not for one layer; also where it was open before."""
    where = saved(tmp_path / "a", sized([700]), shard_bytes=1)
    archive = open_archive(where)
    assert 1 == len(list(archive.values()))
    LOSSES[loss](shard_files(where, array)[0])

    for read in (archive, open_archive(where)):
        for range_ in ({}, {"tokens": (3, 9)}, {"layer_ids": [5]}):
            with pytest.raises(FormatError) as caught:
                read.read(("sample-0", 0, 0), **range_)
            assert ErrorKind.LOST_FILE == caught.value.kind
    (problem,) = verify(where).problems
    assert ("lost_file", "sample-0", 0 if array == "routes" else None, None) == (
        problem.kind,
        problem.sample,
        problem.token,
        problem.layer,
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "name",
    ["records/manifest.json", "records/00000.parquet", "records/keys.u64", "routes/zarr.json"],
)
def test_a_lost_file_of_a_run_is_an_error(tmp_path: Path, name: str, loss: str) -> None:
    """Whatever file a run is made of; the documents of arrays are for other readers, so `verify` alone minds them."""
    where = saved(tmp_path / "a", sized([30, 40]))
    LOSSES[loss](run_folder(where) / name)
    archive = open_archive(where)
    if name == "routes/zarr.json":
        assert 2 == len(list(archive.values()))
    else:
        with pytest.raises(FormatError):
            archive["sample-0", 0, 0]
    assert not verify(where).intact


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["zarr.json", "commits/0000000001.json"])
def test_a_lost_head_is_an_error(tmp_path: Path, name: str, loss: str) -> None:
    """Without its root or its only commit an archive does not open; a byte of white space changes nothing."""
    where = saved(tmp_path / "a", sized([30, 40]))
    LOSSES[loss](where / name)
    if name.startswith("commits") and loss == "cut":
        assert 2 == len(open_archive(where))  # a line's end was lost
        return
    with pytest.raises(FormatError) as caught:
        open_archive(where)
    assert caught.value.kind in (ErrorKind.NOT_ROUTEPLANE, ErrorKind.MANIFEST, ErrorKind.ROLLED_BACK)
    assert not verify(where).intact


def test_a_damaged_commit_falls_back_by_choice_alone(tmp_path: Path) -> None:
    """Opening refuses, `recover` takes the commit before it: no reader gets fewer runs without an error."""
    where = saved(tmp_path / "a", sized([30]))
    save_archive(sized([40], first=1), where, spec=SPEC, run="second")
    flip(where / "commits" / "0000000002.json", 40)

    with pytest.raises(FormatError) as caught:
        open_archive(where)
    assert ErrorKind.MANIFEST == caught.value.kind
    assert 1 == recover(where, tmp_path / "b").intact
    shutil.rmtree(where / "commits")
    found = recover(where, tmp_path / "c")  # from the manifests of the runs themselves
    assert (2, 0, 0) == (found.intact, found.partial, found.lost)


@pytest.mark.parametrize("lost", [["0000000002.json"], ["0000000001.json", "0000000002.json"]], ids=["newest", "all"])
def test_a_lost_commit_is_an_error(tmp_path: Path, lost: list[str]) -> None:
    """The commit before it is not taken for the newest; what was saved last is never missing without an error."""
    where = saved(tmp_path / "a", sized([30]))
    save_archive(sized([40], first=1), where, spec=SPEC, run="second")
    for name in lost:
        (where / "commits" / name).unlink()

    with pytest.raises(FormatError) as caught:
        open_archive(where)
    assert ErrorKind.ROLLED_BACK == caught.value.kind
    assert ErrorKind.ROLLED_BACK in {problem.kind for problem in verify(where).problems}
    assert recover(where, tmp_path / "b").intact in (1, 2)


def test_an_archive_that_was_set_back_is_refused(tmp_path: Path) -> None:
    """A whole older copy agrees with itself: the snapshot that was kept elsewhere shows it, one that was built on does
    not."""
    where = saved(tmp_path / "a", sized([30]))
    shutil.copytree(where, tmp_path / "older")
    kept = [open_archive(where).snapshot]
    kept.append(save_archive(sized([40], first=1), where, spec=SPEC).snapshot)
    save_archive(sized([50], first=2), where, spec=SPEC)

    for snapshot in kept:
        assert 3 == len(open_archive(where, expected_snapshot=snapshot))
    assert 1 == len(open_archive(tmp_path / "older", expected_snapshot=kept[0]))
    with pytest.raises(FormatError) as caught:
        open_archive(tmp_path / "older", expected_snapshot=kept[1])
    assert ErrorKind.ROLLED_BACK == caught.value.kind
    assert [ErrorKind.ROLLED_BACK] == [
        problem.kind for problem in verify(tmp_path / "older", expected_snapshot=kept[1]).problems
    ]
    # the same number with another history
    save_archive(sized([41], first=1), tmp_path / "older", spec=SPEC)
    with pytest.raises(FormatError):
        open_archive(tmp_path / "older", expected_snapshot=kept[1])
    with pytest.raises(UsageError):
        open_archive(where, expected_snapshot="newest")


# ----------------------------------------------------------------------------------------------------------------------
# Versions
# ----------------------------------------------------------------------------------------------------------------------


def reseal(path: Path, **changes: object) -> None:
    """A commit or manifest with other members, and the seal that belongs to them."""
    path.write_bytes(seal({**json.loads(path.read_bytes())["body"], **changes}))


@pytest.mark.parametrize("version", ["2.0", "1.2", "17.3", "1", "", None, 1.0])
def test_another_version_is_refused(tmp_path: Path, version: object) -> None:
    """A major version that is not known, or none that is a version, in the root or in a commit."""
    where = saved(tmp_path / "a", sized([30]))
    commit, root = where / "commits" / "0000000001.json", where / "zarr.json"
    kept = commit.read_bytes()
    reseal(commit, archive=version)
    with pytest.raises(FormatError) as caught:
        open_archive(where)
    assert ErrorKind.VERSION == caught.value.kind
    commit.write_bytes(kept)
    document = json.loads(root.read_bytes())
    document["attributes"]["routeplane"]["archive"] = version
    root.write_text(json.dumps(document))
    for attempt in (open_archive, lambda path: save_archive([], path, spec=SPEC)):
        with pytest.raises(FormatError) as caught:
            attempt(where)
        assert ErrorKind.VERSION == caught.value.kind
    assert [ErrorKind.VERSION] == [problem.kind for problem in verify(where).problems]


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": [{"name": "../../etc"}]},
        {"runs": "none"},
        {"spec": {}},
        {"number": -1},
        {"number": 7},
    ],
    ids=["a run that is a path", "runs that are none", "no spec", "a number below 0", "another number"],
)
def test_a_sealed_commit_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """Made by something else, with a right seal."""
    where = saved(tmp_path / "a", sized([30]))
    reseal(where / "commits" / "0000000001.json", **changes)
    with pytest.raises(FormatError) as caught:
        open_archive(where)
    assert ErrorKind.MANIFEST == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Listing
# ----------------------------------------------------------------------------------------------------------------------


def chunk_place(shard: Path, index: int) -> int:
    """Where a chunk of a shard begins, by its index of three layers and one row of chunks."""
    entries = np.frombuffer(shard.read_bytes()[-(3 * 16 + 4) : -4], dtype="<u8").reshape(-1, 2)
    return int(entries[index, 0])


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, list[RouteRecord]]:
    """Records of 300, 1,300 and 40 tokens; damage: layer 4 of rows 512 to 1023, and the shard of rows 1536 on lost."""
    records = sized([300, 1_300, 40])
    where = saved(tmp_path / "a", records, shard_bytes=1)
    shards = shard_files(where)
    flip(shards[1], chunk_place(shards[1], 1) + 3)
    shards[3].unlink()
    return where, records


def test_all_damage_is_listed(damaged: tuple[Path, list[RouteRecord]]) -> None:
    """With sample, first token and layer of each damaged chunk; the layer is left open where all of them are."""
    check = verify(damaged[0])

    assert [
        ("corrupt_chunk", "sample-1", 212, 4),
        ("lost_file", "sample-1", 1_236, None),
        ("lost_file", "sample-2", 0, None),
    ] == [(str(problem.kind), problem.sample, problem.token, problem.layer) for problem in check.problems]
    assert (1, 2, 300, False) == (check.records, check.damaged, check.tokens, check.intact)
    assert "tokens 212 to 723" in check.problems[0].message


def test_damage_of_tables_and_runs_is_listed(tmp_path: Path) -> None:
    """A run whose manifest is gone, a table whose bytes changed: how many records that cost is said."""
    where = saved(tmp_path / "a", sized([30, 31]))
    save_archive(sized([40, 41, 42], first=5), where, spec=SPEC, run="second")
    save_archive(sized([50], first=9), where, spec=SPEC, run="third")
    (run_folder(where) / "records" / "manifest.json").unlink()
    flip(run_folder(where, "second") / "records" / "00000.parquet", 30)
    check = verify(where)

    assert (1, 5, 50) == (check.records, check.damaged, check.tokens)
    assert [ErrorKind.LOST_FILE, ErrorKind.CORRUPT_CHUNK] == [problem.kind for problem in check.problems]
    assert "records 0 to 2 of run second" in check.problems[1].message
    found = recover(where, tmp_path / "b")
    assert (1, 0, 5) == (found.intact, found.partial, found.lost)


def test_a_record_that_differs_from_its_checksum_is_listed(tmp_path: Path) -> None:
    """Chunks that are intact and another record's: what the record itself says."""
    where = saved(tmp_path / "a", sized([30]))
    other = saved(tmp_path / "b", sized([30], routes=sized([30], first=3)[0].routes))
    shutil.copytree(run_folder(other) / "routes", run_folder(where) / "routes", dirs_exist_ok=True)
    sizes = {path.stat().st_size for folder in (where, other) for path in shard_files(folder)}
    if len(sizes) == 1:
        with pytest.raises((ChecksumError, FormatError)):
            list(open_archive(where).values())
    assert ["sample-0"] == [problem.sample for problem in verify(where).problems]


# ----------------------------------------------------------------------------------------------------------------------
# Keeping
# ----------------------------------------------------------------------------------------------------------------------


def test_recover_keeps_what_is_intact(damaged: tuple[Path, list[RouteRecord]], tmp_path: Path) -> None:
    """Every row outside the damaged chunks, by token and layer; captures that say which are gone."""
    where, records = damaged
    before = {path: path.read_bytes() for path in files(where)}
    found = recover(where, tmp_path / "b")
    kept = list(open_archive(tmp_path / "b").values())

    assert (1, 2, 0) == (found.intact, found.partial, found.lost)
    assert content(records[0]) == content(kept[0])
    expected_SLK = records[1].routes.copy()
    expected_SLK[212:724, 1] = -1
    expected_SLK[1_236:] = -1
    assert np.array_equal(expected_SLK, kept[1].routes)
    assert np.array_equal(records[1].token_ids, kept[1].token_ids)
    assert [(0, 212, "captured"), (212, 724, "partial"), (724, 1_236, "captured"), (1_236, 1_299, "lost")] == [
        (capture.start, capture.stop, capture.state) for capture in kept[1].captures[:-1]
    ]
    assert ["true", "true"] == [item.attributes["recovered"] for item in kept[1:]]
    assert verify(tmp_path / "b").intact
    assert before == {path: path.read_bytes() for path in files(where)}
    assert verify(where).problems == found.problems


def test_recover_leaves_out_records_without_tokens(tmp_path: Path) -> None:
    """Rows without the tokens that they belong to are not a record; they are counted."""
    where = saved(tmp_path / "a", sized([30, 5_000, 30]))
    shard = shard_files(where, "token_ids")[0]
    flip(shard, 3)
    found = recover(where, tmp_path / "b")

    assert (1, 0, 2) == (found.intact, found.partial, found.lost)
    assert ["sample-2"] == [key.sample_id for key in open_archive(tmp_path / "b")]


def test_recover_overwrites_nothing(tmp_path: Path) -> None:
    """A place that holds something is refused."""
    where = saved(tmp_path / "a", sized([30]))
    with pytest.raises(UsageError):
        recover(where, where)


# ----------------------------------------------------------------------------------------------------------------------
# Reading on
# ----------------------------------------------------------------------------------------------------------------------


def test_quarantine_reads_on(damaged: tuple[Path, list[RouteRecord]]) -> None:
    """By choice a damaged record comes without its rows, marked and counted; by default its error comes."""
    where, records = damaged
    source = open_archive(where, on_corrupt="quarantine").select(layer_ids=[1, 4])
    found = list(source)

    assert [item.key for item in records] == [item.key for item in found]
    assert content(records[0].select([1, 4])) == content(found[0])
    assert [False, True, True] == ["quarantined" in item.attributes for item in found]
    assert {"lost", "not_fed"} == {capture.state for item in found[1:] for capture in item.captures}
    assert [1, 2] == [item.index for item in source.report().quarantined]
    assert [ErrorKind.CORRUPT_CHUNK, ErrorKind.LOST_FILE] == [item.error.kind for item in source.report().quarantined]
    with pytest.raises(FormatError):
        list(open_archive(where).select())
    judged = microbatches(open_archive(where, on_corrupt="quarantine", max_missing=0.1).select(), tokens=4_000)
    with pytest.raises(DataError):
        list(judged)


def test_damage_outside_of_what_is_read_does_not_matter(damaged: tuple[Path, list[RouteRecord]]) -> None:
    """Layers and tokens that were not asked for are not read."""
    where, records = damaged
    found = list(islice(open_archive(where).select(layer_ids=[1, 5], tokens=(0, 1_000)), 2))

    assert contents([records[0].slice(0, 300).select([1, 5]), records[1].slice(0, 1_000).select([1, 5])]) == contents(
        found
    )
