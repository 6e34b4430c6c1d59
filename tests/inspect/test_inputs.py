"""Sources: what stands at a path is read as itself, patterns are sets, a sample is found by the name people use."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import obstore
import pytest
from obstore.store import from_url

from routeplane.archive import save_archive
from routeplane.cli.convert import convert
from routeplane.cli.main import main
from routeplane.errors import ErrorKind, FormatError, SpecError, UsageError
from routeplane.inspect.inputs import SALVAGE, find_sources, is_wanted, parse_sample
from routeplane.record.record import RecordKey
from routeplane.stream import new_stream, open_stream
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.archive.object_store import BUCKET, options, running_store
from tests.inspect.containers import PLACINGS, archived, streamed
from tests.inspect.runs import run

SPEC = watermarked_spec()
RECORDS = [watermarked_record(index, num_tokens=6 + index, spec=SPEC) for index in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two streams of one run."""
    streamed(tmp_path / "run-1.arrows", RECORDS[2:])
    streamed(tmp_path / "run-0.arrows", RECORDS[:2])
    return tmp_path


def test_a_pattern_gives_every_record_in_sorted_order_once(folder: Path) -> None:
    """A path that a pattern names too is not read twice."""
    found = find_sources([str(folder / "run-*.arrows"), str(folder / "run-1.arrows")])
    assert [record.key for record in RECORDS] == [record.key for record in found.records()]
    assert found.spec == SPEC


def test_a_name_that_exists_is_not_expanded(tmp_path: Path) -> None:
    """As a pattern ``run[1].arrows`` is ``run1.arrows``: a shell's expansion would read another file, or none."""
    named = streamed(tmp_path / "run[1].arrows", RECORDS[:1])
    streamed(tmp_path / "run1.arrows", RECORDS[1:])
    found = find_sources([str(named)])
    assert [RECORDS[0].key] == [record.key for record in found.records()]


def test_a_file_under_two_names_is_read_once(folder: Path) -> None:
    """A link to it, or another spelling of its path; the first name stays, in its place."""
    (folder / "latest.arrows").symlink_to("run-1.arrows")
    names = [str(folder / name) for name in ("run-0.arrows", "latest.arrows", "../" + folder.name + "/run-0.arrows")]
    found = find_sources([*names, str(folder / "run-1.arrows")])
    assert tuple(names[:2]) == found.paths
    assert [record.key for record in RECORDS] == [record.key for record in found.records()]


