"""Statistics counted by Ray's workers: on a real cluster, against ``collect`` in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.inspect.inputs import find_sources
from routeplane.inspect.ray_data import collect_on_ray
from routeplane.inspect.statistics import collect
from tests.cli.test_main import Program
from tests.inspect.containers import PLACINGS, archived, streamed
from tests.inspect.runs import SPEC, run
from tests.ray_cluster import local_cluster

# one worker for all files that start a cluster: at most one at a time
pytestmark = pytest.mark.xdist_group("ray")

RECORDS = run(9, lost=10)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray, for all of this file."""
    with local_cluster():
        yield


@pytest.fixture(params=PLACINGS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The run in a stream, in an archive, and split over one of each."""
    return PLACINGS[request.param](tmp_path, RECORDS)


def test_workers_count_what_one_process_counts(places: list[str]) -> None:
    """Every number, of all layers and samples."""
    assert collect(RECORDS, SPEC).to_dict() == collect_on_ray(find_sources(places)).to_dict()


def test_some_layers_and_samples_are_counted_alike(places: list[str]) -> None:
    """The pass over a selection is the pass over selected records."""
    chosen = [RECORDS[index].select([5]) for index in (1, 8)]
    found = collect_on_ray(find_sources(places), layer_ids=[5], samples=["step-1/1", "step-2/8/0/0"])
    assert collect(chosen, SPEC.select([5])).to_dict() == found.to_dict()
    assert 2 == found.coverage.records


def test_the_command_prints_the_same_with_and_without_a_cluster(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ray's own lines never reach stdout."""
    routeplane = Program(capsys)
    places = PLACINGS["both"](tmp_path, RECORDS)
    alone, together = routeplane("stats", *places, "--json"), routeplane("stats", *places, "--json", "--ray")
    assert (0, 0, alone.document) == (alone.status, together.status, together.document)
    counts = {name: value for name, value in json.loads(alone.out).items() if name not in ("findings", "damage")}
    assert counts == json.loads(json.dumps(collect(RECORDS, SPEC).to_dict()))


def test_damage_comes_out_as_the_librarys_error(tmp_path: Path) -> None:
    """A worker that finds a lost shard, or a changed token, ends the pass with the kind of what it found."""
    archive = Path(archived(tmp_path / "run.zarr", RECORDS))
    sources = find_sources([str(archive)])
    next(path for path in sorted(archive.glob("runs/*/routes/c/**/*")) if path.is_file()).unlink()
    with pytest.raises(FormatError) as lost:
        collect_on_ray(sources)
    assert ErrorKind.LOST_FILE == lost.value.kind
    stream = Path(streamed(tmp_path / "run.arrows", RECORDS))
    data = bytearray(stream.read_bytes())
    token = RECORDS[4].token_ids[:8].astype("<i4").tobytes()
    data[data.index(token)] ^= 1
    stream.write_bytes(data)
    with pytest.raises(DataError) as changed:
        collect_on_ray(find_sources([str(stream)]))
    assert ErrorKind.CHECKSUM == changed.value.kind
