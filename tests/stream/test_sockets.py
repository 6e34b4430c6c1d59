"""Sockets: garbage, scanners, silent and dying peers, the reader's answer, and what is refused."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, FormatError, RouteplaneError, TransportError, TruncatedError, UsageError
from routeplane.stream import MemoryStream, QuarantineOptions, listen, new_stream, open_stream
from routeplane.stream.files import frames_of
from routeplane.stream.sockets import GREETING, Listener, parse_address
from routeplane.testing.builders import SPEC, beside, facts, sample

SENT = [sample(index) for index in range(4)]


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A listener on the loopback."""
    with listen("tcp://127.0.0.1:0") as found:
        yield found


def stream_of(records: list[Any]) -> bytes:
    """A whole stream in memory."""
    file = io.BytesIO()
    with new_stream(file, SPEC) as sink:
        for record in records:
            sink.write(record)
    return file.getvalue()


def peer(listener: Listener, data: bytes = b"") -> socket.socket:
    """A connection that has sent some bytes."""
    host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(data)
    return connection


def produce(listener: Listener, records: list[Any] = SENT) -> Callable[[], None]:
    """A producer of whole records, as work for a thread."""

    def work() -> None:
        with new_stream(listener.address, SPEC, timeout_s=30.0) as sink:
            for record in records:
                sink.write(record)

    return work


# ----------------------------------------------------------------------------------------------------------------------
# Peers that are not producers
# ----------------------------------------------------------------------------------------------------------------------


def test_a_thousand_garbage_peers_do_not_end_a_listener(listener: Listener) -> None:
    """Scanners that close at once, HTTP requests, random bytes: the true producer behind them succeeds."""
    garbage = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\0" * 64, os.urandom(64)]

    def scan() -> None:
        for index in range(1_000):
            with contextlib.suppress(OSError):
                peer(listener, garbage[index % len(garbage)]).close()
        produce(listener)()

    with beside(scan) as raised:
        with open_stream(listener, timeout_s=60.0) as reader:
            came = list(reader)
    assert [] == raised
    assert facts(SENT) == facts(came)
    assert listener.disconnected > 0


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["silent", "scanning"])
def test_a_producer_is_read_before_newcomers_take_its_place(sent: bytes) -> None:
    """It came before more peers than there are places; peers lose theirs while others that are ready wait."""
    address = parse_address("tcp://127.0.0.1:0")
    with Listener(address, max_handshakes=4) as found:
        true = peer(found, GREETING + stream_of(SENT))
        others = [peer(found, sent) for _ in range(40)]
        with open_stream(found, timeout_s=30.0) as reader:
            assert facts(SENT) == facts(list(reader))
        for connection in (true, *others):
            connection.close()


def test_silent_peers_do_not_delay_a_producer(listener: Listener) -> None:
    """Peers that connect and say nothing are passed by, long before their deadline."""
    silent = [peer(listener) for _ in range(300)]
    with beside(produce(listener)) as raised:
        with open_stream(listener, timeout_s=30.0) as reader:
            assert facts(SENT) == facts(list(reader))
    assert [] == raised
    for connection in silent:
        connection.close()


def test_a_silent_peer_is_disconnected_at_its_deadline() -> None:
    """After ``handshake_s`` the listener closes the connection."""
    with listen("tcp://127.0.0.1:0", handshake_s=0.05) as found:
        silent = peer(found)
        with pytest.raises(TransportError) as caught:
            open_stream(found, timeout_s=0.5)
        assert ErrorKind.TIMED_OUT == caught.value.kind
        assert (b"", 1) == (silent.recv(1), found.disconnected)
        silent.close()


@given(data=st.binary(max_size=200))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_greeting_with_garbage_behind_it_is_disconnected(listener: Listener, data: bytes) -> None:
    """Also a peer that knows the greeting ends nothing, unless it is a producer that left: that is told."""
    peer(listener, GREETING + data).close()
    with beside(produce(listener)):
        while True:
            with contextlib.suppress(TruncatedError):
                reader = open_stream(listener, timeout_s=30.0)
                break
        with reader:
            assert facts(SENT) == facts(list(reader))


def test_a_claimed_body_takes_no_memory(listener: Listener) -> None:
    """A header that claims 2^37 or 2^62 bytes is a FormatError: no memory holds it, or the bytes do not come."""
    data = stream_of(SENT)
    for claimed in (2**37, 2**62):
        forged = data.replace(_body_length(data), claimed.to_bytes(8, "little"), 1)
        assert forged != data
        connection = peer(listener, GREETING + forged)
        connection.shutdown(socket.SHUT_WR)
        with open_stream(listener, timeout_s=30.0) as reader, pytest.raises(FormatError):
            list(reader)
        connection.close()


def _body_length(data: bytes) -> bytes:
    frame = list(frames_of(data)[0])[1]
    header = int.from_bytes(memoryview(frame.data)[4:8], "little")
    return int(frame.data.size - 8 - header).to_bytes(8, "little")


