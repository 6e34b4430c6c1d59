"""An archive gives back what was saved: whole, in ranges, over runs, as mapping and source, and to plain zarr."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import numpy as np
import polars
import pytest
import xarray
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from routeplane.archive import ARCHIVE_VERSION, Archive, delete, new_run, open_archive, save_archive
from routeplane.batch import collate, microbatches
from routeplane.batch.dataset import RecordDataset
from routeplane.errors import DataError, ErrorKind, FormatError, SpecError, UsageError
from routeplane.record.interfaces import RouteSink, RouteSource
from routeplane.record.prefixes import resolve
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import FORMAT_VERSION
from routeplane.record.spec import RouteSpec
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.archive.archives import SPEC, WIDE, rich_records, run_folder, saved, shard_files, sized
from tests.stream.streams import content, contents, record, record_lists

# ----------------------------------------------------------------------------------------------------------------------
# Whole records
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["one byte", "two bytes"])
def test_everything_of_a_record_comes_back(tmp_path: Path, spec: RouteSpec) -> None:
    """Every column of a record, its checksum and its prefix included, whatever the type of the ids."""
    records = rich_records(spec=spec)
    archive = open_archive(saved(tmp_path / "a", records, spec=spec))

    assert contents(records) == contents(archive.values())
    assert [item.checksum for item in records] == [item.checksum for item in archive.values()]
    assert contents(resolve(records)) == contents(resolve(archive.values()))


@settings(max_examples=25)
@given(made=record_lists(max_size=5, max_experts=400), cut=st.integers(0, 5), shard_bytes=st.integers(1, 3_000))
def test_any_records_over_two_runs_come_back(
    made: tuple[RouteSpec, list[RouteRecord]], cut: int, shard_bytes: int
) -> None:
    """For all records, split into runs anywhere, in shards of any size: the same records in the same order."""
    spec, records = made
    with TemporaryDirectory() as folder:
        for part in (records[:cut], records[cut:]):
            save_archive(part, folder, spec=spec, shard_bytes=shard_bytes)
        archive = open_archive(folder)

        assert [item.key for item in records] == list(archive)
        assert contents(records) == contents(archive.values())
        assert contents(records) == contents(archive.select())


def test_the_longest_run_is_cut_into_shards(tmp_path: Path) -> None:
    """A record may span shards, chunks and neither; each shard is of bounded size."""
    records = sized([1, 511, 512, 513, 2_000, 3, 700])
    where = saved(tmp_path / "a", records, shard_bytes=512 * 3 * 2)
    archive = open_archive(where)

    assert -(-sum(item.num_tokens for item in records) // 512) == len(shard_files(where))
    assert contents(records) == contents(archive.values())


def test_rows_that_are_all_missing_are_stored_like_others(tmp_path: Path) -> None:
    """A shard without any id is there, so that its loss would show."""
    lost = [item.without_routes() for item in sized([1_500])]
    where = saved(tmp_path / "a", lost, shard_bytes=1)

    assert 3 == len(shard_files(where))
    assert contents(lost) == contents(open_archive(where).values())


def test_an_archive_without_records(tmp_path: Path) -> None:
    """A run without records is a commit, and nothing to read."""
    save_archive([], tmp_path / "a", spec=SPEC)
    archive = open_archive(tmp_path / "a")

    assert (0, [], 0, SPEC) == (len(archive), list(archive), archive.num_tokens, archive.spec)
    assert [] == list(archive.select())


# ----------------------------------------------------------------------------------------------------------------------
# Ranges
# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Tokens of a record of 1,300, and layers of SPEC."""
    start = draw(st.integers(0, 1_299))
    layers = draw(st.lists(st.sampled_from(SPEC.layer_ids), min_size=1, unique=True))
    return start, draw(st.integers(start + 1, 1_300)), layers