def test_a_pipe_is_copied_so_that_it_can_be_read_twice(tmp_path: Path) -> None:
    """Commands read for the spec and for the records; of a pipe the second would wait for ever."""
    streamed(tmp_path / "a.arrows", RECORDS)
    with subprocess.Popen(["cat", str(tmp_path / "a.arrows")], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        found = find_sources([f"/dev/fd/{cat.stdout.fileno()}"])
    for _ in range(2):
        assert [record.key for record in RECORDS] == [record.key for record in found.records()]


@pytest.fixture(params=PLACINGS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The records in a stream, in an archive, and in one of each."""
    return PLACINGS[request.param](tmp_path, RECORDS)


def test_every_container_gives_the_records_in_order(places: list[str]) -> None:
    """Whole, verified, and in the order in which they were written."""
    found = find_sources(places)
    assert [record.checksum for record in RECORDS] == [record.checksum for record in found.records()]
    assert SPEC == found.spec


def test_layers_and_samples_are_cut_while_reading(places: list[str]) -> None:
    """The rows are those of the layer, the records those of the names."""
    found = find_sources(places)
    records = list(found.records(layer_ids=[5], samples=["sample-2", "sample-0/0/0", "unknown"]))
    assert [RECORDS[index].select([5]).checksum for index in (0, 2)] == [record.checksum for record in records]
    with pytest.raises(SpecError):
        list(found.records(layer_ids=[3]))


def test_a_sample_is_found_wherever_it_rests(places: list[str]) -> None:
    """In the first source and in the last."""
    found = find_sources(places)
    assert [RECORDS[0].checksum, RECORDS[3].checksum] == [found.find(f"sample-{index}").checksum for index in (0, 3)]
    with pytest.raises(UsageError, match="sample-9"):
        found.find("sample-9")


def test_one_archive_can_be_looked_up(tmp_path: Path) -> None:
    """A stream cannot, and two sources are none."""
    archive, stream = archived(tmp_path / "a.zarr", RECORDS[:2]), streamed(tmp_path / "b.arrows", RECORDS[2:])
    lookup = find_sources([archive]).lookup()
    assert lookup is not None
    assert [record.key for record in RECORDS[:2]] == list(lookup)
    assert [None, None] == [find_sources(paths).lookup() for paths in ([stream], [archive, stream])]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a", ("a", None, None)),
        ("a/1/2", ("a", 1, 2)),
        ("a/b", ("a/b", None, None)),
        ("a/b/0/3", ("a/b", 0, 3)),
        ("a/b/c", ("a/b/c", None, None)),
        ("/0/0", ("/0/0", None, None)),
    ],
)
def test_names_are_read_as_reports_print_them(text: str, parsed: tuple[str, int | None, int | None]) -> None:
    """Attempt and segment are numbers behind the last two slashes; everything else is the id."""
    assert parsed == parse_sample(text)


def test_a_key_is_found_by_its_printed_form() -> None:
    """Also where the id itself looks like a key with numbers."""
    key = RecordKey("a/7/8", 1, 2)
    assert is_wanted(key, [parse_sample("/".join(map(str, key)))])
    assert not is_wanted(key, [("a", 7, 8)])


def test_a_sample_is_found_and_a_name_of_several_is_refused(tmp_path: Path) -> None:
    """Two attempts of one sample: the error names both keys."""
    again = replace(RECORDS[0], attempt=1, checksum=None)
    found = find_sources([streamed(tmp_path / "a.arrows", [RECORDS[0], again, RECORDS[1]])])
    assert RECORDS[1].checksum == found.find("sample-1").checksum
    assert again.checksum == found.find("sample-0/1/0").checksum
    with pytest.raises(UsageError, match="sample-0/0/0 and sample-0/1/0") as caught:
        found.find("sample-0")
    assert ErrorKind.ARGUMENT == caught.value.kind
    with pytest.raises(UsageError, match="sample-9"):
        found.find("sample-9")


def test_sources_of_two_models_are_refused_with_the_path(folder: Path) -> None:
    """Counts of two geometries never share a table."""
    others = [watermarked_record(index, num_tokens=3, spec=watermarked_spec(layers=(1, 2))) for index in range(2)]
    streamed(folder / "run-2.arrows", others)
    archived(folder / "run-3.zarr", others)
    for pattern, name in (("run-[012].arrows", r"run-2\.arrows"), ("run-[013].*", r"run-3\.zarr")):
        with pytest.raises(SpecError, match=name):
            find_sources([str(folder / pattern)])


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    """A pattern that matches nothing, no pattern, a file that is not a stream, a path that is not there."""
    with pytest.raises(UsageError, match="matches"):
        find_sources([str(tmp_path / "*.arrows")])
    with pytest.raises(UsageError, match="at least one"):
        find_sources([])
    (tmp_path / "text").write_text("not a stream")
    with pytest.raises(FormatError):
        find_sources([str(tmp_path / "text")])
    with pytest.raises(FileNotFoundError):
        find_sources([str(tmp_path / "nowhere")])


# ----------------------------------------------------------------------------------------------------------------------
# Every kind of place
# ----------------------------------------------------------------------------------------------------------------------


def test_parquet_a_folder_of_blocks_and_a_file_url_are_sources(tmp_path: Path) -> None:
    """Recognised by what lies there, not by a name."""
    folder = tmp_path / "blocks"
    (folder / "producer-0").mkdir(parents=True)
    streamed(folder / "producer-0" / "0.arrows", RECORDS[:2])
    streamed(folder / "producer-0" / "1.arrows", RECORDS[2:])
    convert(folder / "producer-0" / "0.arrows", tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / "without-suffix")
    places = {str(folder): RECORDS, str(tmp_path / "without-suffix"): RECORDS[:2], folder.as_uri(): RECORDS}
    for place, records in places.items():
        assert [record.key for record in records] == [record.key for record in find_sources([place]).records()]


def test_salvage_goes_on_after_damage_and_lists_it(tmp_path: Path) -> None:
    """A file that is not a stream, and a cut one, between whole ones."""
    whole = streamed(tmp_path / "0.arrows", RECORDS[:2])
    cut = Path(streamed(tmp_path / "1.arrows", RECORDS[2:]))
    cut.write_bytes(cut.read_bytes()[:-8])
    read = find_sources([whole, cut], policy=SALVAGE).records()
    assert [record.key for record in RECORDS] == [record.key for record in read]
    assert [(str(cut), ErrorKind.TRUNCATED)] == [(name, problem.kind) for name, problem in read.damage]


# ----------------------------------------------------------------------------------------------------------------------
# URLs
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket() -> Iterator[int]:
    """The port of an object store."""
    with running_store() as port:
        yield port


def test_a_file_url_is_a_path_for_streams_too(tmp_path: Path) -> None:
    """Also one with a space in it, to write and to read."""
    url = (tmp_path / "a b.arrows").as_uri()
    with new_stream(url, SPEC) as sink:
        sink.write(RECORDS[0])
    assert (tmp_path / "a b.arrows").is_file()
    assert [RECORDS[0].key] == [record.key for record in open_stream(url)]


@pytest.mark.parametrize("suffix", [".arrows", ".parquet"])
def test_what_fsspec_opens_is_a_source(tmp_path: Path, suffix: str) -> None:
    """Streams and Parquet of file systems that pyarrow does not know; an unknown scheme is refused."""
    convert(streamed(tmp_path / "a.arrows", RECORDS), tmp_path / f"b{suffix}")
    url = f"memory://routeplane/{tmp_path.name}{suffix}"
    with fsspec.open(url, "wb") as file:
        file.write((tmp_path / f"b{suffix}").read_bytes())

    assert [record.key for record in RECORDS] == [record.key for record in find_sources([url]).records()]
    with pytest.raises(FileNotFoundError):
        find_sources([f"memory://routeplane/none{suffix}"])
    with pytest.raises(UsageError, match="fsspec"):
        find_sources([f"nothing://routeplane/none{suffix}"])


def test_an_object_store_holds_streams_and_archives(
    tmp_path: Path, bucket: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over S3: the same commands; credentials of an archive come from where obstore looks."""
    stream = Path(streamed(tmp_path / "a.arrows", RECORDS)).read_bytes()
    obstore.put(from_url(f"s3://{BUCKET}", **options(bucket)), "runs/a.arrows", stream)
    save_archive(RECORDS, f"s3://{BUCKET}/a", spec=SPEC, options=options(bucket))
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_ENDPOINT": f"http://127.0.0.1:{bucket}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }.items():
        monkeypatch.setenv(name, value)
    where = f"s3://{BUCKET}/runs/a.arrows?endpoint_override=127.0.0.1:{bucket}&scheme=http&region=us-east-1"
    for url in (where, f"s3://{BUCKET}/a"):
        for command in ("info", "validate", "stats"):
            capsys.readouterr()
            assert 0 == main(arguments=[command, url, "--json"]), url
            assert 4 == json.loads(capsys.readouterr().out)["records"]
    assert 2 == main(arguments=["info", where.replace("a.arrows", "none.arrows")])
    assert 2 == main(arguments=["info", f"s3://{BUCKET}/none"])


def test_one_path_is_one_place(tmp_path: Path) -> None:
    """Not as many places as it has characters, of which the first is the root folder."""
    path = streamed(tmp_path / "a.arrows", run(1))
    assert (path,) == find_sources(path).paths
