"""Tries inputs on a decoder, in a process of its own, and counts what becomes of each."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

from routeplane.errors import RouteplaneError
from tests.trust.decoders import CONTROL, PAYLOAD, Home, Input, damaged, edited, share

__all__ = ["BOUNDS", "Row", "as_written", "measured", "tried_on"]

#: Bytes that reading may take beyond twice the input, and seconds of processor time.
MORE_BYTES, SECONDS = 16 * 2**20, 1.0
BOUNDS = f"memory <= 2x input + {MORE_BYTES // 2**20} MB, <= {SECONDS:g} s of processor time"
#: Seconds after which an input hangs, whatever it waits for.
_HANGS = 20.0
_STATUS = Path("/proc/self/status")
#: Where inputs are written: in memory where that can be, since a disk takes milliseconds for each file it empties.
_PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    HEAD: ClassVar[str] = (
        "decoder | tried | same | refused | silent | untyped | hangs | worst memory MB | worst ms | seconds"
    )

    name: str
    kind: str
    tried: int = 0
    same: int = 0
    refused: int = 0
    silent: int = 0
    untyped: int = 0
    hangs: int = 0
    memory: int = 0
    slowest: float = 0.0
    seconds: float = 0.0
    findings: tuple[str, ...] = field(default=(), repr=False)

    @property
    def holds(self) -> bool:
        """Whether nothing was silent, untyped or hung, and memory stayed within its bound."""
        return self.tried > 0 and not (self.silent or self.untyped or self.hangs) and self.memory <= MORE_BYTES

    def __str__(self) -> str:
        counts = (self.tried, self.same, self.refused, self.silent, self.untyped, self.hangs)
        cells = [self.name, *map(str, counts), f"{self.memory / 2**20:.1f}", f"{1000 * self.slowest:.0f}"]
        return " | ".join([*cells, f"{self.seconds:.0f}"]) + ("" if self.holds else " | MISSED")


class _HangError(Exception):
    """An input that does not end."""


@contextmanager
def _alarmed() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _HANGS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _status(name: str) -> int:
    """Bytes of a line of this process's status."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _forget_peak() -> int:
    """Begin a new peak of resident memory; what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS:")


def _outcome(given: Input, data: bytes) -> tuple[str, str]:
    try:
        with _alarmed():
            return ("same" if given.read(data) else "silent"), ""
    except RouteplaneError as error:
        return "refused", str(error)
    except _HangError:
        return "hangs", f"no end within {_HANGS:g} s"
    except FileNotFoundError as error:
        # the system's own, for a file that a document names no more
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001  what the campaign looks for
        return "untyped", f"{type(error).__name__}: {error}"


def tried_on(name: str, count: int, *, seed: int = 0) -> Row:
    """``count`` inputs on one decoder, in this process."""
    kind, (decoder, _) = ("payload", PAYLOAD[name]) if name in PAYLOAD else ("control", CONTROL[name])
    warnings.simplefilter("ignore")
    dice, found, findings = random.Random(f"{seed} {name}"), Counter[str](), list[str]()
    memory, slowest, begun = 0, 0.0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="routeplane-trust-", dir=_PLACE) as path, ExitStack() as stack:
        inputs = list(decoder(Home(Path(path), stack)))
        for given in inputs:
            good = as_written(given)
            outcome, why = _outcome(given, good)
            if outcome != "same":
                raise AssertionError(f"{name}: the good input is {outcome}: {why}")
            for _ in range(-(-count // len(inputs))):
                is_edit = given.edit is not None and dice.randrange(4) > 0
                data = edited(given, dice) if is_edit else damaged(good, dice)
                before, cpu = _forget_peak(), time.process_time()
                outcome, why = _outcome(given, data)
                seconds, peak = time.process_time() - cpu, _status("VmHWM:") - before
                outcome = "hangs" if seconds > SECONDS and outcome in ("same", "refused") else outcome
                found[outcome] += 1
                if outcome in ("silent", "untyped", "hangs") and len(findings) < 12:
                    findings.append(f"{outcome} {why} <- {data[:160]!r}")
                memory, slowest = max(memory, peak - 2 * len(data)), max(slowest, seconds)
    counts = {outcome: found[outcome] for outcome in ("same", "refused", "silent", "untyped", "hangs")}
    return Row(
        name=name,
        kind=kind,
        tried=found.total(),
        **counts,
        memory=memory,
        slowest=slowest,
        seconds=time.monotonic() - begun,
        findings=tuple(findings),
    )


def as_written(given: Input) -> bytes:
    """The good document as its writer writes it."""
    return given.data if given.edit is None else given.edit(json.loads(given.data))


def measured(inputs: int, *, only: str = "", seed: int = 0) -> Iterator[Row]:
    """A row per decoder whose name holds a part of ``only``; ``inputs`` of payloads and as many of control data."""
    with ExitStack() as stack:
        pool: ProcessPoolExecutor | None = None
        for kind, table in (("payload", PAYLOAD), ("control", CONTROL)):
            for name, (_, per_mille) in table.items():
                if not any(part in name for part in only.split(",")):
                    continue
                pool = pool or stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
                try:
                    yield pool.submit(tried_on, name, share(per_mille, inputs), seed=seed).result()
                except AssertionError as error:  # a good input that is not read as one
                    yield Row(name=name, kind=kind, tried=1, untyped=1, findings=(str(error),))
                except BrokenProcessPool:
                    pool = None
                    yield Row(name=name, kind=kind, tried=1, untyped=1, findings=("the process ended",))
