"""Producers and readers of every carrier, killed at random moments: what was lost, torn, stuck or repeated.

``python -m tests.stream.kill_matrix --kills 1000`` runs the whole matrix and prints a table; ``test_kills`` runs parts.
The process that runs it opens no carrier itself, so that its forks carry no threads of one along.

A run has two producers and one reader, each started again whenever it died, and a byte bound of a quarter of the data.
Ways: ``kill`` (SIGKILL at a random moment), ``inside`` (blocks so large that most kills fall inside of one), ``stop``
(SIGSTOP, and on again), ``fork`` (a producer leaves a child behind that lives on), ``delete`` (all producers die, and
all blocks that the reader acknowledged are deleted), ``full`` (a small file system that grows at the end).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from routeplane.errors import RouteplaneError
from routeplane.stream.blocks import BlockLimits, ReadOptions
from routeplane.testing.builders import SPEC, sample
from tests.stream.folder_processes import Actor, name_of

__all__ = ["CARRIERS", "PLAN", "WAYS", "Figures", "run", "served"]

WAYS = ("kill", "inside", "stop", "fork", "delete", "full")
#: Carrier -> the ways that make sense there, and its share of the kills.
CARRIERS: dict[str, tuple[tuple[str, ...], float]] = {
    "folder": (WAYS, 0.625),
    "flight": (("kill", "inside", "stop", "delete"), 0.20),
    "mooncake": (("kill", "inside", "stop"), 0.10),
    "ray": (("kill", "inside", "stop"), 0.075),
}
#: Longest pause between two kills, in seconds. A process of Ray takes seconds to connect; kills within them alone would
#: show nothing.
_PAUSES = {"inside": 0.1, "ray": 6.0}
#: Seconds after which a run in which no process logged anything counts as stuck; far beyond what a busy machine needs.
PATIENCE_S = 180.0
_PRODUCERS = ("p", "q")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one run, or many, came to."""

    runs: int = 0
    kills: int = 0
    records: int = 0
    lost: int = 0
    torn: int = 0
    stuck: int = 0
    repeats: int = 0
    repeats_beyond: int = 0  # repeats of what had been acknowledged

    def merge(self, other: Figures) -> Figures:
        """Both."""
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.torn or self.stuck or self.repeats_beyond)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How large a run is."""

    count: int
    tokens: int
    limits: BlockLimits

    @property
    def names(self) -> set[str]:
        """Every record with its checksum, as a reader logs it."""
        return {
            f"{sample(index, tokens=self.tokens, sample_id=name_of(name, index)).checksum:016x} {name_of(name, index)}"
            for name in _PRODUCERS
            for index in range(self.count)
        }


def PLAN(way: str, kills: int) -> Plan:
    """The size of a run by its way."""
    if way == "inside":
        limits = BlockLimits(block_bytes=1, max_bytes=3_000_000, sync=False, timeout_s=60.0)
        return Plan(count=max(20, kills), tokens=40_000, limits=limits)
    limits = BlockLimits(block_bytes=1, max_bytes=150_000, sync=way == "full", timeout_s=60.0)
    return Plan(count=max(40, 2 * kills), tokens=400, limits=limits)


def _connected(carrier: str, settings: dict[str, Any]) -> Any:
    """The carrier's module, in a process that has connected to what it needs."""
    if "cluster" in settings:
        import ray

        ray.init(settings["cluster"], namespace="kills", log_to_driver=False, logging_level="error")
    return import_module(f"routeplane.stream.{carrier}")


def _write(
    carrier: str, settings: dict[str, Any], producer: str, work: tuple[Plan, bool], say: Any, before: Any
) -> None:
    """A producer: goes on behind the last record that was logged."""
    plan, leave_child = work
    first = int(before[-1]) + 1 if before else 0
    module = _connected(carrier, settings)
    place, more = settings["place"], settings.get("options", {})
    options = {"run": "kills", "producer": producer, "limits": plan.limits, **more}
    with module.open_writer(place, SPEC, **options) as writer:
        if leave_child and os.fork() == 0:
            time.sleep(0.5)
            os._exit(0)
        for index in range(first, plan.count):
            writer.write(sample(index, tokens=plan.tokens, sample_id=name_of(producer, index)))
            say(f"{index}")


def _read(carrier: str, settings: dict[str, Any], say: Any, before: Any) -> None:
    """The reader: logs each record, and each position that it acknowledged."""
    module = _connected(carrier, settings)
    options = ReadOptions(on_vanished="wait", timeout_s=PATIENCE_S, acknowledge="call")
    more = settings.get("options", {})
    with module.open_reader(settings["place"], producers=list(_PRODUCERS), options=options, **more) as reader:
        say("started")
        for record in reader:
            say(f"{record.verify().checksum:016x} {record.sample_id}")
            if reader.reached != reader.position():
                reader.acknowledge(reader.reached)
                say(f"acknowledged {sum(reader.reached.next.values())}")
        reader.acknowledge(reader.reached)
        say("complete" if reader.report().complete else "incomplete")


