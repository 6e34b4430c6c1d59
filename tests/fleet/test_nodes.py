"""A cluster of two nodes, both on this machine under addresses of their own: URLs are those of the engines' nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import ray
from ray.cluster_utils import Cluster

from routeplane.errors import RouteplaneError, UsageError
from routeplane.fleet.actors import ActorOptions, EngineHandle, start_engine
from routeplane.fleet.endpoints import Endpoints, ServerState
from routeplane.fleet.engine import EngineConfig
from tests.ray_cluster import SETTINGS

# one worker for all files that start a cluster: at most one at a time
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

# not 127.0.0.1, for which Ray puts the address of the machine
ADDRESSES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[None]:
    """The driver's node and another one; a shard for each fits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        cluster = Cluster()
        try:
            for address in ADDRESSES:
                resources = {"shard": 1, f"node {address}": 1}
                cluster.add_node(
                    node_ip_address=address, num_cpus=1, resources=resources, object_store_memory=100 * 2**20
                )
            ray.init(address=cluster.address, _node_ip_address=ADDRESSES[0], log_to_driver=False, logging_level="error")
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


def shard_on(address: str, shard: int, *, host: str = "0.0.0.0") -> EngineHandle:
    """A shard on one of the nodes; nothing is loaded."""
    config = EngineConfig(model="no model is loaded here", spec=None, host=host, port_range=(19_100, 19_200))
    options = ActorOptions(ray={"resources": {"shard": 1, f"node {address}": 0.1}})
    return asyncio.run(start_engine(config, shard, options=options))


def status_of(url: str) -> int:
    """What a caller is answered."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_each_shard_advertises_its_own_node() -> None:
    """Bound to all interfaces: the URL has the node's address, and there the endpoint answers."""
    engines = [shard_on(address, shard) for shard, address in enumerate(ADDRESSES)]
    try:
        endpoints = Endpoints(states=tuple(asyncio.run(engine.reserve()) for engine in engines))
        assert ADDRESSES == tuple(urlsplit(url).hostname for url in endpoints.urls)
        assert [503, 503] == [status_of(url) for url in endpoints.urls]
    finally:
        for engine in engines:
            engine.close()


def test_a_loopback_host_on_another_node_is_refused() -> None:
    """Its URL would be another machine's for every caller of the driver's."""
    engine = shard_on(ADDRESSES[1], 0, host="localhost")
    try:
        with pytest.raises(UsageError, match=r"EngineConfig\.host that other nodes reach.* 127\.0\.0\.3"):
            asyncio.run(engine.reserve())
    finally:
        engine.close()


@pytest.mark.vllm
def test_an_engine_comes_back_to_its_node(tmp_path: Path) -> None:
    """The other node has what it asks for, and is not where its URL is."""
    config = EngineConfig(model=str(tmp_path), spec=None, host="0.0.0.0", port_range=(19_100, 19_200))
    engine = asyncio.run(start_engine(config, 0, options=ActorOptions(ray={"resources": {"shard": 1}})))
    try:
        before = asyncio.run(engine.reserve())
        place = engine._place
        for _ in range(2):
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(RouteplaneError):  # there is no model to load
                asyncio.run(engine.restart())
            assert place.node == engine._place.node
            assert before == asyncio.run(engine.state())
            assert ServerState.RESERVED == before.state
            assert 503 == status_of(before.url)
    finally:
        engine.close()
