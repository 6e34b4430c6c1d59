"""Streams over Arrow Flight, on loopback, with TLS and a token: the contract, and what a network adds.

Certificates are made for the run. Faults that need processes of their own are in ``test_flight_faults``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.flight as fl
import pytest
import trustme
from numpy.typing import NDArray

from routeplane.errors import DataError, ErrorKind, FormatError, RouteplaneError, TransportError, UsageError
from routeplane.record.codec import write_batch
from routeplane.record.interfaces import RouteTicket
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import messages, new_stream, open_stream
from routeplane.stream.addresses import parse_address
from routeplane.stream.delivery import Block
from routeplane.stream.flight import FlightPlane, _Port, transport
from routeplane.stream.flight_service import FlightService, ServiceOptions
from routeplane.stream.selection import Selection
from routeplane.testing.contracts import DeliveryContract
from routeplane.testing.contracts.samples import SPEC, beside, facts, sample

TOKEN = "a-shared-token"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """A certificate authority for this run."""
    return trustme.CA()


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now


def served(
    authority: trustme.CA, *, clock: Callable[[], float] = time.monotonic, **options: Any
) -> tuple[FlightService, FlightPlane]:
    """A service on a free port of loopback, and the address of it that clients need."""
    issued = authority.issue_cert("127.0.0.1")
    service = FlightService(
        ServiceOptions(
            token=TOKEN,
            certificate=b"".join(pem.bytes() for pem in issued.cert_chain_pems),
            private_key=issued.private_key_pem.bytes(),
            **options,
        ),
        clock=clock,
    )
    plane = FlightPlane(service.location, token=TOKEN, root_certificates=authority.cert_pem.bytes(), linger=False)
    return service, plane


@pytest.fixture
def place(authority: trustme.CA) -> Iterator[tuple[FlightService, FlightPlane]]:
    """A service that keeps what was acknowledged, and its address."""
    service, plane = served(authority, keep=True)
    with service:
        yield service, plane


class TestFlight(DeliveryContract):
    """The contract of brokered transports."""

    slack = 2**16

    @pytest.fixture(autouse=True)
    def _certificates(self, authority: trustme.CA) -> None:
        self._authority = authority

    def place(self, tmp_path: Path, *, groups: Sequence[str] = ("default",), producers: int = 1) -> Any:
        """A service with TLS and a token."""
        clock = Clock()
        options = {"groups": tuple(groups), "producers": producers, "max_bytes": self.slack}
        return *served(self._authority, clock=clock, **options), clock

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A producer."""
        return new_stream(place[1], spec, **options)

    def source(self, place: Any, **options: Any) -> Any:
        """A consumer."""
        return open_stream(place[1], **options)

    def lose(self, place: Any, sink: Any) -> None:
        """Its connection is gone, and half an hour passes at the service."""
        service, _, clock = place
        sink._port.disconnect(sink.session)
        clock.now += 1_800
        service.tick()

    def release(self, place: Any) -> None:
        """Stop."""
        place[0].stop()


# ----------------------------------------------------------------------------------------------------------------------
# What is held, by key
# ----------------------------------------------------------------------------------------------------------------------


def written(plane: FlightPlane, count: int, **options: Any) -> list[RouteRecord]:
    """Records that were written in blocks of two, and closed."""
    records = [sample(index, tokens=6 + index) for index in range(count)]
    with new_stream(plane, SPEC, max_bytes=2 * records[0].nbytes, **options) as sink:
        for record in records:
            sink.write(record)
    return records


def test_records_are_fetched_by_key(place: tuple[FlightService, FlightPlane]) -> None:
    """Whole, or cut as the records themselves would cut them; whoever fetches takes nothing from any group."""
    _, plane = place
    sent = written(plane, 5)

    whole = plane.fetch([sent[3].key, sent[0].key])
    [part] = plane.fetch([sent[4].key], layer_ids=[7, 1], tokens=(2, 5))

    assert facts([sent[0], sent[3]]) == facts(sorted(whole, key=lambda record: record.key))
    assert facts([sent[4].slice(2, 5).select([7, 1])]) == facts([part])
    with open_stream(plane) as reader:
        assert facts(sent) == facts(list(reader))


def test_a_ticket_is_redeemed(place: tuple[FlightService, FlightPlane]) -> None:
    """A ticket names a record and a range, and gives that range's rows."""
    _, plane = place
    sent = written(plane, 2)
    ticket = RouteTicket(stream="s", key=sent[1].key, call_id="c", start=1, stop=4, checksum=sent[1].checksum)

    assert facts([sent[1].slice(1, 4)]) == facts([plane.redeem(RouteTicket.from_json(ticket.to_json()))])


def with_last_missing(routes_SLK: NDArray[np.int16]) -> NDArray[np.int16]:
    """A copy whose last token was not fed."""
    rows_SLK = routes_SLK.copy()
    rows_SLK[-1] = -1
    return rows_SLK


def test_what_was_selected_travels_alone(place: tuple[FlightService, FlightPlane]) -> None:
    """One layer of eight and a tenth of the tokens arrive as some hundredth of the rows' bytes."""
    _, plane = place
    spec = RouteSpec(num_experts=64, top_k=8, layer_ids=tuple(range(16)), model="wide")
    routes_SLK = np.broadcast_to(np.arange(8, dtype=np.int16), (1_000, 16, 8))
    record = sample(0, tokens=1_000, spec=spec, routes=with_last_missing(routes_SLK))
    with new_stream(plane, spec) as sink:
        sink.write(record)

    port = _Port(plane)
    whole = port._got(op="fetch", keys=[record.key], selection=Selection())[0][0].nbytes
    part = port._got(op="fetch", keys=[record.key], selection=Selection(layer_ids=(3, 4), tokens=(100, 200)))[0][0]
    port.hang_up()

    assert 128_000 < whole < 140_000
    assert part.nbytes < 100 * 2 * 8 + 100 * 4 + 1_000


