"""The carrier's contract on a real Mooncake store over loopback TCP, and what that store alone does."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mooncake
import pytest

from routeplane.errors import ErrorKind, StoreError, TransportError, UsageError
from routeplane.record.interfaces import BlockName
from routeplane.stream import mooncake as carrier
from routeplane.stream.blocks import BlockLimits
from routeplane.testing.builders import SPEC, sample
from routeplane.testing.contracts import CarrierContract
from tests.batch import test_rank_local_reads as rank_local
from tests.stream.streams import flip_in_rows

# one master for the file
pytestmark = pytest.mark.xdist_group("mooncake")

MASTER = Path(mooncake.__file__).with_name("mooncake_master")


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings_of(port: int, *, segment: int) -> dict[str, Any]:
    """A client that gives the store ``segment`` bytes."""
    return {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": segment,
        "local_buffer_size": 32 * 2**20,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": f"127.0.0.1:{port}",
    }


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A master, and one client that gives the store 64 MB: what store nodes do."""
    port = free_port()
    command = [str(MASTER), f"--rpc_port={port}", f"--metrics_port={free_port()}", "--rpc_address=127.0.0.1"]
    log = tmp_path_factory.mktemp("mooncake") / "master.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as master:
        try:
            node = carrier.Client(settings_of(port, segment=64 * 2**20))
            deadline = time.monotonic() + 30.0
            while not connected(node):
                assert master.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield port
            node.close()
        finally:
            master.terminate()
            master.wait(10)


def connected(node: carrier.Client) -> bool:
    """Whether the master answers."""
    try:
        return node.store is not None
    except TransportError:
        return False


class TestMooncake(CarrierContract):
    """Control data in a folder, bytes in the store."""

    @pytest.fixture(autouse=True)
    def _settings(self, port: int) -> None:
        self.settings = settings_of(port, segment=0)

    def place(self, tmp_path: Path) -> Any:
        """A folder."""
        return tmp_path / "place"

    def writer(self, place: Any, **options: Any) -> Any:
        """A producer of this process."""
        return carrier.open_writer(place, SPEC, store=self.settings, **options)

    def reader(self, place: Any, **options: Any) -> Any:
        """A reader of this process."""
        return carrier.open_reader(place, store=self.settings, **options)

    def kill(self, place: Any, writer: Any) -> None:
        """The system frees a dead process's locks."""
        writer._slot.release()

    def key(self, place: Any, name: BlockName) -> tuple[carrier.Client, str]:
        """A client, and the key of a block."""
        document = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
        return carrier.Client(self.settings), f"{document['place']}/{name.producer}/{name.number:09d}"

    def delete(self, place: Any, name: BlockName) -> None:
        """Remove its object."""
        client, key = self.key(place, name)
        assert 0 == client.store.remove(key, True)
        client.close()

    def damage(self, place: Any, name: BlockName) -> None:
        """Another object takes its place."""
        client, key = self.key(place, name)
        data = flip_in_rows(client.store.get(key))
        assert 0 == client.store.remove(key, True)
        assert 0 == client.store.put(key, data)
        client.close()


def test_a_key_that_exists_is_not_taken_for_a_block_of_ours(tmp_path: Path, port: int) -> None:
    """The store answers success to a second put and keeps the first object: the writer looks before."""
    settings = settings_of(port, segment=0)
    writer = carrier.open_writer(tmp_path / "place", SPEC, store=settings, run="run", producer="p")
    slot: Any = writer._slot
    key = slot._files.key(BlockName("p", 0))
    writer.write(sample(0))
    client = carrier.Client(settings)
    assert 0 == client.store.put(key, b"another's")
    with pytest.raises(StoreError, match="expected no object") as caught:
        writer.flush()
    assert ErrorKind.WRITER == caught.value.kind
    client.store.remove(key, True)
    client.close()


def test_a_restarted_producer_deletes_what_was_acknowledged_before(tmp_path: Path, port: int) -> None:
    """Objects are pinned: one that the restarted producer did not know of would stay for ever."""
    settings, place = settings_of(port, segment=0), tmp_path / "place"

    def opened(**limits: Any) -> Any:
        bounds = BlockLimits(block_bytes=1, **limits)
        return carrier.open_writer(place, SPEC, store=settings, run="run", producer="p", limits=bounds)

    writer = opened()
    for index in range(3):
        writer.write(sample(index, tokens=50))
    keys = [writer._slot._files.key(BlockName("p", number)) for number in range(3)]
    with carrier.open_reader(place, store=settings, producers=1, follow=False) as reader:
        assert 3 == len(list(reader))
    writer._slot.release()  # as a death does: no end is stated

    with opened(max_bytes=1) as again:
        again.write(sample(3, tokens=50))
    client = carrier.Client(settings)
    assert [0, 0, 0] == [client.store.is_exist(key) for key in keys]
    client.close()


def test_ranks_behind_a_relay_are_sent_what_they_train_on(tmp_path: Path, port: int) -> None:
    """Objects are fetched whole, once, by the relay; each of 64 ranks is sent its own rows, layers and tokens."""
    settings, place = settings_of(port, segment=0), tmp_path / "place"
    with carrier.open_writer(place, rank_local.SPEC, store=settings, run="run", producer="p") as writer:
        for record in rank_local.records():
            writer.write(record)
    sent, _ = rank_local.sent_by_relay(str(place), 64, store=settings)
    client = carrier.Client(settings)
    document = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
    assert client.store.remove_by_regex(f"^{document['place']}/.*", True) > 0  # read a moment ago, and leased since
    client.close()

    rank_local.require_own_parts(sent)


def test_blocks_are_pinned_and_a_full_store_is_an_error(tmp_path: Path, port: int) -> None:
    """64 MB of segments, blocks of 5 MB: the store refuses one more and evicts none; every block that came is read."""
    settings = settings_of(port, segment=0)
    limits = BlockLimits(block_bytes=2**30, max_bytes=2**30)
    writer = carrier.open_writer(tmp_path / "place", SPEC, store=settings, run="run", producer="p", limits=limits)
    sent = 0

    def fill() -> None:
        nonlocal sent
        for index in range(40):
            writer.write(sample(index, tokens=200_000))
            writer.flush()
            sent += 1

    with pytest.raises(StoreError) as caught:
        fill()
    assert ErrorKind.NO_SPACE == caught.value.kind
    assert sent > 2
    with carrier.open_reader(tmp_path / "place", store=settings, producers=1, follow=False) as reader:
        names = [BlockName("p", number) for number in range(sent)]
        assert [sample(index, tokens=200_000).key for index in range(sent)] == [
            record.key for name in names for record in reader.fetch(name)
        ]
        store: Any = reader._store
        for name in names:
            store._files.delete(name)


def test_settings_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A misspelt key would be a default of the store."""
    with pytest.raises(UsageError, match="master_server_addr"):
        carrier.open_writer(tmp_path / "place", SPEC, store={"master": "x"}, run="run", producer="p")


@pytest.mark.slow  # the store's own timeout is a minute and more
def test_a_store_that_does_not_answer_is_told(tmp_path: Path) -> None:
    """The error names the master."""
    settings = settings_of(free_port(), segment=0)
    writer = carrier.open_writer(tmp_path / "place", SPEC, store=settings, run="run", producer="p")
    writer.write(sample(0))
    with pytest.raises(TransportError, match="expected a Mooncake store at"):
        writer.flush()