@settings(max_examples=30)
@given(wanted=ranges())
def test_a_range_is_the_slice_of_the_record(wanted: tuple[int, int, list[int]], ranged: Archive) -> None:
    """Reading tokens and layers gives what slicing and selecting the whole record gives, checksum included."""
    start, stop, layers = wanted
    key = RecordKey("sample-1", 0, 0)
    whole = ranged[key]
    expected = whole.slice(start, stop).select(layers)
    found = ranged.read(key, tokens=(start, stop), layer_ids=layers)

    assert (content(expected), expected.checksum) == (content(found), found.checksum)
    assert content(whole.select(layers)) == content(ranged.read(key, layer_ids=layers))
    assert content(whole.slice(start, stop)) == content(ranged.read(key, tokens=(start, stop)))
    assert np.array_equal(expected.routes, ranged.read_rows(key, tokens=(start, stop), layer_ids=layers))


@pytest.fixture(scope="module")
def ranged(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """Three records in shards of one row of chunks."""
    where = tmp_path_factory.mktemp("ranged")
    return open_archive(saved(where, sized([300, 1_300, 40]), shard_bytes=1))


def test_partial_rows_settle_when_layers_are_selected(tmp_path: Path) -> None:
    """A token captured in some layers is whole, partial or absent over those that are read, as in the record."""
    spec = watermarked_spec()
    found = watermarked_record(0, num_tokens=12, spec=spec, missing=[(3, 1), (4, 1), (4, 2), 6])
    archive = open_archive(saved(tmp_path / "a", [found], spec=spec))

    for layers in ([1], [2, 5], [1, 5], [5]):
        assert content(found.select(layers)) == content(archive.read(found.key, layer_ids=layers))


def test_a_record_that_continues_another_is_cut_like_one(tmp_path: Path) -> None:
    """From the beginning a range keeps the prefix; inside it there are no rows to give, behind it there are."""
    tail = rich_records()[2]
    archive = open_archive(saved(tmp_path / "a", rich_records()))

    for tokens in ((0, 2), (0, 3), (0, 5), (3, 7), (5, 6)):
        assert content(tail.slice(*tokens)) == content(archive.read(tail.key, tokens=tokens))
    with pytest.raises(UsageError) as caught:
        archive.read(tail.key, tokens=(1, 5))
    assert ErrorKind.PREFIX == caught.value.kind


@pytest.mark.parametrize("tokens", [(0, 0), (3, 2), (-1, 4), (0, 301)])
def test_a_range_outside_is_refused(ranged: Archive, tokens: tuple[int, int]) -> None:
    """An interval that is empty or reaches beyond the record is the caller's error."""
    with pytest.raises(UsageError) as caught:
        ranged.read(("sample-0", 0, 0), tokens=tokens)
    assert ErrorKind.ARGUMENT == caught.value.kind


def test_a_layer_that_was_not_captured_is_refused(ranged: Archive) -> None:
    """As from a record."""
    with pytest.raises(SpecError):
        ranged.read(("sample-0", 0, 0), layer_ids=[2])


# ----------------------------------------------------------------------------------------------------------------------
# The mapping and the source
# ----------------------------------------------------------------------------------------------------------------------


def test_it_is_a_mapping(tmp_path: Path) -> None:
    """Keys in the order of saving, plain tuples are keys, others are absent."""
    records = sized([5, 6, 7])
    archive = open_archive(saved(tmp_path / "a", records))

    assert [item.key for item in records] == list(archive.keys())
    assert content(records[1]) == content(archive["sample-1", 0, 0])
    assert ("sample-1", 0, 0) in archive
    for absent in (("sample-1", 1, 0), ("sample-9", 0, 0), "sample-1", 3):
        assert absent not in archive
    with pytest.raises(KeyError):
        archive["sample-1", 0, 1]
    assert archive.get(RecordKey("sample-1", 0, 1)) is None


def test_runs_are_appended(tmp_path: Path) -> None:
    """A run adds to what is there; who opened before sees what was there then; each run keeps what was said of it."""
    records = sized([5, 6, 7, 8])
    where = saved(tmp_path / "a", records[:1], attributes={"step": "1"})
    before = open_archive(where)
    commit = save_archive(records[1:], where, spec=SPEC, run="second", attributes={"step": "2"})
    archive = open_archive(where)

    assert (1, 4, 1, 2, 2) == (len(before), len(archive), before.commit, archive.commit, commit.number)
    assert contents(records[:1]) == contents(before.values())
    assert contents(records) == contents(archive.values())
    assert [("run", 1, 5), ("second", 3, 21)] == [(run.name, run.records, run.tokens) for run in archive.runs]
    assert ["1", "2"] == [archive.attributes(run.name)["step"] for run in archive.runs]
    assert before.digest != archive.digest
    with pytest.raises(KeyError):
        archive.attributes("third")


def test_a_writer_is_a_sink_and_a_reader_a_source(tmp_path: Path) -> None:
    """The ports that capture and batch are given; what a reader counts is the stream's report."""
    sink: RouteSink = new_run(tmp_path / "a", SPEC)
    records = sized([5, 6, 7])
    with sink:
        for item in records:
            sink.write(item)
    source: RouteSource = open_archive(tmp_path / "a", max_missing=0.0).select(tokens=(5, 7), layer_ids=[4])

    assert SPEC.select([4]) == source.spec
    assert [item.slice(5, item.num_tokens).select([4]).checksum for item in records[1:]] == [
        item.checksum for item in source
    ]
    scalars = source.report().scalars()
    assert (2.0, 1.0, 3.0) == tuple(
        scalars[f"routeplane/stream_{name}"] for name in ("records", "outside_selection", "tokens")
    )
    assert source.admit([item.select([4]) for item in records]).admitted


def test_a_trainer_reads_from_it(tmp_path: Path) -> None:
    """Microbatches of an archive are those of its records; a pipeline stage reads its own layers."""
    records = sized([5, 6, 7])
    archive = open_archive(saved(tmp_path / "a", records))
    (micro,) = microbatches(archive.select(layer_ids=[4, 5]), tokens=100)
    expected = collate([item.select([4, 5]) for item in records], SPEC.select([4, 5]), layout="packed")

    assert np.array_equal(expected.routes.numpy(), micro.routes.numpy())
    assert np.array_equal(expected.token_ids.numpy(), micro.token_ids.numpy())


def sources(where: str) -> RouteSource:
    """An opener for a dataset."""
    return open_archive(where).select()


def test_a_dataset_resumes_in_it(tmp_path: Path) -> None:
    """An archive has a digest, so a dataset resumes at the exact record, and refuses one that was appended to."""
    where = str(saved(tmp_path / "a", sized([5, 6, 7, 8])))
    dataset = RecordDataset(where, sources)
    arriving = iter(dataset)
    first = [next(arriving).key, next(arriving).key]
    state = dataset.state_dict()
    again = RecordDataset(where, sources)
    again.load_state_dict(json.loads(json.dumps(state)))

    assert [f"sample-{index}" for index in range(4)] == [key.sample_id for key in first] + [
        item.sample_id for item in again
    ]
    save_archive(sized([9], first=9), where, spec=SPEC)
    with pytest.raises(DataError):
        RecordDataset(where, sources).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_reads(tmp_path: Path) -> None:
    """A loader's worker that was forked after its parent read does not wait for threads that it does not have."""
    where = saved(tmp_path / "a", sized([2_000, 3_000]))
    archive = open_archive(where)
    expected = contents(archive.values())
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert expected == pool.apply_async(read_all, (where,)).get(60)
        assert expected == pool.apply_async(read_all, (where,)).get(60)


def read_all(where: Path) -> list[dict[str, Any]]:
    """What a child does."""
    return contents(open_archive(where).values())


# ----------------------------------------------------------------------------------------------------------------------
# Others read it
# ----------------------------------------------------------------------------------------------------------------------


def test_plain_zarr_opens_it(tmp_path: Path) -> None:
    """Without this library: the geometry in the attributes, the rows by the places in the record table, fill values
    that are never an expert, and a walk over all members that meets nothing unknown."""
    records = sized([300, 700, 20])
    where = saved(tmp_path / "a", records, shard_bytes=1)
    group: Any = zarr.open_group(where, mode="r")
    run = group[open_archive(where).group("run")]
    ours = dict(group.attrs)["routeplane"]
    table = polars.read_parquet(run_folder(where) / "records" / "*.parquet")

    assert (ARCHIVE_VERSION, FORMAT_VERSION, json.loads(SPEC.to_json())) == (
        ours["archive"], ours["format"], ours["spec"]
    )  # fmt: skip
    for item, row in zip(records, table.to_dicts(), strict=True):
        rows = run["routes"][row["row_start"] : row["row_start"] + row["num_tokens"] - row["routes_start"]]
        rows = rows.astype(np.int16)
        assert np.array_equal(item.routes, np.where(rows == 255, -1, rows))
        assert np.array_equal(
            item.token_ids, run["token_ids"][row["token_start"] : row["token_start"] + row["num_tokens"]]
        )
    assert (np.uint8, 255, (512, 1, 2), ("rows", "layers", "topk")) == (
        run["routes"].dtype, run["routes"].fill_value, run["routes"].chunks, run["routes"].metadata.dimension_names
    )  # fmt: skip
    folder = f"runs/{run_folder(where).name}"
    assert {"commits", "runs", folder, f"{folder}/records", f"{folder}/routes", f"{folder}/token_ids"} == {
        name for name, _ in group.members(max_depth=None)
    }


def test_xarray_opens_a_run(tmp_path: Path) -> None:
    """The arrays of a run are one data set with named dimensions; the fill value is what MISSING is stored as."""
    records = rich_records()
    where = saved(tmp_path / "a", records, attributes={"policy": "p-7"})
    found = xarray.open_zarr(where / open_archive(where).group("run"), consolidated=False)
    rows = found["routes"][:7].to_numpy().astype(np.int16)

    assert {"rows": 18, "layers": 3, "topk": 2, "tokens": 21, "files": 0} == dict(found.sizes)
    assert np.array_equal(records[0].routes, np.where(rows == 255, -1, rows))
    assert np.array_equal(records[0].token_ids, found["token_ids"][:7])
    assert {
        "run": "run",
        "model": SPEC.model,
        "num_experts": [64, 64, 64],
        "layer_ids": [1, 4, 5],
        "missing": 255,
        "about": {"policy": "p-7"},
    } == found.attrs


def test_the_record_table_opens_in_polars_and_duckdb(tmp_path: Path) -> None:
    """All runs together as an Arrow table, and the files of one run as plain Parquet, without deleted records."""
    records = rich_records()
    where = saved(tmp_path / "a", records)
    save_archive(sized([5, 6], first=8), where, spec=SPEC, run="second")
    delete(where, keys=[("sample-8", 0, 0)])
    table = open_archive(where).table()
    files = polars.read_parquet(run_folder(where) / "records" / "00000.parquet")
    database = duckdb.connect().register("all_records", table)
    counts = database.execute("select count(*), sum(num_tokens), max(run) from all_records").fetchone()

    assert (4, 27, "second") == counts
    assert [item.checksum for item in records] == polars.DataFrame(table)["checksum"].to_list()[:3]
    assert [item.sample_id for item in records] == files["sample_id"].to_list()
    assert [[span.call for span in item.spans] for item in records] == [
        [span["call"] for span in spans] for spans in files["spans"].to_list()
    ]


# ----------------------------------------------------------------------------------------------------------------------
# URLs
# ----------------------------------------------------------------------------------------------------------------------


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    """The same folder under both names; object stores are `test_object_store`'s."""
    records = sized([300, 700, 20])
    save_archive(records, f"file://{tmp_path}/b", spec=SPEC)
    assert contents(records) == contents(open_archive(tmp_path / "b").values())
    with pytest.raises(UsageError):
        open_archive(tmp_path / "b", options={"region": "nowhere"})


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def test_a_key_is_there_once(tmp_path: Path) -> None:
    """Within a run and over runs; and then nothing of the run was saved."""
    records = sized([5, 6])
    where = saved(tmp_path / "a", records)
    for bad in ([*sized([7], first=7), records[1]], sized([7, 7], first=7) + sized([7], first=7)):
        with pytest.raises(DataError) as caught:
            save_archive(bad, where, spec=SPEC)
        assert ErrorKind.DUPLICATE_KEY == caught.value.kind
    assert contents(records) == contents(open_archive(where).values())
    assert [run_folder(where).name, "zarr.json"] == sorted(path.name for path in (where / "runs").iterdir())


def test_records_of_a_run_have_the_same_token_columns(tmp_path: Path) -> None:
    """As in a stream; another run may have others."""
    where = saved(tmp_path / "a", sized([3], columns={"a": np.arange(3)}))
    mixed = [*sized([3], first=1, columns={"a": np.arange(3)}), *sized([3], first=2)]
    with pytest.raises(DataError) as caught:
        save_archive(mixed, where, spec=SPEC)
    assert ErrorKind.TOKEN_COLUMN == caught.value.kind
    save_archive(sized([3], first=1), where, spec=SPEC)
    assert [{"a"}, set()] == [set(item.columns) for item in open_archive(where).values()]


@pytest.mark.parametrize(
    "spec",
    [RouteSpec(num_experts=64, top_k=2, layer_ids=(1, 4, 6), model=SPEC.model), RouteSpec(
        num_experts=64, top_k=2, layer_ids=(1, 4, 5), model="another")],
    ids=["other layers", "another name"],
)  # fmt: skip
def test_an_archive_holds_one_spec(tmp_path: Path, spec: RouteSpec) -> None:
    """Appending records of another geometry or model is refused before anything is written."""
    where = saved(tmp_path / "a", sized([5]))
    with pytest.raises(SpecError) as caught:
        save_archive([record(9, 5, spec=spec)], where, spec=spec)
    assert ErrorKind.SPEC_MISMATCH == caught.value.kind
    assert 1 == len(open_archive(where))


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101, "zarr.json"])
def test_a_run_name_is_not_a_path(tmp_path: Path, name: str) -> None:
    """A name that could leave the archive, or hide in it, is refused."""
    with pytest.raises(UsageError):
        save_archive([], tmp_path / "a", spec=SPEC, run=name)


