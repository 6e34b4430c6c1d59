"""The engine's actor with a real vLLM: reserved before the load, probed after it, and back at its URL after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from routeplane.errors import CaptureError, ErrorKind, FleetError, SpecError, UsageError
from routeplane.fleet.actors import ActorOptions, EngineHandle, start_engine
from routeplane.fleet.endpoints import ServerState
from routeplane.fleet.engine import EngineConfig
from routeplane.fleet.startup import Plan, Task, TaskContext, start
from routeplane.fleet.teardown import children_of, process_of
from routeplane.record.spec import RouteSpec
from tests.capture.reading import response_calls
from tests.capture.vllm_engine import QWEN3_MOE
from tests.fleet.callers import Callers
from tests.fleet.workers import has_ended
from tests.ray_cluster import local_cluster

pytestmark = pytest.mark.vllm

#: vLLM's own settings, in the actors alone.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
OPTIONS = ActorOptions(ray={"runtime_env": {"env_vars": SETTINGS}})
PROMPT = [5, 6, 7, 8]
ENGINE = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 128, "skip_tokenizer_init": True}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster for this file."""
    with local_cluster(object_store_bytes=100 * 2**20):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoE in a folder."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    made: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE))
    made.eval().save_pretrained(folder)
    return folder


def spec_of(folder: Path) -> RouteSpec:
    """The geometry of the saved model."""
    return RouteSpec.from_hf_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def config_of(folder: Path, spec: RouteSpec | None, **options: Any) -> EngineConfig:
    """One shard on loopback."""
    return EngineConfig(model=str(folder), spec=spec, port_range=(18_800, 18_900), options={**ENGINE, **options})