# ----------------------------------------------------------------------------------------------------------------------
# Ends
# ----------------------------------------------------------------------------------------------------------------------


def test_an_abort_is_told(listener: Listener) -> None:
    """An exception in the producer's ``with`` is a TruncatedError in the consumer."""

    def work() -> None:
        with contextlib.suppress(KeyError), new_stream(listener.address, SPEC, max_bytes=1) as sink:
            sink.write(SENT[0])
            raise KeyError

    with beside(work):
        with open_stream(listener, timeout_s=30.0) as reader, pytest.raises(TruncatedError):
            list(reader)


def test_a_cut_connection_is_told_to_both_sides(listener: Listener) -> None:
    """A consumer that closes before the end: the producer's ``close`` raises, whether or not everything was sent."""
    with beside(produce(listener)) as raised:
        with open_stream(listener, timeout_s=30.0) as reader:
            next(iter(reader))
    assert [TransportError] == [type(error) for error in raised]


def test_close_returns_when_the_reader_has_verified_all(listener: Listener) -> None:
    """``close`` waits for the answer: a consumer that finds damage makes it raise, though every byte was sent."""
    data = bytearray(stream_of(SENT))
    row = SENT[2].routes[1].tobytes()
    at = bytes(data).find(row)
    data[at : at + len(row)] = SENT[1].routes[1].tobytes()
    connection = peer(listener, GREETING + bytes(data))
    with open_stream(listener, timeout_s=30.0) as reader, pytest.raises(RouteplaneError):
        list(reader)
    assert b"" == connection.recv(64)
    connection.close()


def test_waits_end_with_the_timeout() -> None:
    """A producer without a consumer, a consumer without a producer: ``timed_out``."""
    with listen("tcp://127.0.0.1:0") as found:
        with pytest.raises(TransportError) as caught:
            open_stream(found, timeout_s=0.05)
        address = found.address
    assert ErrorKind.TIMED_OUT == caught.value.kind
    with pytest.raises(TransportError) as caught:
        new_stream(address, SPEC, timeout_s=0.1)
    assert ErrorKind.TIMED_OUT == caught.value.kind


def test_a_producer_waits_for_the_answer_no_longer_than_told(listener: Listener) -> None:
    """A consumer that reads nothing: the producer's ``close`` ends with ``timed_out``."""
    sink = new_stream(listener.address, SPEC, timeout_s=0.2)
    sink.write(SENT[0])
    with pytest.raises(TransportError) as caught:
        sink.close()
    assert ErrorKind.TIMED_OUT == caught.value.kind


def test_a_listener_may_be_closed_again() -> None:
    """A second ``close`` does nothing; the address is free after the first."""
    with listen("tcp://127.0.0.1:0") as found:
        address = found.address
        found.close()
    with pytest.raises(TransportError):
        new_stream(address, SPEC, timeout_s=0.1)


# ----------------------------------------------------------------------------------------------------------------------
# Addresses and options
# ----------------------------------------------------------------------------------------------------------------------


def test_without_a_host_the_address_is_the_loopback() -> None:
    """A wildcard must be spelled out."""
    with listen("tcp://:0") as found:
        assert found.address.startswith("tcp://127.0.0.1:")
    with listen("tcp://0.0.0.0:0") as found:
        assert found.address.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize(
    "text",
    ["tcp://host", "tcp://host:1/x", "tcp://host:99999", "unix://x", "unix://", "http://h:1", "tcp://h:1?a=b", "x"],
)
def test_another_address_is_refused(text: str) -> None:
    """Anything but ``tcp://host:port`` and ``unix:///path``."""
    with pytest.raises(UsageError):
        parse_address(text)


@pytest.mark.parametrize("place", ["run.arrows", b"", "path"])
def test_options_without_a_meaning_are_refused(place: Any, tmp_path: Any) -> None:
    """A timeout for what is not waited for, an encoding for what encodes nothing, quarantine options without it."""
    target = str(tmp_path / "x.arrows")
    for call in (
        lambda: new_stream(target, SPEC, timeout_s=1.0),
        lambda: open_stream(place, timeout_s=1.0),
        lambda: new_stream(MemoryStream(), SPEC, encoding="plain"),
        lambda: open_stream(place, quarantine=QuarantineOptions()),
    ):
        with pytest.raises(UsageError):
            call()
    assert [] == list(tmp_path.iterdir())


def test_streams_of_several_producers_come_one_after_another(listener: Listener) -> None:
    """One listener gives the stream of each producer that connects."""
    threads = [threading.Thread(target=produce(listener, [record])) for record in SENT]
    for thread in threads:
        thread.start()
    came = []
    for _ in SENT:
        with open_stream(listener, timeout_s=30.0) as reader:
            came += list(reader)
    for thread in threads:
        thread.join()
    assert sorted(facts(SENT)) == sorted(facts(came))
