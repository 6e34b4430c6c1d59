"""Tables for analysis: the same counts of experts in every library, and null where a row is MISSING."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import polars
import pyarrow.parquet as pq
import pytest
import ray
import xarray

from routeplane.archive import open_archive, save_archive
from routeplane.errors import DataError, UsageError
from routeplane.inspect.export import tables, to_arrow, to_pandas, to_polars, write_tables
from routeplane.record.prefixes import as_delta
from tests.inspect.runs import SPEC, run
from tests.plain_columns import KINDS, column_record
from tests.ray_cluster import local_cluster

RECORDS = run(3, lost=5)
#: Layer, expert -> rows, counted from the records themselves.
EXPECTED: Counter[tuple[int, int]] = Counter(
    (layer_id, int(expert))
    for record in RECORDS
    for slot, layer_id in enumerate(SPEC.layer_ids)
    for expert in record.routes[:, slot].ravel()
    if expert >= 0
)


def _polars(path: Path) -> Counter[tuple[int, int]]:
    frame = polars.read_parquet(path).explode("experts").drop_nulls("experts")
    return Counter(zip(frame["layer"].to_list(), frame["experts"].to_list(), strict=True))


def _duckdb(path: Path) -> Counter[tuple[int, int]]:
    with duckdb.connect() as database:
        return Counter(database.execute(f"select layer, unnest(experts) from '{path}'").fetchall())


def _pandas(path: Path) -> Counter[tuple[int, int]]:
    frame = pq.read_table(path).to_pandas().explode("experts").dropna(subset=["experts"])
    return Counter(zip(frame["layer"].tolist(), frame["experts"].tolist(), strict=True))


def _arrow(path: Path) -> Counter[tuple[int, int]]:
    rows = pq.read_table(path).select(["layer", "experts"]).to_pylist()
    return Counter((row["layer"], expert) for row in rows for expert in row["experts"] or ())


def _datasets(path: Path) -> Counter[tuple[int, int]]:
    found = datasets.Dataset.from_parquet(str(path), cache_dir=str(path.parent / "cache"))
    return Counter((row["layer"], expert) for row in found for expert in row["experts"] or ())


READERS: dict[str, Callable[[Path], Counter[tuple[int, int]]]] = {
    "polars": _polars,
    "duckdb": _duckdb,
    "pandas": _pandas,
    "arrow": _arrow,
    "datasets": _datasets,
}


@pytest.mark.parametrize("library", READERS)
def test_every_library_counts_the_same_experts(tmp_path: Path, library: str) -> None:
    """From the flat file, whatever reads it."""
    assert 3 == write_tables(RECORDS, tmp_path / "flat.parquet", form="flat")
    assert EXPECTED == READERS[library](tmp_path / "flat.parquet")


@pytest.mark.xdist_group("ray")  # at most one cluster at a time
def test_ray_data_counts_the_same_experts(tmp_path: Path) -> None:
    """A file for analysis is plain Parquet: Ray Data reads it without this library."""
    write_tables(RECORDS, tmp_path / "flat.parquet", form="flat")
    with local_cluster():
        rows = ray.data.read_parquet(str(tmp_path / "flat.parquet")).take_all()

    assert EXPECTED == Counter((row["layer"], int(expert)) for row in rows for expert in row["experts"] or ())


def test_xarray_counts_the_same_experts_in_an_archive(tmp_path: Path) -> None:
    """Where the fill value says which rows are MISSING, and the attributes which layers there are."""
    save_archive(RECORDS, tmp_path / "a.zarr", spec=SPEC, run="r")
    group = open_archive(tmp_path / "a.zarr").group("r")
    found = xarray.open_zarr(tmp_path / "a.zarr" / group, consolidated=False)
    counted: Counter[tuple[int, int]] = Counter()
    for slot, layer_id in enumerate(found.attrs["layer_ids"]):
        ids = found["routes"].isel(layers=slot).to_numpy().ravel()
        ids, counts = np.unique(ids[ids != found.attrs["missing"]], return_counts=True)
        counted.update(dict(zip(((layer_id, int(one)) for one in ids), counts.tolist(), strict=True)))
    assert EXPECTED == counted


def test_a_nested_file_has_plain_lists_and_null_rows(tmp_path: Path) -> None:
    """Tokens, layers, experts; what is MISSING has no ids at all."""
    write_tables(RECORDS, tmp_path / "nested.parquet", form="nested")
    rows = pq.read_table(tmp_path / "nested.parquet").to_pylist()
    counted: Counter[tuple[int, int]] = Counter()
    for row, record in zip(rows, RECORDS, strict=True):
        assert (record.num_tokens, list(SPEC.layer_ids)) == (len(row["routes"]), row["layer_ids"])
        for token in row["routes"]:
            for layer_id, experts in zip(row["layer_ids"], token, strict=True):
                counted.update((layer_id, expert) for expert in experts or ())
        assert [None] * 3 == row["routes"][-1]
    assert EXPECTED == counted


def test_frames_of_one_record_and_of_several() -> None:
    """One row a token and layer, in order."""
    one = RECORDS[0]
    assert one.num_tokens * 3 == to_arrow(one).num_rows == to_polars(one).height == len(to_pandas(one))
    assert sum(record.num_tokens for record in RECORDS) * 3 == to_polars(RECORDS).height
    assert 0 == to_arrow([]).num_rows
    states = to_polars(one).group_by("state").len()
    assert {"captured", "lost", "not_fed"} == set(states["state"].to_list())


def test_another_form_is_refused() -> None:
    """Two forms there are."""
    form: Any = "wide"
    with pytest.raises(UsageError):
        tables(RECORDS, form=form)


# ----------------------------------------------------------------------------------------------------------------------
# Aligned columns
# ----------------------------------------------------------------------------------------------------------------------


def test_columns_of_every_kind_are_in_the_frames(tmp_path: Path) -> None:
    """Lists, arrays and unknown entries, one record a row or one token and layer a row; a lean delta has its own."""
    base, record = column_record(0, 4), column_record(0, 7)
    base = replace(base, segment=1, logprobs=None, checksum=None)
    record = replace(record, logprobs=None, checksum=None)
    delta = as_delta(record, base)
    nested = to_polars([record, delta], form="nested")
    write_tables([record, delta], tmp_path / "flat.parquet", form="flat")
    flat = polars.read_parquet(tmp_path / "flat.parquet")

    assert 7 - len(delta.token_ids) == delta.tokens_start
    for kind in KINDS:
        held = [record.columns[kind].tolist(), delta.columns[kind].tolist()]
        assert held == nested[kind].to_list(), kind
        own = delta.columns[kind].tolist()[delta.routes_start - delta.tokens_start :]
        assert [
            one if one is None or kind != "layers" else one[slot] for one in [*held[0], *own] for slot in range(2)
        ] == flat[kind].to_list(), kind


def test_columns_that_the_table_cannot_hold_are_refused(tmp_path: Path) -> None:
    """A name of the table's own; and records with other columns, in one file."""
    record = column_record(0, 4)
    with pytest.raises(UsageError, match="experts"):
        to_arrow(replace(record, columns={"experts": [0, 1, 2, 3]}, checksum=None))
    with pytest.raises(DataError, match="first record"):
        write_tables([record, replace(record, columns={}, checksum=None)], tmp_path / "x.parquet", form="flat")
    assert [] == list(tmp_path.iterdir())
    assert 4 * 2 == to_arrow([record, replace(record, columns={}, checksum=None)])["maybe"].slice(8).null_count
