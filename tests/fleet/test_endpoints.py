"""Endpoints: the port is ours from the first second, callers are answered, and the server gets the very socket."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from routeplane.errors import ErrorKind, FleetError, UsageError
from routeplane.fleet.endpoints import (
    BorrowedEndpoint,
    Endpoint,
    EndpointKeeper,
    Endpoints,
    KeptEndpoint,
    ServerState,
    reserve,
)
from tests.fleet.callers import Callers

HOST = "127.0.0.1"
RANGE = (18_600, 18_700)
# a caller that is not answered fails the test instead of hanging it
PATIENCE = 10.0


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A reserved endpoint, closed afterwards."""
    with reserve(HOST, RANGE) as reserved:
        yield reserved


def ask(port: int, *, method: str = "GET", body: bytes | None = None) -> tuple[int, str | None]:
    """One request; status and Retry-After."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    try:
        connection.request(method, "/v1/chat/completions", body=body)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.getheader("Retry-After")
    finally:
        connection.close()


def can_connect(port: int) -> bool:
    """Whether anything listens there."""
    try:
        socket.create_connection((HOST, port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Reserving
# ----------------------------------------------------------------------------------------------------------------------


def test_url_is_known_at_once_and_lies_in_the_range(endpoint: Endpoint) -> None:
    """The URL names a port of the configured range."""
    assert RANGE[0] <= endpoint.port < RANGE[1]
    assert f"http://{HOST}:{endpoint.port}/v1" == endpoint.url
    assert ServerState.RESERVED == endpoint.state


def test_two_reservations_never_share_a_port(endpoint: Endpoint) -> None:
    """A second reservation of the same range takes the next free port."""
    with reserve(HOST, RANGE) as other:
        assert endpoint.port != other.port


def test_a_full_range_is_refused_with_the_range_and_the_cause(endpoint: Endpoint) -> None:
    """No free port: the error names the range, and keeps what the last bind said."""
    with pytest.raises(FleetError, match=rf"free port in \[{endpoint.port}, {endpoint.port + 1}\)") as caught:
        reserve(HOST, (endpoint.port, endpoint.port + 1))
    assert ErrorKind.NO_PORT == caught.value.kind
    assert isinstance(caught.value.__cause__, OSError)


def test_a_named_port_is_taken_back_after_its_owner_closed() -> None:
    """A restarted server gets its old URL, also with connections of the old one in TIME_WAIT."""
    with reserve(HOST, RANGE) as first:
        assert (503, "1") == ask(first.port)
        url = first.url
    with reserve(HOST, RANGE, port=first.port) as second:
        assert url == second.url


def test_a_named_port_that_another_holds_is_refused(endpoint: Endpoint) -> None:
    """A port taken between: no other one is given instead."""
    with pytest.raises(FleetError, match=f"expected port {endpoint.port}") as caught:
        reserve(HOST, RANGE, port=endpoint.port)
    assert ErrorKind.NO_PORT == caught.value.kind


def test_an_address_of_another_machine_is_refused() -> None:
    """Binding an address that is not ours says so at once, instead of trying the whole range."""
    with pytest.raises(FleetError, match="address of this machine"):
        reserve("192.0.2.1", RANGE)


@pytest.mark.parametrize(
    ("host", "ports", "port"),
    [
        pytest.param(HOST, (0, 10), None, id="zero"),
        pytest.param(HOST, (10, 10), None, id="empty"),
        pytest.param(HOST, (60_000, 70_000), None, id="beyond"),
        pytest.param(HOST, RANGE, 80, id="port-outside"),
        pytest.param("", RANGE, None, id="nothing-to-advertise"),
    ],
)
def test_arguments_that_cannot_be_served_are_refused(host: str, ports: tuple[int, int], port: int | None) -> None:
    """Ranges and hosts are checked before anything is bound."""
    with pytest.raises(UsageError) as caught:
        reserve(host, ports, port=port)
    assert ErrorKind.ARGUMENT == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Before the server
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_a_caller_before_readiness_is_told_to_come_back(endpoint: Endpoint, method: str) -> None:
    """503 with Retry-After, whatever the method."""
    assert (503, "1") == ask(endpoint.port, method=method)


def test_a_large_post_is_answered_rather_than_reset(endpoint: Endpoint) -> None:
    """A body far beyond the socket buffers is read to its end, so that the caller sees the 503."""
    assert (503, "1") == ask(endpoint.port, method="POST", body=bytes(8 << 20))


def test_a_caller_that_sends_nothing_does_not_keep_others_waiting(endpoint: Endpoint) -> None:
    """Silent connections take no turn away from those that ask."""
    silent = [socket.create_connection((HOST, endpoint.port), timeout=PATIENCE) for _ in range(8)]
    try:
        assert (503, "1") == ask(endpoint.port)
    finally:
        for connection in silent:
            connection.close()


def test_close_frees_the_port_and_ends_the_thread() -> None:
    """After ``close`` nothing listens, and the answering thread is gone."""
    endpoint = reserve(HOST, RANGE)
    endpoint.close()
    endpoint.close()
    assert not can_connect(endpoint.port)
    assert [] == [thread.name for thread in threading.enumerate() if thread.name.endswith(str(endpoint.port))]


# ----------------------------------------------------------------------------------------------------------------------
# Handing over
# ----------------------------------------------------------------------------------------------------------------------


async def answer_ok(scope: dict[str, object], receive: object, send: object) -> None:
    """An ASGI application that answers 200."""
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[operator]


def test_uvicorn_serves_on_the_very_socket_without_a_gap(endpoint: Endpoint) -> None:
    """Callers during the change get 503 or 200, never a refusal; afterwards 200 on the same URL."""

    async def change() -> tuple[set[int], int]:
        seen: set[int] = set()
        over = threading.Event()

        def poll() -> None:
            while not over.is_set():
                seen.add(ask(endpoint.port)[0])

        polling = asyncio.create_task(asyncio.to_thread(poll))
        try:
            server = uvicorn.Server(uvicorn.Config(answer_ok, log_config=None, lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[endpoint.hand_over()]))
            while not server.started:
                await asyncio.sleep(0)
            endpoint.mark_serving()
            after = (await asyncio.to_thread(ask, endpoint.port))[0]
        finally:
            over.set()
            await polling
        server.should_exit = True
        await serving
        return seen, after

    seen, after = asyncio.run(change())
    assert 200 == after
    assert seen <= {503, 200}
    assert ServerState.SERVING == endpoint.state


def test_an_endpoint_is_handed_over_once(endpoint: Endpoint) -> None:
    """Two servers never accept on one socket."""
    endpoint.hand_over()
    with pytest.raises(FleetError) as caught:
        endpoint.hand_over()
    assert ErrorKind.CLOSED == caught.value.kind


def test_serving_cannot_be_claimed_before_the_socket_was_handed_over(endpoint: Endpoint) -> None:
    """Readiness means that a server has the socket."""
    with pytest.raises(FleetError, match="handed the socket"):
        endpoint.mark_serving()


def test_an_endpoint_that_is_taken_back_answers_503_and_can_be_handed_over_again(endpoint: Endpoint) -> None:
    """A server that served and is gone is DEGRADED; one that never came leaves RESERVED."""
    endpoint.hand_over()
    endpoint.take_back()
    assert (503, "1") == ask(endpoint.port)
    states = [endpoint.state]
    endpoint.hand_over()
    endpoint.mark_serving()
    endpoint.take_back()
    endpoint.take_back()
    assert (503, "1") == ask(endpoint.port)
    states.append(endpoint.state)
    endpoint.close()
    endpoint.take_back()
    assert [ServerState.RESERVED, ServerState.DEGRADED, ServerState.CLOSED] == [*states, endpoint.state]


# ----------------------------------------------------------------------------------------------------------------------
# An endpoint that outlives its servers
# ----------------------------------------------------------------------------------------------------------------------

SERVER = """
import asyncio, sys
from routeplane.fleet.endpoints import BorrowedEndpoint, KeptEndpoint
from routeplane.fleet.engine import serve_app

