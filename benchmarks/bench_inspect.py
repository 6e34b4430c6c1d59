"""Looking at an archive: how long full statistics take, in how much memory, and how long the report takes.

Routes are those of ``bench_archive``: 48 layers, 8 of 128 experts, a Zipf law over each layer's experts; a few samples
are drawn, and stand in the archive many times under other names for their experts. Samples of 4,096 tokens. The
yardstick reads and decompresses the archive's routes once, shard by shard, through the same pipeline (zarrs), and does
nothing with them. Both are warm, and run in turn.

Memory is that of a process of its own: its high-water mark (VmHWM of ``/proc/self/status``) minus what it held once
everything was imported. Without ``full`` some 100 MB of ids, else 1 GB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from benchmarks.bench_archive import EXPERTS, SAMPLE, SPEC, draw, record
from benchmarks.measure import Result, relative_rates
from routeplane.archive import Archive, open_archive, save_archive
from routeplane.archive.shards import Range
from routeplane.inspect import SALVAGE, check, collect, find_findings, find_sources, survey
from routeplane.inspect.page import render_report
from routeplane.record.record import RouteRecord
from routeplane.stream import new_stream

#: Samples drawn, in all, and of the smaller archive whose memory is compared.
DRAWN, SAMPLES, FULL_SAMPLES, FEW = 4, 64, 640, 16
ROUNDS = 3

#: Run in a process of its own: the statistics of the archive at argv[1]; prints kilobytes.
_MEASURED = """
import json, re, sys
from pathlib import Path
from routeplane.archive import open_archive
from routeplane.inspect import collect

def held(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

archive = open_archive(sys.argv[1])
collect([archive[next(iter(archive))]], archive.spec)  # compiled loops and lazy imports are there
before = held("VmRSS")
found = collect(archive.select(), archive.spec)
print(json.dumps({"before": before, "peak": held("VmHWM"), "tokens": found.coverage.total}))
"""


def records(count: int) -> Iterator[RouteRecord]:
    """Samples of 4,096 tokens, one after the other."""
    drawn = [draw(SAMPLE, skew=0.9, seed=seed)[0] for seed in range(DRAWN)]
    for index in range(count):
        names_E = np.random.default_rng(index).permutation(EXPERTS).astype(np.int16)
        yield record(index, names_E[drawn[index % DRAWN]])


def read_and_decompress(archive: Archive) -> int:
    """Every shard of the archive's routes, as the bytes they decompress to; how many."""
    size = 0
    for run in archive.catalog.runs:
        rows, step = run.manifest.arrays["routes"].rows, run.chunks.layout("routes").shard_rows
        for start in range(0, rows, step):
            size += run.chunks.read(Range(array="routes", start=start, stop=min(start + step, rows))).nbytes
    return size


def peak_megabytes(place: Path) -> float:
    """What one pass over the archive needs beyond what is loaded."""
    done = subprocess.run([sys.executable, "-c", _MEASURED, str(place)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return round(float(found["peak"] - found["before"]) / 1024, 1)


def speed(archive: Archive) -> Result:
    """Full statistics against reading and decompressing, in turn."""
    shares = relative_rates(
        {
            "read and decompress": lambda: read_and_decompress(archive),
            "read records": lambda: sum(1 for _ in archive.select()),
            "statistics": lambda: collect(archive.select(), SPEC),
        },
        yardstick="read and decompress",
        rounds=ROUNDS,
    )
    times = {name: round(1 / share, 2) for name, share in shares.items()}
    return Result(
        name="inspect/stats_against_reading",
        value=times.pop("statistics"),
        unit=f"time of full statistics over that of reading and decompressing {archive.num_tokens:,} tokens",
        bar=6.0,
        higher_is_better=False,
        peers=times,
    )


def memory(folder: Path) -> Result:
    """The peak over the whole archive, and over one of a few samples."""
    save_archive(records(FEW), folder / "few", spec=SPEC, run="r")
    return Result(
        name="inspect/stats_memory",
        value=peak_megabytes(folder / "all"),
        unit="MB at the peak of statistics over an archive, beyond what is loaded",
        bar=300.0,
        higher_is_better=False,
        peers={f"{FEW} of its samples": peak_megabytes(folder / "few")},
    )


def report(archive: Archive) -> Result:
    """Seconds to lay out the page, pictures included, once its statistics are there."""
    statistics = collect(archive.select(), SPEC)
    page, spent = "", []
    for _ in range(ROUNDS):
        start = perf_counter()
        page = render_report(statistics, title="benchmark")
        spent.append(perf_counter() - start)
    return Result(
        name="inspect/report_seconds",
        value=round(median(spent), 2),
        unit=f"s to render a report ({len(page) / 1e6:.1f} MB of HTML) from statistics",
        higher_is_better=False,
    )


def commands(place: Path, one: Path) -> list[Result]:
    """`stats` against `validate`, and `report` against `stats`, over one stream file; each as the command does it.

    ``one`` holds one record: what a report of it costs is its page, which does not grow with the data. It is taken off.
    """

    def validate() -> None:
        assert check(place).verdict == "valid"

    def stats(path: Path) -> None:
        sources = find_sources([path], policy=SALVAGE)
        find_findings(collect(sources.records(), sources.spec))

    def page(path: Path) -> None:
        sources = find_sources([path], policy=SALVAGE)
        render_report(survey([("run", sources.records())], sources.spec), title="benchmark")

    ways: dict[str, Callable[[], object]] = {
        "validate": validate,
        "stats": partial(stats, place),
        "report": partial(page, place),
        "stats of one record": partial(stats, one),
        "report of one record": partial(page, one),
    }
    over_validate = 1 / relative_rates(ways, yardstick="validate", rounds=ROUNDS)["stats"]
    times = {name: 1 / share for name, share in relative_rates(ways, yardstick="stats", rounds=ROUNDS).items()}
    grown = (times["report"] - times["report of one record"]) / (1 - times["stats of one record"])
    size = f"a stream of {place.stat().st_size / 1e9:.1f} GB"
    return [
        Result(
            name="inspect/stats_against_validate",
            value=round(over_validate, 2),
            unit=f"time of `stats` over that of `validate`, {size}",
            bar=3.0,
            higher_is_better=False,
        ),
        Result(
            name="inspect/report_against_stats",
            value=round(grown, 2),
            unit=f"time of `report` over that of `stats`, {size}, without what a stream of one record costs",
            bar=1.5,
            higher_is_better=False,
            peers={"with it": round(times["report"], 2)},
        ),
    ]


def main(*, full: bool) -> Iterator[Result]:
    """Measure."""
    with TemporaryDirectory(prefix="routeplane-inspect-") as name:
        folder = Path(name)
        save_archive(records(FULL_SAMPLES if full else SAMPLES), folder / "all", spec=SPEC, run="r")
        archive = open_archive(folder / "all")
        with new_stream(folder / "all.arrows", SPEC) as sink:
            for each in records(FULL_SAMPLES if full else SAMPLES):
                sink.write(each)
        with new_stream(folder / "one.arrows", SPEC) as sink:
            sink.write(next(records(1)))
        yield speed(archive)
        yield memory(folder)
        yield report(archive)
        yield from commands(folder / "all.arrows", folder / "one.arrows")