# ----------------------------------------------------------------------------------------------------------------------
# What a carrier needs beside its processes
# ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(carrier: str, folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """What carries blocks; each call gives the settings of a fresh place."""
    numbers = itertools.count()
    if carrier == "folder":
        yield lambda: {"place": folder / f"place-{next(numbers)}"}
        return
    helper = {"flight": _serve_flight, "mooncake": _serve_mooncake, "ray": _serve_ray}[carrier]
    with helper(folder) as fresh:
        yield lambda: fresh(next(numbers))


@contextlib.contextmanager
def _beside(command: str, *arguments: str) -> Iterator[str]:
    """A process of its own; what it says first. It ends with this context."""
    done = [sys.executable, "-c", command, *arguments]
    with subprocess.Popen(done, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(line.strip() for line in process.stdout if line.strip())
        finally:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def _serve_flight(folder: Path) -> Iterator[Callable[[int], dict[str, Any]]]:
    command = (
        "import sys; from routeplane.stream import flight\n"
        "held = []\n"
        "for line in sys.stdin:\n"
        "    held.append(flight.Server(line.strip())); print(held[-1].place, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", command], stdout=-1, stdin=-1, text=True, bufsize=1) as process:

        def fresh(number: int) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            where = folder / f"served-{number}"
            process.stdin.write(f"{where}\n")
            return {"place": process.stdout.readline().strip(), "folder": where}

        try:
            yield fresh
        finally:
            process.kill()


@contextlib.contextmanager
def _serve_mooncake(folder: Path) -> Iterator[Callable[[int], dict[str, Any]]]:
    import importlib.util

    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.submodule_search_locations is not None
    master = Path(found.submodule_search_locations[0]) / "mooncake_master"
    port, other = _free_port(), _free_port()
    store = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,
        "local_buffer_size": 32 * 2**20,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": f"127.0.0.1:{port}",
    }
    node = (
        "import json, sys, time; from routeplane.stream import mooncake\n"
        "settings = json.loads(sys.argv[1]); settings['global_segment_size'] = 2**28\n"
        "time.sleep(1.0); client = mooncake.Client(settings)\n"
        "client.store; print('ready', flush=True); time.sleep(1e6)\n"
    )
    import json

    log = (folder / "master.log").open("wb")
    command = [str(master), f"--rpc_port={port}", f"--metrics_port={other}", "--rpc_address=127.0.0.1"]
    with subprocess.Popen(command, stdout=log, stderr=log) as process, log:
        try:
            with _beside(node, json.dumps(store)) as ready:
                assert "ready" in ready or ready, ready
                yield lambda number: {"place": folder / f"control-{number}", "options": {"store": store}}
        finally:
            process.kill()