def completion(url: str) -> dict[str, Any]:
    """Eight tokens from the server."""
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "temperature": 1.0}}
    request = urllib.request.Request(
        url.replace("/v1", "/inference/v1/generate"),
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


def leave_a_trace(worker: Any) -> None:
    """A hook: says in which process it ran, and with what."""
    folder = Path(os.environ["FLEET_TESTS_TRACES"])
    (folder / f"{os.getpid()}-{worker.rank}").write_text(type(worker).__name__, encoding="utf-8")


def rows_of(response: dict[str, Any], spec: RouteSpec) -> tuple[int, ...]:
    """The shape of the rows of a response's one call."""
    [call] = response_calls(response, spec, prompt_ids=PROMPT, weights_version=0, cached=0)
    assert call.routes is not None
    return call.routes.shape


def test_an_engine_is_reserved_loaded_probed_served_killed_and_back_at_its_url(model: Path) -> None:
    """The life of a shard: 503 before it serves, routes of the spec afterwards, the same URL after SIGKILL, and no
    caller that is refused meanwhile."""
    spec = spec_of(model)
    engine = asyncio.run(start_engine(config_of(model, spec, enable_scale_out=True), 3, options=OPTIONS))
    try:

        async def up() -> Any:
            with pytest.raises(FleetError, match="endpoint of engine-3 that was reserved"):
                await engine.state()
            reserved = await engine.reserve()
            assert (3, ServerState.RESERVED) == (reserved.shard, reserved.state)
            with pytest.raises(urllib.error.HTTPError) as early:
                await asyncio.to_thread(completion, reserved.url)
            assert (503, "1") == (early.value.code, early.value.headers["Retry-After"])
            early.value.close()
            with pytest.raises(FleetError):
                await engine.serve()  # nothing is loaded yet
            await engine.load()
            return await engine.serve()

        status = asyncio.run(up())
        assert ServerState.SERVING == status.endpoint.state
        assert 1.0 == status.agreement
        assert status.probed_rows > 0
        assert (4 + 8 - 1, *spec.row_shape) == rows_of(completion(status.endpoint.url), spec)
        assert 0 == asyncio.run(engine.drain(5.0))
        with Callers(status.endpoint.url, pause=0.2) as callers:
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(FleetError) as lost:
                asyncio.run(engine.drain(1.0))
            assert ErrorKind.ACTOR_LOST == lost.value.kind
            assert ServerState.DEGRADED == asyncio.run(engine.state()).state
            assert 503 == code_of(f"{status.endpoint.url}/models")
            again = asyncio.run(engine.restart())
            assert 200 == code_of(f"{status.endpoint.url}/models")
        # no caller was refused; those whose answer the kill cut off are one for each at most
        assert {200, 503} <= set(callers.answers) <= {200, 503, "cut"}
        assert callers.answers["cut"] <= 4
        assert status.endpoint == again.endpoint
        assert (4 + 8 - 1, *spec.row_shape) == rows_of(completion(again.endpoint.url), spec)
    finally:
        engine.close()
    assert [] == [process for process in (*status.processes, *again.processes) if not has_ended(process)]
    with pytest.raises(urllib.error.URLError, match="refused"):
        completion(again.endpoint.url)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("several", "ranks"), [("0", 1), ("1", 1), ("1", 2)], ids=["one process", "vLLM's own default", "two ranks"]
)
def test_a_hook_runs_in_each_worker_and_a_dead_core_answers_503(
    model: Path, tmp_path: Path, several: str, ranks: int
) -> None:
    """The hook before the probe; after SIGKILL of what is below the actor, every path says 503 within two seconds."""
    spec = spec_of(model)
    variables = {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": several, "FLEET_TESTS_TRACES": str(tmp_path)}
    options = ActorOptions(ray={"runtime_env": {"env_vars": variables}})
    sized = config_of(model, spec, tensor_parallel_size=ranks)
    config = replace(sized, hook="tests.fleet.test_engine_actor:leave_a_trace")
    engine = asyncio.run(start_engine(config, 0, options=options))
    try:

        async def up() -> Any:
            await engine.reserve()
            await engine.load()
            return await engine.serve()

        status = asyncio.run(up())
        traces = [trace.name.split("-") for trace in tmp_path.iterdir()]
        assert [str(rank) for rank in range(ranks)] == sorted(rank for _, rank in traces)
        if several == "1":
            below = children_of(engine.pid)
            assert {int(pid) for pid, _ in traces} <= {process.pid for process in below}
            for process in below:
                os.kill(process.pid, signal.SIGKILL)
            before = time.monotonic()
            while (code := code_of(f"{status.endpoint.url}/models")) == 200 and time.monotonic() < before + 2:
                time.sleep(0.05)
            assert 503 == code
            assert ServerState.DEGRADED == asyncio.run(engine.state()).state
    finally:
        engine.close()


def code_of(url: str) -> int:
    """The status that a GET is answered with."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_a_hook_and_a_worker_extension_exclude_each_other(model: Path) -> None:
    """The hook is one."""
    with pytest.raises(UsageError, match="worker_extension_cls"):
        replace(config_of(model, None, worker_extension_cls="a.B"), hook="a:b")


def test_an_option_that_the_engine_does_not_have_is_refused(model: Path) -> None:
    """A misspelt one would silently be the default."""
    from routeplane.capture.vllm.api_server import load_engine

    with pytest.raises(UsageError, match="expected arguments of vLLM's server, got max_modle_len"):
        asyncio.run(load_engine(str(model), spec=None, served_name="policy", options={"max_modle_len": 64}))


@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_loads_ends_the_plan(model: Path) -> None:
    """SIGKILL once the engine has a process of its own: ACTOR_LOST is told, and no process and no socket is left."""
    spec = spec_of(model)
    seen: dict[str, Any] = {}

    async def reserved(context: TaskContext) -> EngineHandle:
        make = partial(start_engine, config_of(model, spec), 0, options=OPTIONS)
        engine: EngineHandle = await context.acquire(make, EngineHandle.close)
        seen["url"] = (await engine.reserve()).url
        return engine

    async def load(context: TaskContext) -> None:
        await context.results["reserved"].load()

    async def kill(context: TaskContext) -> None:
        pid = context.results["reserved"].pid
        while not (below := children_of(pid)):
            await asyncio.sleep(0.02)
        seen["processes"] = (process_of(pid), *below)
        os.kill(pid, signal.SIGKILL)

    tasks = (
        Task(name="reserved", run=reserved),
        Task(name="load", run=load, needs=("reserved",)),
        Task(name="kill", run=kill, needs=("reserved",)),
    )
    with pytest.raises(FleetError, match="task load: FleetError: expected actor engine-0 to be alive") as caught:
        start(Plan(tasks=tasks))
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert [ErrorKind.ACTOR_LOST] == [getattr(error, "kind", None) for error in caught.value.__cause__.exceptions]
    assert len(seen["processes"]) >= 2
    assert all(has_ended(process) for process in seen["processes"])
    with pytest.raises(urllib.error.URLError, match="refused"):
        completion(seen["url"])


def test_what_cannot_return_routes_is_refused_before_weights_load(model: Path, tmp_path: Path) -> None:
    """A dense model, another geometry, capture turned off: each as its own error, across Ray."""
    spec = spec_of(model)
    settings: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    dense: Any = Qwen3ForCausalLM(Qwen3Config(**settings, **heads))
    dense.save_pretrained(tmp_path)
    wider = RouteSpec(num_experts=spec.experts_per_layer[0] + 1, top_k=spec.top_k, layer_ids=spec.layer_ids)
    cases: list[tuple[EngineConfig, type[Exception], ErrorKind]] = [
        (config_of(tmp_path, spec), SpecError, ErrorKind.DENSE_MODEL),
        (config_of(model, wider), SpecError, ErrorKind.SPEC_MISMATCH),
        (config_of(model, spec, enable_return_routed_experts=False), CaptureError, ErrorKind.CAPTURE_OFF),
    ]
    engines = [asyncio.run(start_engine(config, 0, options=OPTIONS)) for config, _, _ in cases]

    async def load_all() -> list[Any]:
        # at once: what takes time is importing the engine in each
        return await asyncio.gather(*(engine.load() for engine in engines), return_exceptions=True)

    errors = asyncio.run(load_all())
    for engine in engines:
        engine.close()
    assert [(error, kind) for _, error, kind in cases] == [(type(each), getattr(each, "kind", None)) for each in errors]
