"""Faults of a server with the writer in its engine, in the processes that vLLM always has: a ticket is a promise.

``make engine-faults`` runs all, kills ``ROUNDS`` servers one after another, and prints a table; ``make test-all`` kills
four.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from routeplane.capture.vllm.engine_writer import open_carrier
from routeplane.capture.vllm.interface import WriterConfig
from routeplane.errors import ErrorKind, TransportError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.stream.blocks import ReadOptions
from routeplane.stream.folder import open_reader
from tests.capture.engine_server import FORMS, Answers, Server, ask, hashes, load, record_of, running
from tests.capture.tiny_server import write_model
from tests.capture.vllm_engine import SPEC, assert_equals_reference, reference_rows
from tests.engine_matrix import FAULTS, FIGURES

pytestmark = [pytest.mark.vllm, pytest.mark.engine_faults]


class Table:
    """What was tried, and what held."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str | int | None]] = []

    def add(
        self,
        fault: str,
        answers: Answers,
        readable: int,
        *,
        name: str = "",
        overwritten: int | None = None,
        wrong: int | None = None,
    ) -> None:
        """One row. ``name``: which time it is; ``wrong``: rows of other weights than those that their version names."""
        figures = (len(answers.tickets), readable, answers.broken, overwritten, wrong)
        self.rows.append({"fault": fault, "name": name, **dict(zip(FIGURES, figures, strict=True))})

    def lines(self) -> Iterator[str]:
        """The rows as they came, in columns."""
        cells: list[tuple[str, ...]] = [("", "fault", *FIGURES)]
        cells += [tuple("-" if one is None else str(one) for one in self._cells(row)) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    @staticmethod
    def _cells(row: dict[str, str | int | None]) -> list[str | int | None]:
        return [row["name"], row["fault"], *(row[figure] for figure in FIGURES)]

    def sums(self) -> dict[str, dict[str, int | None]]:
        """Fault -> times and sums of the figures; None for one that the fault has not."""
        found: dict[str, dict[str, int | None]] = {}
        for row in self.rows:
            sums = found.setdefault(str(row["fault"]), {"times": 0, **dict.fromkeys(FIGURES)})
            for name, value in {**row, "times": 1}.items():
                if isinstance(value, int):
                    sums[name] = (sums[name] or 0) + value
        return found


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Printed when the module is done; ``--engine-matrix`` keeps its sums for the page."""
    made = Table()
    yield made
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        reporter.write_line("")
        for line in made.lines():
            reporter.write_line(line)
    if request.config.getoption("--engine-matrix"):
        known = json.loads(FAULTS.read_text(encoding="utf-8")) if FAULTS.exists() else {}
        FAULTS.write_text(json.dumps({**known, **made.sums()}, indent=1) + "\n", encoding="utf-8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """As many restarts as ``--engine-fault-rounds`` says."""
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(metafunc.config.getoption("--engine-fault-rounds")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The tiny model's folder, and the model in Transformers."""
    folder = tmp_path_factory.mktemp("model")
    return folder, write_model(folder)


def require_promises(place: Path, answers: Answers, model: Any, *, compared: int = 12) -> int:
    """Every finished choice has a ticket, every ticket a record, and some records have the rows of Transformers."""
    assert [] == answers.missing[:3]
    cache: dict[Any, Any] = {}
    records = [record_of(place, ticket, cache) for ticket in answers.tickets]
    if model is not None:
        for record in records[:: max(1, len(records) // compared)]:
            assert_equals_reference(record, model)
    return len(records)


def rows_off(record: RouteRecord, version: int | None, model: Any) -> tuple[int, int]:
    """Rows under a version that are not those of a model's weights, in any layer; rows under it."""
    rows_SLK = np.sort(record.routes, axis=2)
    expected_SLK = np.asarray(reference_rows(model, record.token_ids))
    off_S = (rows_SLK != expected_SLK).any(axis=(1, 2))
    under = [
        slice(one.start, one.stop)
        for one in record.captures
        if (one.state, one.weights_version) == ("captured", version)
    ]
    return sum(int(off_S[rows].sum()) for rows in under), sum(len(off_S[rows]) for rows in under)


@pytest.mark.slow
def test_every_form_has_tickets_that_outlive_the_server(model: tuple[Path, Any], table: Table, tmp_path: Path) -> None:
    """All HTTP forms; metrics; SIGTERM under load, with vLLM's default timeout."""
    folder, reference = model
    place = tmp_path / "place"
    with running(folder, place, tmp_path / "log", weights_version=1, spawned=True) as server:
        first = Answers()

        async def each_form() -> None:
            async with httpx.AsyncClient(timeout=60) as client:
                await asyncio.gather(*(ask(client, server.url, form, f"first-{form}", first) for form in FORMS))

        asyncio.run(each_form())
        assert 1 + 3 + 2 + 1 + 1 + 3 + 1 + 1 + 2 == len(first.tickets) + len(first.missing)
        require_promises(place, first, reference, compared=20)
        cache: dict[Any, Any] = {}
        reasons = {
            record.sample_id: record.attributes["finish_reason"]
            for record in (record_of(place, ticket, cache) for ticket in first.tickets)
        }
        assert {"stop"} == {reasons["first-stop string"], reasons["first-stream with a stop string"]}

        lines = httpx.get(f"{server.url}/metrics", timeout=30).text
        assert 'routeplane_engine_lost{engine="0"} 0.0' in lines

        with pytest.raises(UsageError) as taken:
            open_carrier(WriterConfig(place=str(place), run="run-7"), SPEC, producer="engine-0")
        assert ErrorKind.PRODUCER_TAKEN == taken.value.kind
        with pytest.raises(UsageError, match="run"):
            open_carrier(WriterConfig(place=str(place), run="another"), SPEC, producer="engine-9")

        before, last = hashes(place), Answers()
        asyncio.run(_load_and_signal(server, last, lambda: server.process.send_signal(signal.SIGTERM)))
        server.process.wait(timeout=60)
    readable = require_promises(place, last, reference)
    overwritten = len(before.items() - hashes(place).items())
    table.add("SIGTERM, default timeout", last, readable, overwritten=overwritten)
    assert (len(last.tickets), 0) == (readable, overwritten)


async def _load_and_signal(server: Any, answers: Answers, strike: Any, *, after_s: float = 0.5) -> None:
    """Requests of all forms; the blow falls while they run, and a dozen come behind it."""
    struck = asyncio.Event()
    stem = f"load-{os.urandom(3).hex()}"
    running_load = asyncio.create_task(
        load(server.url, stem=stem, count=4_000, answers=answers, patience_s=8, until=struck)
    )
    while len(answers.tickets) < 20:
        await asyncio.sleep(0.05)
    await asyncio.sleep(after_s)
    strike()
    struck.set()
    try:
        await asyncio.wait_for(running_load, 120)
    except TimeoutError:
        running_load.cancel()


BLOWS: dict[str, Any] = {
    "SIGTERM": lambda server: server.process.send_signal(signal.SIGTERM),
    "SIGKILL of the engine core": lambda server: os.kill(server.engine_pid(), signal.SIGKILL),
    "SIGKILL of the front end": lambda server: server.process.kill(),
    "SIGKILL of all": lambda server: os.killpg(server.process.pid, signal.SIGKILL),
}


@pytest.fixture(scope="module")
def long_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One place, on which one server after another is started and killed."""
    return tmp_path_factory.mktemp("rounds") / "place"


@pytest.mark.slow
def test_no_restart_overwrites_and_no_ticket_is_empty(
    model: tuple[Path, Any], table: Table, long_place: Path, tmp_path: Path, number: int
) -> None:
    """Each server is killed under load in another way; what those before it published stays as it is."""
    folder, reference = model
    fault, strike = list(BLOWS.items())[number % len(BLOWS)]
    before, answers = hashes(long_place), Answers()
    with running(folder, long_place, tmp_path / "log") as server:
        asyncio.run(_load_and_signal(server, answers, lambda: strike(server)))
    readable = require_promises(long_place, answers, reference)
    after = hashes(long_place)
    overwritten = len(before.items() - after.items())
    table.add(f"{fault}, then a restart", answers, readable, name=f"round {number}", overwritten=overwritten)
    assert (len(answers.tickets), 0) == (readable, overwritten)


@pytest.mark.slow
def test_a_consumer_that_comes_back_has_all_records(model: tuple[Path, Any], table: Table, tmp_path: Path) -> None:
    """It leaves after five records while the place fills up; the engine waits; it reads on, and nothing is gone."""
    folder, _ = model
    place = tmp_path / "place"
    limits = {"max_bytes": 60_000}
    with running(folder, place, tmp_path / "log", limits=limits, wait_s=60) as server:
        answers, seen = Answers(), []
        with open_reader(place, producers=1) as reader:
            asyncio.run(load(server.url, stem="early", count=9, answers=answers))
            for record in reader:
                seen.append(record.key)
                if len(seen) == 5:
                    break

        async def away_and_back() -> None:
            away = asyncio.create_task(load(server.url, stem="away", count=120, answers=answers))
            await asyncio.sleep(6)
            assert not away.done()  # the place is full
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
            await asyncio.gather(away, asyncio.to_thread(_read_on, place, seen))

        asyncio.run(away_and_back())
        assert 'routeplane_engine_lost{engine="0"} 0.0' in httpx.get(f"{server.url}/metrics", timeout=30).text
    assert [] == answers.missing[:3]
    missing = {ticket.key for ticket in answers.tickets} - set(seen)
    table.add("consumer gone and back", answers, len(answers.tickets) - len(missing))
    assert set() == missing


def _read_on(place: Path, seen: list[Any]) -> None:
    """The consumer is back: it reads until no block has come for a while."""
    with open_reader(place, producers=1, options=ReadOptions(timeout_s=20)) as reader:
        with pytest.raises(TransportError):
            seen.extend(record.key for record in reader)


# ---------------------------------------------------------------------------------------------------------------------
# Weights that change
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_new_weights_never_have_the_old_version(model: tuple[Path, Any], table: Table, tmp_path: Path) -> None:
    """Other weights are loaded between requests, during them, and in a pause; no request names a version.

    A row under a version must be that version's. vLLM 0.30 on a CPU runs other expert weights after a reload than it
    was given, so that the new weights have a reference in the first layer alone, which no expert comes before.
    """
    folder, old = model
    other = tmp_path / "other"
    new = write_model(other, seed=1)
    answers = Answers()
    with running(folder, tmp_path / "place", tmp_path / "log", weights_version=1) as server:
        asyncio.run(_reloads(server, [other, folder], answers))
        assert 'routeplane_engine_weight_updates{engine="0"} 2.0' in httpx.get(f"{server.url}/metrics", timeout=30).text
    assert [] == answers.missing[:3]
    cache: dict[Any, Any] = {}
    records = {
        record.sample_id: record for record in (record_of(tmp_path / "place", one, cache) for one in answers.tickets)
    }

    under_old = [rows_off(record, 1, old) for record in records.values()]
    wrong, labelled = (sum(figures) for figures in zip(*under_old, strict=True))
    table.add("weights reloaded, with and without a pause", answers, len(records), wrong=wrong)
    assert (len(answers.tickets), 0) == (len(records), wrong)
    assert labelled > 100
    # the update was one: what ran behind it are other weights, under no version until one is set
    off, unknown = rows_off(records["silent"], None, old)
    assert off > 0.9 * unknown > 0
    during = [record for name, record in records.items() if name.startswith("during")]
    assert {1, None} == {one.weights_version for record in during for one in record.spans if one.kind == "generation"}
    for name, version in (("told", 2), ("told again", 3)):
        spans = [one.weights_version for one in records[name].spans if one.kind == "generation"]
        assert [version] == spans
    first_SK = np.sort(records["told"].routes[:-1, 0], axis=1)
    assert np.asarray(reference_rows(new, records["told"].token_ids))[:-1, 0].tolist() == first_SK.tolist()
    paused = [record for name, record in records.items() if name.startswith("paused")]
    assert {2, 3} <= {one.weights_version for record in paused for one in record.spans}


async def _reloads(server: Server, folders: list[Path], answers: Answers) -> None:
    """An update while requests run, and one in a pause, with requests before, between and behind."""
    async with httpx.AsyncClient(timeout=120) as client:

        async def asked(name: str, **changes: Any) -> None:
            await ask(client, server.url, "completion", name, answers, **changes)

        await asyncio.gather(*(asked(f"before {number}") for number in range(3)))
        updated = asyncio.Event()

        async def keep_asking(stem: str) -> None:
            number = 0
            while not updated.is_set():  # the last of these is in flight when the update ends
                await asked(f"{stem} {number}", max_tokens=200)
                number += 1

        during = [asyncio.create_task(keep_asking(f"during {lane}")) for lane in range(3)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.rpc, "reload_weights", weights_path=str(folders[0]))
        updated.set()
        await asyncio.gather(*during)
        await asked("silent")
        await asyncio.to_thread(server.rpc, "routeplane_set_version", 2)
        await asked("told", max_tokens=40)

        paused = [asyncio.create_task(asked(f"paused {number}", max_tokens=200)) for number in range(3)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.post, "/pause?mode=keep")
        await asyncio.to_thread(server.rpc, "reload_weights", weights_path=str(folders[1]))
        await asyncio.to_thread(server.rpc, "routeplane_set_version", 3)
        await asyncio.to_thread(server.post, "/resume")
        await asyncio.gather(*paused)
        await asked("told again")


# ---------------------------------------------------------------------------------------------------------------------
# Disks and ranks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_holds_answers_until_there_is_space(model: tuple[Path, Any], table: Table, tmp_path: Path) -> None:
    """No ticket leaves while the disk is full; the server lives; with space again, every record is there."""
    folder, reference = model
    answers, early = Answers(), Answers()
    with small_disk(tmp_path / "disk") as disk, running(folder, disk / "place", tmp_path / "log", wait_s=120) as server:
        asyncio.run(load(server.url, stem="early", count=9, answers=early))

        async def full_and_free() -> None:
            with pytest.raises(OSError, match="No space left"):
                fill(disk / "filler")
            waiting = asyncio.create_task(load(server.url, stem="full", count=30, answers=answers, patience_s=120))
            await asyncio.sleep(8)
            assert ([], []) == (answers.tickets, answers.missing)
            assert 200 == httpx.get(f"{server.url}/health", timeout=30).status_code
            (disk / "filler").unlink()
            await waiting

        asyncio.run(full_and_free())
        assert 'routeplane_engine_lost{engine="0"} 0.0' in httpx.get(f"{server.url}/metrics", timeout=30).text
        readable = require_promises(disk / "place", early, None) + require_promises(disk / "place", answers, reference)
    assert len(answers.tickets) > 30
    answers.tickets += early.tickets
    table.add("disk full, then space", answers, readable)
    assert len(answers.tickets) == readable


def fill(path: Path) -> None:
    """Write until the disk refuses."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a file system of its own needs a mount, which is not allowed here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_tensor_parallel_ranks_are_one_engine(model: tuple[Path, Any], table: Table, tmp_path: Path) -> None:
    """Two workers, one writer; SIGTERM under load leaves no ticket without its record."""
    folder, reference = model
    place, answers = tmp_path / "place", Answers()
    with running(folder, place, tmp_path / "log", arguments=("--tensor-parallel-size", "2")) as server:
        asyncio.run(_load_and_signal(server, answers, lambda: server.process.send_signal(signal.SIGTERM)))
        server.process.wait(timeout=60)
    readable = require_promises(place, answers, reference, compared=40)
    table.add("two tensor-parallel ranks, SIGTERM", answers, readable)
    assert len(answers.tickets) == readable
    assert {"engine-0"} == {ticket.stream.split("/")[1] for ticket in answers.tickets}


@pytest.mark.slow
def test_data_parallel_ranks_are_two_engines(model: tuple[Path, Any], table: Table, tmp_path: Path) -> None:
    """Two engines behind one server, on one place: tickets of both in every HTTP form, and counts of both."""
    folder, reference = model
    place, answers = tmp_path / "place", Answers()
    extension = "tests.capture.cpu_collectives.WorkerExtension"
    ranks = ("--data-parallel-size", "2", "--worker-extension-cls", extension)
    with running(folder, place, tmp_path / "log", arguments=ranks) as server:
        asyncio.run(load(server.url, stem="both", count=36, answers=answers))
        lines = httpx.get(f"{server.url}/metrics", timeout=30).text
        for rank in range(2):
            assert f'routeplane_engine_lost{{engine="{rank}"}} 0.0' in lines
        asyncio.run(_load_and_signal(server, answers, lambda: server.process.send_signal(signal.SIGTERM)))
        server.process.wait(timeout=60)
    readable = require_promises(place, answers, reference, compared=40)
    table.add("two data-parallel ranks, SIGTERM", answers, readable)
    assert len(answers.tickets) == readable
    assert {"engine-0", "engine-1"} == {ticket.stream.split("/")[1] for ticket in answers.tickets}
