"""vLLM's own server with the writer in its engine, as an operator starts it, and clients that count its tickets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx

from routeplane.capture.http.tickets import call_of_ticket
from routeplane.record.interfaces import RouteTicket
from routeplane.record.prefixes import resolve
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.stream import open_stream

__all__ = ["FORMS", "Answers", "Server", "blocks", "hashes", "load", "record_of", "running"]

ROOT = Path(__file__).parents[2]
# what the Makefile gives engines, but with the processes that a server has
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(ROOT),
}


_MODULE = "vllm.entrypoints.openai.api_server"
# what the three processes of a server import
_PRELOADED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen3_moe",
    "routeplane.capture.vllm.scheduler",
    "routeplane.capture.http.middleware",
)


class ForkedServer:
    """A server's process as ``subprocess.Popen`` has it, forked from one that has imported vLLM.

    Importing it takes most of a start (some 35 seconds of CPU time for the three processes of a server), and twenty
    servers are killed in a row. From the fork on, the same code runs with the same arguments.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, __name__])
        self._process = context.Process(target=_serve, args=(list(arguments), str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(_MODULE, timeout or 0.0)

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _serve(arguments: list[str], log: str) -> None:
    """Be the server."""
    os.setsid()
    with open(log, "wb") as out:
        for descriptor in (1, 2):
            os.dup2(out.fileno(), descriptor)
    os.environ.update(_ENVIRONMENT)
    # on a CPU, vLLM spawns the engine core and the worker, which would import all that again
    for module in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        vars(import_module(module))["get_mp_context"] = lambda: multiprocessing.get_context("fork")
    sys.argv[1:] = arguments
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers, in a process group of its own."""

    url: str
    process: subprocess.Popen[bytes] | ForkedServer
    log: Path

    def engine_pid(self) -> int:
        """The process of the engine core."""
        for line in self.log.read_text().splitlines():
            if "EngineCore pid=" in line:
                return int(line.partition("EngineCore pid=")[2].partition(")")[0])
        raise AssertionError(f"no engine core in the log:\n{self.log.read_text()[-2000:]}")

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the engine's workers, or its writer, as an operator does."""
        body = {"method": method, "args": list(args), "kwargs": kwargs}
        answer = httpx.post(f"{self.url}/collective_rpc", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def post(self, path: str) -> None:
        """Call an endpoint of an operator's."""
        httpx.post(f"{self.url}{path}", timeout=60).raise_for_status()


@contextmanager
def running(
    model: Path, place: Path, log: Path, *, arguments: Sequence[str] = (), spawned: bool = False, **config: Any
) -> Iterator[Server]:
    """A server that writes into a place; what is left of it is killed on the way out.

    ``arguments``: further ones of the server; ``config``: of its writer; ``spawned``: by its command, as an operator
    starts it, and not from a process that has vLLM already.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    writer = {"place": str(place), "run": "run-7", **config}
    command = [
        *("--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--block-size", "32", "--max-model-len", "256", "--max-num-batched-tokens", "256"),
        *("--enforce-eager", "--no-enable-chunked-prefill", "--enable-return-routed-experts"),
        *("--scheduler-cls", "routeplane.capture.vllm.RouteScheduler"),
        *("--additional-config", json.dumps({"routeplane": writer})),
        *("--middleware", "routeplane.capture.http.RouteMiddleware", "--disable-uvicorn-access-log"),
        *arguments,
    ]
    process = _spawn(command, log) if spawned else ForkedServer(command, log)
    server = Server(url=f"http://127.0.0.1:{port}", process=process, log=log)
    try:
        _wait(server)
        yield server
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            if number == signal.SIGTERM:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=60)
            time.sleep(0.2)


def _spawn(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    command, environment = [sys.executable, "-m", _MODULE, *arguments], {**os.environ, **_ENVIRONMENT}
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)


def _wait(server: Server) -> None:
    for _ in range(1200):
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{server.log.read_text()[-4000:]}")
        try:
            if httpx.get(f"{server.url}/health", timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server did not answer:\n{server.log.read_text()[-4000:]}")


# ---- clients --------------------------------------------------------------------------------------------------------


@dataclass
class Answers:
    """What clients were promised. ``choices``: finished choices, with a ticket or not; ``broken``: requests cut off."""

    tickets: list[RouteTicket] = field(default_factory=list)
    missing: list[Any] = field(default_factory=list)
    broken: int = 0

    def take(self, choice: dict[str, Any], context: Any) -> None:
        """A choice that ended."""
        said = choice.get("routed_experts")
        if isinstance(said, str):
            self.tickets.append(RouteTicket.from_json(said))
        elif choice["finish_reason"] in ("abort", "error"):
            self.broken += 1  # the server ended it
        else:
            self.missing.append(context)


#: Every HTTP form, by name: path and what its body has beside model, length and temperature.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {}),
    "three choices": ("/v1/completions", {"n": 3}),
    "two prompts": ("/v1/completions", {"prompt": [[20, 21, 22], [30, 31, 32, 33]]}),
    "stop string": ("/v1/completions", {"stop": ["w1", "w2"], "max_tokens": 60}),
    "stream": ("/v1/completions", {"stream": True}),
    "stream of three choices": ("/v1/completions", {"stream": True, "n": 3}),
    "stream with a stop string": ("/v1/completions", {"stream": True, "stop": ["w1", "w2"], "max_tokens": 60}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w40 w41 w42"}]}),
    "chat stream of two choices": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "w50 w51"}], "stream": True, "n": 2},
    ),
}


async def ask(client: httpx.AsyncClient, url: str, form: str, name: str, answers: Answers, **changes: Any) -> None:
    """One request of a form; its tickets, or that it was cut off."""
    path, body = FORMS[form]
    seed = random.Random(name).randrange(2**20)
    prompt = {} if "chat" in path else {"prompt": [20 + (seed + 7 * at) % 400 for at in range(5 + seed % 30)]}
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    if form != "two prompts":  # each prompt is a sample of its own, under the id that vLLM gives it
        options["vllm_xargs"] = {"routeplane": json.dumps({"sample_id": name})}
    content = {**options, **prompt, **body, **changes}
    headers = {"x-routeplane-form": "engine-ticket"}
    try:
        if content.get("stream"):
            async with client.stream("POST", url + path, json=content, headers=headers) as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        _take_chunk(json.loads(line[6:]), (form, name), answers)
        else:
            answer = await client.post(url + path, json=content, headers=headers)
            if answer.status_code == 502:  # the middleware's own refusal: a finished choice without its ticket
                answers.missing.append((form, name, answer.text[:300]))
            answers.broken += answer.status_code in (500, 503)  # the engine is gone
            for choice in answer.json().get("choices", ()):
                answers.take(choice, (form, name, answer.json()))
    except (httpx.TransportError, json.JSONDecodeError):
        answers.broken += 1


def _take_chunk(chunk: dict[str, Any], context: Any, answers: Answers) -> None:
    for choice in chunk.get("choices", ()):
        if choice.get("finish_reason") is not None:
            answers.take(choice, (*context, chunk))


async def load(
    url: str,
    *,
    stem: str,
    count: int,
    answers: Answers,
    at_once: int = 12,
    patience_s: float = 60,
    until: asyncio.Event | None = None,
) -> None:
    """Requests of all forms, so many at once, until ``count`` were sent or ``until`` is set.

    ``patience_s``: when a client hangs up. A server that ends with vLLM's default timeout kills its engine and then
    waits for clients whose answers will never come.
    """
    limit = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=patience_s) as client:

        async def one(number: int) -> None:
            async with limit:
                if until is not None and until.is_set():
                    return
                await ask(client, url, list(FORMS)[number % len(FORMS)], f"{stem}-{number}", answers)

        await asyncio.gather(*(one(number) for number in range(count)))


# ---- the place ------------------------------------------------------------------------------------------------------


def blocks(place: Path) -> list[Path]:
    """The sealed blocks, in order."""
    return sorted(place.glob("producers/*/*.arrows"))


def hashes(place: Path) -> dict[str, str]:
    """Every block's content."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in blocks(place)}


def record_of(place: Path, ticket: RouteTicket, cache: dict[Path, dict[RecordKey, RouteRecord]]) -> RouteRecord:
    """Redeem a ticket: the record in the block that it names, whose call has the ticket's checksum.

    Rows that a group's records share stand in one of them, in this block or in one before.
    """
    _, producer, number = ticket.stream.split("/")
    path = place / "producers" / producer / f"{number}.arrows"
    if path not in cache:
        there = {record.key: record for record in open_stream(path)}
        before = [one for one in blocks(place) if one.parent == path.parent and one < path] if _deltas(there) else []
        known = {record.key: record for block in before for record in open_stream(block)}
        whole = {record.key: record for record in resolve({**known, **there}.values())}
        cache[path] = {key: whole[key] for key in there}
    record = cache[path][ticket.key]
    call_of_ticket(record, ticket)
    return record


def _deltas(records: Mapping[RecordKey, RouteRecord]) -> bool:
    return any(record.prefix is not None for record in records.values())