def test_old_weights_are_let_go(place: tuple[FlightService, FlightPlane]) -> None:
    """``retire`` drops what older policies sampled, acknowledged or not, and later blocks of them are refused."""
    _, plane = place
    sent = written(plane, 4)  # of version 3

    assert (0, 2) == (plane.retire(below=3), plane.retire(below=4))
    with pytest.raises(DataError):
        plane.fetch([sent[0].key])
    assert 2.0 == plane.ask("metrics")["scalars"]["routeplane/delivery_retired"]


# ----------------------------------------------------------------------------------------------------------------------
# What a service refuses
# ----------------------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused(place: tuple[FlightService, FlightPlane]) -> None:
    """Nobody without the token is answered, whatever they ask."""
    _, plane = place

    for token in (None, "another"):
        with pytest.raises(TransportError) as caught:
            replace(plane, token=token).ask("health")
        assert ErrorKind.UNAUTHENTICATED == caught.value.kind
    assert {"status": "serving"} == plane.ask("health")


def test_another_certificate_is_refused(place: tuple[FlightService, FlightPlane]) -> None:
    """A client trusts the authority that it was given, and no other; the token does not leave it."""
    _, plane = place
    stranger = replace(plane, root_certificates=trustme.CA().cert_pem.bytes())

    with pytest.raises(TransportError) as caught:
        stranger.ask("health")
    assert ErrorKind.CONNECTION == caught.value.kind


def test_a_large_block_is_refused_before_it_travels(authority: trustme.CA) -> None:
    """The limit on messages is told to the producer, with what to do."""
    service, plane = served(authority, max_message_bytes=2_000)
    with service, pytest.raises(UsageError, match="smaller max_bytes") as caught:
        with new_stream(plane, SPEC) as sink:
            sink.write(sample(0, tokens=1_000))
    assert ErrorKind.TOO_LARGE == caught.value.kind


def test_memory_is_bounded_with_many_producers(authority: trustme.CA) -> None:
    """Eight producers at once: what is held never passes the bound, for each asks for room before it sends."""
    block = 2 * sample(0).nbytes
    bound = 12 * block
    service, plane = served(authority, producers=8, max_bytes=bound)

    def produce(first: int) -> None:
        with new_stream(plane, SPEC, producer=f"p{first}", encoding="plain", max_bytes=block) as sink:
            for index in range(first, first + 20):
                sink.write(sample(index))

    with service, contextlib.ExitStack() as stack:
        raised = [stack.enter_context(beside(partial(produce, 100 * at))) for at in range(8)]
        with open_stream(plane) as reader:
            assert 160 == len(list(reader))
        assert 0 < service.report().peak_bytes <= bound
    assert [[]] * 8 == raised


@pytest.mark.parametrize(
    ("action", "body"),
    [("no-such", b"{}"), ("put", b"{}"), ("attach", b"[]"), ("attach", b"{"), ("take", b""), ("join", b"{}")],
    ids=["unknown", "no action", "a list", "half", "not an action", "empty"],
)
def test_a_request_of_another_shape_is_refused(
    place: tuple[FlightService, FlightPlane], action: str, body: bytes
) -> None:
    """Whatever is asked, the service answers with an error of ours and goes on."""
    _, plane = place
    client = fl.connect(plane.location, tls_root_certs=plane.root_certificates)
    options = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])

    with client, pytest.raises(fl.FlightServerError) as caught:
        list(client.do_action(fl.Action(action, body), options))
    assert isinstance(messages.error_of(caught.value.extra_info), RouteplaneError)
    assert {"status": "serving"} == plane.ask("health")


def test_a_block_must_be_what_it_says(place: tuple[FlightService, FlightPlane]) -> None:
    """A batch whose records are not those of its description is refused, and nothing of it is taken."""
    service, plane = place
    sink = new_stream(plane, SPEC, producer="p", encoding="plain")
    records, others = [sample(0)], [sample(1)]
    batch = write_batch(others, SPEC, encoding="plain")
    block = Block.of(records, producer="p", sequence=0, payload=batch, nbytes=batch.nbytes)

    with pytest.raises(FormatError, match="declares"):
        sink._port.put(sink.session, block)  # type: ignore[attr-defined]
    assert 0 == service.report().records
    sink.abort()


def test_addresses(tmp_path: Path) -> None:
    """An address names files for secrets, never the secrets, and nothing that is not known."""
    (tmp_path / "token").write_text("t\n")
    (tmp_path / "ca").write_text("pem")
    text = f"grpc+tls://[::1]:47?ca={tmp_path / 'ca'}&token_file={tmp_path / 'token'}&linger=false"

    plane = transport(parse_address(text))

    assert FlightPlane("grpc+tls://[::1]:47", token="t", root_certificates=b"pem", linger=False) == plane
    assert "t" not in repr(plane).partition("47")[2].replace("linger", "")
    for wrong in ("grpc://h", "grpc://h:1/path", "grpc://h:1?token=secret", "grpc://h:1?linger=maybe"):
        with pytest.raises(UsageError):
            transport(parse_address(wrong))