def test_what_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    """Nothing at all, a folder of others, another zarr group, a file: each says what it is, and nothing is written."""
    with pytest.raises(FileNotFoundError):
        open_archive(tmp_path / "absent")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    zarr.create_group(tmp_path / "zarr")
    (tmp_path / "file").write_bytes(b"ARROW")
    for where in (foreign, tmp_path / "zarr", tmp_path / "file"):
        for attempt in (open_archive, partial(save_archive, sized([5]), spec=SPEC)):
            with pytest.raises(FormatError) as caught:
                attempt(where)
            assert ErrorKind.NOT_ROUTEPLANE == caught.value.kind
    assert ["notes.txt"] == [path.name for path in foreign.iterdir()]


def test_an_unknown_url_is_refused() -> None:
    """A protocol that obstore does not have, or a store that is gone with its process, is the caller's mistake."""
    for url in ("nothing-such://a/b", "memory://a/b"):
        with pytest.raises(UsageError, match=url) as caught:
            open_archive(url)
        assert caught.value.kind == ErrorKind.ARGUMENT


def test_a_key_that_is_not_text_is_absent(tmp_path: Path) -> None:
    """A lone surrogate is in no record's id; asking for it is not an error."""
    assert ("\ud800", 0, 0) not in open_archive(saved(tmp_path / "a.zarr", sized([5])))


def test_errors_cross_processes(tmp_path: Path) -> None:
    """What an archive raises pickles, kind included."""
    with pytest.raises(UsageError) as caught:
        save_archive([], tmp_path / "a", spec=SPEC, run="../x")
    assert caught.value.kind == pickle.loads(pickle.dumps(caught.value)).kind