@contextlib.contextmanager
def _serve_ray(folder: Path) -> Iterator[Callable[[int], dict[str, Any]]]:
    """A cluster in a process of its own; a token of its own lets the forked processes in.

    Ray reads the token's settings when it is imported, so the process that forks must not have imported it before.
    """
    del folder
    command = (
        "import ray, sys\n"
        "ray.init(address='local', num_cpus=2, object_store_memory=2**28, include_dashboard=False, "
        "log_to_driver=False, logging_level='error')\n"
        "print('cluster', ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read(); ray.shutdown()\n"
    )
    assert "ray" not in sys.modules
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with mock.patch.dict(os.environ, own):
        with subprocess.Popen([sys.executable, "-c", command], stdout=-1, stdin=-1, text=True) as process:
            assert process.stdout is not None
            said = next(line.split() for line in process.stdout if line.startswith("cluster"))
            try:
                yield lambda number: {"place": f"kills-{number}", "cluster": said[1]}
            finally:
                process.communicate(timeout=60.0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of so many bytes; as root alone."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ----------------------------------------------------------------------------------------------------------------------
# A run
# ----------------------------------------------------------------------------------------------------------------------


def run(carrier: str, way: str, settings: dict[str, Any], logs: Path, *, kills: int, seed: int) -> Figures:
    """One run with so many kills; its figures."""
    plan, dice = PLAN(way, kills), random.Random(seed)
    with contextlib.ExitStack() as stack:
        if way == "full":
            disk = stack.enter_context(_small_disk(logs / "disk", plan.limits.max_bytes // 2))
            settings = {**settings, "place": disk / "place", "disk": disk}
        writers = {
            name: Actor(logs / name, partial(_write, carrier, settings, name, (plan, way == "fork")))
            for name in _PRODUCERS
        }
        reader = Actor(logs / "reader", partial(_read, carrier, settings))
        hits, stuck = _play([*writers.values(), reader], reader, settings, way, kills=kills, dice=dice)
    return replace(_judged(plan, reader, writers), kills=hits, stuck=stuck, runs=1)


def _play(
    actors: list[Actor], reader: Actor, settings: dict[str, Any], way: str, *, kills: int, dice: Any
) -> tuple[int, int]:
    pause = _PAUSES["ray"] if "cluster" in settings else _PAUSES.get(way, 0.03)
    hits, since, before, disk = 0, time.monotonic(), 0, settings.get("disk")
    for actor in actors:
        actor.start()
    while not reader.is_done:
        living = [actor for actor in actors if not actor.is_done]
        now = sum(len(actor.lines()) for actor in actors)
        if now != before:
            before, since = now, time.monotonic()
        if time.monotonic() - since > PATIENCE_S:
            for actor in actors:
                actor.kill()
            return hits, 1
        if hits < kills and living:
            time.sleep(dice.random() * pause)
            hits += _hit(living, actors, reader, settings, way, dice)
        else:
            if disk is not None:
                subprocess.run(["mount", "-o", "remount,size=100%", str(disk)], check=True)
                disk = None
            reader.process.join(0.02)  # type: ignore[union-attr]
        for actor in actors:
            if not actor.is_done and (actor.process is None or not actor.process.is_alive()):
                actor.join()
                if not actor.is_done:
                    actor.start()
    for actor in actors:
        actor.join()
    return hits, 0


def _hit(living: list[Actor], actors: list[Actor], reader: Actor, settings: dict[str, Any], way: str, dice: Any) -> int:
    """Do harm once; how many processes were killed."""
    victim = dice.choice(living)
    if way == "stop" and dice.random() < 0.5:
        pid = victim.process.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(dice.random() * 0.2)
            os.kill(pid, signal.SIGCONT)
        return 0
    if way == "delete" and dice.random() < 0.3:
        return _delete_all(actors, reader, settings)
    victim.kill()
    return 1


def _delete_all(actors: list[Actor], reader: Actor, settings: dict[str, Any]) -> int:
    """Kill the producers; once the reader acknowledged every block, delete all of them."""
    from routeplane.record.interfaces import Position

    writers = [actor for actor in actors if actor is not reader]
    hits = sum(not actor.is_done for actor in writers)
    for actor in writers:
        actor.kill()
    place = Path(settings.get("folder", settings["place"]))
    end = time.monotonic() + 1.0
    while time.monotonic() < end and not reader.is_done:
        time.sleep(0.02)
    path = place / "groups" / "default" / "position.json"
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, RouteplaneError):
        import json

        position = Position.from_json(json.loads(path.read_text())["position"])
        for block in place.glob("producers/*/*.arrows"):
            if int(block.stem) < position.number(block.parent.name):
                block.unlink(missing_ok=True)
    return hits


def _judged(plan: Plan, reader: Actor, writers: dict[str, Actor]) -> Figures:
    lines, expected = reader.lines(), plan.names
    came = [line for line in lines if len(line.split(" ")[0]) == 16]
    beyond = _repeats_beyond(lines)
    return Figures(
        records=len(expected),
        lost=len(expected - set(came)) + (not lines or lines[-1] != "complete"),
        torn=len(set(came) - expected),
        repeats=len(came) - len(set(came)),
        repeats_beyond=beyond,
    )


def _repeats_beyond(lines: list[str]) -> int:
    """Records that came again although a later acknowledgement had been answered."""
    safe: set[str] = set()
    pending: list[str] = []
    beyond = 0
    for line in lines:
        if line == "started":
            pending = []  # what an earlier process had yielded and not acknowledged comes again
        elif line.startswith("acknowledged"):
            # the record that was just yielded opened the next block, and is not acknowledged yet
            safe.update(pending[:-1])
            pending = pending[-1:]
        elif len(line.split(" ")[0]) == 16:
            beyond += line in safe
            pending.append(line)
    return beyond


def matrix(kills: int, *, seed: int = 0, carriers: tuple[str, ...] = tuple(CARRIERS)) -> dict[tuple[str, str], Figures]:
    """Every carrier and way with its share of the kills."""
    found: dict[tuple[str, str], Figures] = {}
    per_run = 25
    for carrier in carriers:
        ways, share = CARRIERS[carrier]
        with tempfile.TemporaryDirectory() as name, served(carrier, Path(name)) as fresh:
            for number, way in zip(range(max(len(ways), round(kills * share / per_run))), itertools.cycle(ways)):
                logs = Path(name) / f"logs-{number}"
                logs.mkdir()
                done = run(carrier, way, fresh(), logs, kills=per_run, seed=seed + number)
                found[carrier, way] = found.get((carrier, way), Figures()).merge(done)
                if not done.holds:
                    sys.stderr.write(f"{carrier} {way}, seed {seed + number}: {done}\n")
    return found


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> int:
    """Run the matrix and print it."""
    parser = argparse.ArgumentParser(prog="tests.stream.kill_matrix")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--carriers", nargs="*", default=list(CARRIERS), choices=list(CARRIERS))
    arguments = parser.parse_args()
    found = matrix(arguments.kills, seed=arguments.seed, carriers=tuple(arguments.carriers))
    total = Figures()
    names = list(vars(total))
    _say("carrier   way     " + " ".join(f"{name:>14}" for name in names))
    for (carrier, way), figures in found.items():
        _say(f"{carrier:9} {way:7} " + " ".join(f"{getattr(figures, name):14}" for name in names))
        total = total.merge(figures)
    _say(f"{'all':17} " + " ".join(f"{getattr(total, name):14}" for name in names))
    return 0 if total.holds else 1


if __name__ == "__main__":
    sys.exit(main())