async def answer_ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})

async def main():
    served = await serve_app(answer_ok, borrowed)
    print("serving", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    borrowed.give_back()
    await served.close()
    borrowed.close()

borrowed = BorrowedEndpoint(KeptEndpoint(url=sys.argv[1], socket_path=sys.argv[2]))
asyncio.run(main())
"""


@contextmanager
def server_of(kept: KeptEndpoint) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, once it accepts; it ends in order where nothing ended it before."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, kept.url, kept.socket_path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "serving\n" == process.stdout.readline()
        yield process


@pytest.fixture
def keeper() -> Iterator[EndpointKeeper]:
    """A keeper in this process, closed afterwards."""
    made = EndpointKeeper(HOST, RANGE)
    yield made
    made.close()


def port_of(kept: KeptEndpoint) -> int:
    """The port of its URL."""
    return int(kept.url.rpartition(":")[2].partition("/")[0])


def test_no_caller_is_refused_while_servers_are_killed_ended_and_replaced(keeper: EndpointKeeper) -> None:
    """One is killed, one ended in order: every caller gets 200 or 503, but those whose answer the kill cut off."""
    kept = keeper.reserve(None, None)
    with Callers(kept.url) as callers:
        for kills in (True, False):
            with server_of(kept) as server:
                assert ServerState.SERVING == keeper.state()
                assert 200 == ask(port_of(kept))[0]
                if kills:
                    server.kill()
                else:
                    server.communicate("")
            while keeper.state() is ServerState.SERVING:
                time.sleep(0.005)
            assert ServerState.DEGRADED == keeper.state()
            assert (503, "1") == ask(port_of(kept))
    assert {200, 503} <= set(callers.answers) <= {200, 503, "cut"}
    assert callers.answers["cut"] <= 4  # one that each caller had open when the server was killed


def test_a_keeper_lends_to_one_server_at_a_time(keeper: EndpointKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is told after a while, and gets the socket once the first gave it back."""
    kept = keeper.reserve(None, None)
    first = BorrowedEndpoint(kept)
    monkeypatch.setattr("routeplane.fleet.endpoints._LENDING_SECONDS", 0.05)
    with pytest.raises(FleetError, match=f"expected the socket of {kept.url}") as caught:
        BorrowedEndpoint(kept)
    assert ErrorKind.NOT_READY == caught.value.kind
    monkeypatch.undo()
    first.close()
    second = BorrowedEndpoint(kept)
    second.mark_serving()
    assert ServerState.SERVING == keeper.state()
    second.close()


def test_a_keeper_that_closes_frees_the_port_and_its_threads(keeper: EndpointKeeper) -> None:
    """Also while a server has the socket; that server is told."""
    before = set(threading.enumerate())
    kept = keeper.reserve(None, None)
    borrowed = BorrowedEndpoint(kept)
    keeper.close()
    keeper.close()
    with pytest.raises(FleetError, match="from its keeper"):
        borrowed.mark_serving()
    borrowed.close()
    with pytest.raises(FleetError, match="from its keeper"):
        BorrowedEndpoint(kept)
    assert not can_connect(port_of(kept))
    assert not Path(kept.socket_path).parent.exists()
    left = set(threading.enumerate()) - before
    assert [] == [thread.name for thread in left if thread.name.startswith("routeplane-")]


# ----------------------------------------------------------------------------------------------------------------------
# Endpoints of a fleet
# ----------------------------------------------------------------------------------------------------------------------


def test_no_endpoint_is_an_empty_list() -> None:
    """A fleet without HTTP has no endpoints, and that is false: never a list with nothing in it."""
    none = Endpoints.of([])
    assert not none
    assert () == none.urls


def test_two_shards_never_share_a_url() -> None:
    """One URL twice would send one shard's traffic to another."""
    with pytest.raises(UsageError):
        Endpoints.of(["http://a/v1", "http://a/v1"])


@pytest.mark.parametrize("urls", [[None], [""], ["no url"], ["ftp://host/"], ["http:///v1"], "http://a/v1", [b"x"]])
def test_what_is_not_a_url_is_refused(urls: object) -> None:
    """None of them can be asked; one string would be taken letter by letter."""
    with pytest.raises(UsageError):
        Endpoints.of(urls)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_needs_a_host_to_advertise(host: str) -> None:
    """No caller on another machine can connect to http://0.0.0.0."""
    with pytest.raises(UsageError, match="binds all interfaces"):
        reserve(host, (18_700, 18_800))
    with reserve(host, (18_700, 18_800), advertise="node-1") as endpoint:
        assert endpoint.url.startswith("http://node-1:")
