"""Faults of a server with the writer in its engine, in the processes that vLLM always has: a ticket is a promise.

``make engine-faults`` runs all and prints a table; `make test` runs the first life alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from routeplane.capture.vllm.engine_writer import open_carrier
from routeplane.capture.vllm.writer_options import WriterConfig
from routeplane.errors import ErrorKind, TransportError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.stream.blocks import ReadOptions
from routeplane.stream.folder import open_reader
from tests.capture.engine_server import FORMS, Answers, ask, blocks, hashes, load, record_of, running
from tests.capture.tiny_server import write_model
from tests.capture.vllm_engine import SPEC, assert_equals_reference

pytestmark = [pytest.mark.vllm, pytest.mark.engine_faults]


class Table:
    """What was tried, and what held."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = [("fault", "tickets", "readable", "cut off", "blocks", "overwritten")]

    def add(self, fault: str, tickets: int, readable: int, cut: int, count: int, overwritten: int) -> None:
        """One row."""
        self.rows.append((fault, *map(str, (tickets, readable, cut, count, overwritten))))


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Printed when the module is done."""
    made = Table()
    yield made
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    widths = [max(map(len, column)) for column in zip(*made.rows, strict=True)]
    with capture.global_and_fixture_disabled():
        reporter.write_line("")
        for row in made.rows:
            reporter.write_line("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


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


def generation_of(record: RouteRecord) -> list[tuple[int, int | None]]:
    """Where generation spans stop, with their versions."""
    return [(span.stop, span.weights_version) for span in record.spans if span.kind == "generation"]


@pytest.mark.slow
def test_every_form_has_tickets_that_outlive_the_server(model: tuple[Path, Any], table: Table, tmp_path: Path) -> None:
    """All HTTP forms; an update without a pause; metrics; SIGTERM under load, with vLLM's default timeout."""
    folder, reference = model
    place = tmp_path / "place"
    with running(folder, place, tmp_path / "log", weights_version=1) as server:
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

        updated = Answers()
        asyncio.run(_update_under_way(server, folder, updated))
        records = {record.sample_id: record for record in (record_of(place, one, cache) for one in updated.tickets)}
        assert {1} == {version for _, version in generation_of(records["before"])}
        during = [record for name, record in records.items() if name.startswith("during-")]
        assert all(1 not in {version for _, version in generation_of(record)[1:]} for record in during)
        assert None is generation_of(during[-1])[-1][1]
        assert [None] == [version for _, version in generation_of(records["after"])]
        server.rpc("routeplane_set_version", 2)
        told = Answers()
        asyncio.run(load(server.url, stem="told", count=1, answers=told))
        assert [2] == [version for _, version in generation_of(record_of(place, told.tickets[0], {}))]

        lines = httpx.get(f"{server.url}/metrics", timeout=30).text
        assert "routeplane_engine_lost 0.0" in lines
        assert "routeplane_engine_weight_updates 1.0" in lines

        with pytest.raises(UsageError) as taken:
            open_carrier(WriterConfig(place=str(place), run="run-7"), SPEC, producer="engine-0")
        assert ErrorKind.PRODUCER_TAKEN == taken.value.kind
        with pytest.raises(UsageError, match="run"):
            open_carrier(WriterConfig(place=str(place), run="another"), SPEC, producer="engine-9")

        before, last = hashes(place), Answers()
        asyncio.run(_load_and_signal(server, last, lambda: server.process.send_signal(signal.SIGTERM)))
        server.process.wait(timeout=60)
    # vLLM 0.30 on a CPU runs other expert weights after a reload: no reference
    readable = require_promises(place, last, None)
    assert before.items() <= hashes(place).items()
    table.add("SIGTERM, default timeout", len(last.tickets), readable, last.broken, len(blocks(place)), 0)


async def _update_under_way(server: Any, folder: Path, answers: Answers) -> None:
    """Requests before, during and after ``reload_weights``, none of which names a version."""
    async with httpx.AsyncClient(timeout=60) as client:
        await ask(client, server.url, "completion", "before", answers)
        updated = asyncio.Event()

        async def keep_asking() -> None:
            number = 0
            while not updated.is_set():  # the last of these is in flight when the update ends
                await ask(client, server.url, "completion", f"during-{number}", answers, max_tokens=200)
                number += 1

        during = asyncio.create_task(keep_asking())
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.rpc, "reload_weights", weights_path=str(folder))
        updated.set()
        await during
        await ask(client, server.url, "completion", "after", answers)


async def _load_and_signal(server: Any, answers: Answers, strike: Any, *, after_s: float = 1.5) -> None:
    """Requests of all forms; the blow falls while they run."""
    running_load = asyncio.create_task(
        load(server.url, stem=f"load-{os.urandom(3).hex()}", count=2000, answers=answers)
    )
    while len(answers.tickets) < 20:
        await asyncio.sleep(0.05)
    await asyncio.sleep(after_s)
    strike()
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
@pytest.mark.parametrize(
    "number", [0, 1, 2, 3, *(pytest.param(number, marks=pytest.mark.nightly) for number in range(4, 20))]
)
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
    overwritten = sum(after.get(path) != digest for path, digest in before.items())
    table.add(f"round {number}: {fault}", len(answers.tickets), readable, answers.broken, len(after), overwritten)
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
        assert "routeplane_engine_lost 0.0" in httpx.get(f"{server.url}/metrics", timeout=30).text
    assert [] == answers.missing[:3]
    missing = {ticket.key for ticket in answers.tickets} - set(seen)
    table.add("consumer gone and back", len(answers.tickets), len(answers.tickets) - len(missing), answers.broken, 0, 0)
    assert set() == missing


def _read_on(place: Path, seen: list[Any]) -> None:
    """The consumer is back: it reads until no block has come for a while."""
    with open_reader(place, producers=1, options=ReadOptions(timeout_s=20)) as reader:
        with pytest.raises(TransportError):
            seen.extend(record.key for record in reader)
