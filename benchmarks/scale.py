"""A step at scale, on paper and in simulation: bytes per link, memory and CPU-seconds for 64 to 1,024 GPUs.

``python -m benchmarks.scale`` writes ``scale.json`` and the tables of ``docs/explanation/cost.md``, and prints them.

*On paper*: a model by name, a step by size (half of its GPUs generate, half train), rollout lengths from one stated
distribution. Bytes follow by arithmetic.
*In simulation*: three small cases go through the real code (write into a folder, verified read of it, cut for one
rank). They give what a record, a token and a byte cost.
*Checked*: a sampled share of each model's step goes the same way in the same run. Predicted over measured stands in the
tables: bytes are within BYTES_TOLERANCE, which the tests assert; CPU-seconds should be within CPU_TOLERANCE, a bar.

All models have at most 256 experts, so all blocks are ``narrow``. CPU-seconds are those of one core of the machine
that the results name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from benchmarks.measure import Result, machine
from routeplane import RecordKey, RouteSpec
from routeplane.batch import Shard, microbatches
from routeplane.record.interfaces import RouteTicket
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING
from routeplane.stream import folder
from routeplane.stream.blocks import ReadOptions

__all__ = [
    "BYTES_TOLERANCE",
    "MODELS",
    "Check",
    "Costs",
    "Model",
    "Step",
    "check_model",
    "cost_tables",
    "first_to_break",
    "fit",
    "main",
    "predict",
    "steps",
]

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "explanation" / "cost.md"
BEGIN, END = "<!-- scale:begin -->", "<!-- scale:end -->"

#: predicted / measured, either way
BYTES_TOLERANCE, CPU_TOLERANCE = 1.02, 1.5

# What the tables assume; the page states it.
GPUS_PER_NODE, ROLLOUTS_PER_GPU, GROUP = 8, 4, 8
MEDIAN_TOKENS, SIGMA, LONGEST, SHORTEST = 8_192, 0.75, 32_768, 256
MICROBATCH = 32_768
STEP_S, NODE_GB_S, STORE_GB_S, NODE_GB = 300.0, 25.0, 10.0, 1_000.0


# ----------------------------------------------------------------------------------------------------------------------
# On paper
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Model:
    """What of a model decides: routed layers, slots, experts; GPUs of one engine; how its trainer is cut."""

    name: str
    layers: int
    top_k: int
    experts: int
    engine_gpus: int
    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int

    @property
    def spec(self) -> RouteSpec:
        """Its geometry."""
        return RouteSpec(
            num_experts=self.experts, top_k=self.top_k, layer_ids=tuple(range(self.layers)), model=self.name
        )

    @property
    def ids(self) -> int:
        """Expert ids of a token."""
        return self.layers * self.top_k

    @property
    def stage(self) -> tuple[int, ...]:
        """Layers of the largest pipeline stage."""
        return tuple(range(-(-self.layers // self.pipeline_parallel)))

    @property
    def replica(self) -> int:
        """GPUs of one data-parallel replica."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel


MODELS = (
    Model(
        name="Qwen3-30B-A3B", layers=48, top_k=8, experts=128,
        engine_gpus=2, tensor_parallel=2, context_parallel=2, pipeline_parallel=2,
    ),
    Model(
        name="GPT-OSS-120B", layers=36, top_k=4, experts=128,
        engine_gpus=4, tensor_parallel=2, context_parallel=2, pipeline_parallel=4,
    ),
    Model(
        name="Qwen3-235B-A22B", layers=94, top_k=8, experts=128,
        engine_gpus=8, tensor_parallel=4, context_parallel=2, pipeline_parallel=4,
    ),
    Model(
        name="DeepSeek-V3", layers=58, top_k=8, experts=256,
        engine_gpus=16, tensor_parallel=2, context_parallel=2, pipeline_parallel=8,
    ),
)  # fmt: skip
GPUS = (64, 128, 512, 1_024)


def draw_lengths(count: int, *, seed: int = 0) -> list[int]:
    """Tokens of ``count`` rollouts: lognormal around MEDIAN_TOKENS, cut at SHORTEST and LONGEST."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), SIGMA, count)
    return [int(tokens) for tokens in np.clip(drawn, SHORTEST, LONGEST)]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one model: half of the GPUs generate, half train."""

    model: Model
    gpus: int

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each rollout."""
        return draw_lengths(self.gpus * ROLLOUTS_PER_GPU)

    @property
    def engines(self) -> int:
        """Engines, each with a writer."""
        return max(1, self.gpus // 2 // self.model.engine_gpus)

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        return self.gpus // 2 // GPUS_PER_NODE

    @property
    def data_parallel(self) -> int:
        """Replicas that train."""
        return max(1, self.gpus // 2 // self.model.replica)


def steps() -> Iterator[Step]:
    """Every model at every size that holds its trainer."""
    for model in MODELS:
        for gpus in GPUS:
            if gpus // 2 >= model.replica:
                yield Step(model=model, gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of some records of a model: in blocks, and in one rank's batches when it trains on all of them."""

    blocks: float
    batches: float


def predict_bytes(model: Model, lengths: Sequence[int], *, record_bytes: float) -> Bytes:
    """By arithmetic: ids of one byte, token ids and log-probabilities of four each; int16 ids for the rank's part.

    ``record_bytes``: of what a block holds besides, per record, as measured.
    """
    tokens = sum(lengths)
    part = tokens / model.context_parallel * len(model.stage) * model.top_k * 2
    return Bytes(blocks=tokens * (model.ids + 8) + record_bytes * len(lengths), batches=part)


# ----------------------------------------------------------------------------------------------------------------------
# In simulation
# ----------------------------------------------------------------------------------------------------------------------


def legal_rows(model: Model, tokens: int, *, seed: int) -> Any:
    """Legal random rows int16 ``[tokens, L, K]``; the last one MISSING, as engines leave it."""
    rng = np.random.default_rng(seed)
    # K - 1 steps of at most (E - 1) // (K - 1) stay below E in sum, hence distinct modulo E
    rows = rng.integers(
        1, (model.experts - 1) // (model.top_k - 1) + 1, (tokens, model.layers, model.top_k), dtype=np.int16
    )
    rows[:, :, 0] = rng.integers(0, model.experts, (tokens, model.layers), dtype=np.int16)
    np.cumsum(rows, axis=2, out=rows)
    rows %= model.experts
    rows[-1] = MISSING
    return rows


def records_of(model: Model, lengths: Sequence[int]) -> list[RouteRecord]:
    """A record of each length, half prompt and half generated, in groups of GROUP samples."""
    return [_record(model, at, tokens) for at, tokens in enumerate(lengths)]


def _record(model: Model, at: int, tokens: int) -> RouteRecord:
    half = tokens // 2
    scores = np.full(tokens, np.nan, dtype=np.float32)
    scores[half:] = -1.0
    call = f"call-{at}"
    return RouteRecord(
        sample_id=f"sample-{at}",
        group=f"prompt-{at // GROUP}",
        token_ids=np.arange(at, at + tokens, dtype=np.int32),  # no two begin alike: nothing is stored once for two
        routes=legal_rows(model, tokens, seed=at),
        logprobs=scores,
        spans=(
            Span(start=0, stop=half, kind="prompt", role="user", call=call, weights_version=None),
            Span(start=half, stop=tokens, kind="generation", role="assistant", call=call, weights_version=1),
        ),
        captures=(
            Capture(start=0, stop=tokens - 1, call=call, weights_version=1, state="captured"),
            Capture(start=tokens - 1, stop=tokens, call=call, weights_version=None, state="not_fed"),
        ),
        spec=model.spec,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What some records took: bytes of their blocks and of one rank's batches, CPU-seconds of each stage."""

    records: int
    blocks: int
    batches: int
    write_s: float
    read_s: float
    cut_s: float


def measure(model: Model, lengths: Sequence[int], *, rounds: int) -> Measured:
    """Take records through the real code ``rounds`` times; medians."""
    records = records_of(model, lengths)
    found = [_measure_once(model, records) for _ in range(rounds + 1)][1:]  # the first touches memory and compiles
    return Measured(**{name: median(asdict(each)[name] for each in found) for name in asdict(found[0])})


def _measure_once(model: Model, records: Sequence[RouteRecord]) -> Measured:
    place = tempfile.mkdtemp()
    try:
        write_s = _seconds(lambda: _write(model, records, place))
        blocks = sum(path.stat().st_size for path in Path(place).rglob("*.arrows"))
        held: list[RouteRecord] = []
        read_s = _seconds(lambda: held.extend(_read(place)))
        cut: list[int] = []
        cut_s = _seconds(lambda: cut.extend(batch.routes.nbytes for batch in _cut(model, held)))
    finally:
        shutil.rmtree(place)
    if [record.checksum for record in held] != [record.checksum for record in records]:
        raise RuntimeError("expected the records that were written, got others")
    return Measured(records=len(records), blocks=blocks, batches=sum(cut), write_s=write_s, read_s=read_s, cut_s=cut_s)


def _seconds(work: Callable[[], object]) -> float:
    start = process_time()
    work()
    return process_time() - start


def _write(model: Model, records: Iterable[RouteRecord], place: str) -> None:
    with folder.open_writer(place, model.spec, run="scale", producer="engine-0") as writer:
        for record in records:
            writer.write(record)


def _read(place: str) -> list[RouteRecord]:
    with folder.open_reader(place, producers=1, options=ReadOptions(acknowledge="call")) as reader:
        return list(reader)


def _cut(model: Model, records: Sequence[RouteRecord]) -> Iterator[Any]:
    """The batches of the first rank, were these records its replica's."""
    shard = Shard(context_parallel=(0, model.context_parallel), layers=model.stage)
    return microbatches(records, spec=model.spec, tokens=MICROBATCH, shard=shard)


def ticket_bytes(count: int = 1_000) -> float:
    """Bytes of memory that a driver holds for a rollout whose routes it does not: its ticket."""
    tracemalloc.start()
    held = [
        RouteTicket(
            stream="run", key=RecordKey(f"sample-{at}", 0, 0), call_id=f"call-{at}", start=0, stop=at, checksum=at
        )
        for at in range(count)
    ]
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / len(held)


#: Seconds for a record, a token and a byte.
Cost = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each stage costs; bytes of a block for a record besides its tokens; a driver's bytes for a rollout."""

    write: Cost
    read: Cost
    cut: Cost
    record_bytes: float
    ticket: float

    @classmethod
    def measured(cls, *, megabytes: int, rounds: int) -> Costs:
        """From three small cases: short records, long ones, and long ones of a model with small rows."""
        cases = []
        for model, tokens in ((MODELS[0], 256), (MODELS[0], 8_192), (MODELS[1], 8_192)):
            lengths = [tokens] * max(2, megabytes * 10**6 // (tokens * model.ids))
            cases.append((measure(model, lengths, rounds=rounds), sum(lengths)))
        short, short_tokens = cases[0]
        return cls(
            write=fit(cases, "write_s", "blocks"),
            read=fit(cases, "read_s", "blocks"),
            cut=fit(cases, "cut_s", "batches"),
            record_bytes=(short.blocks - short_tokens * (MODELS[0].ids + 8)) / short.records,
            ticket=ticket_bytes(),
        )


def fit(cases: Sequence[tuple[Any, int]], seconds: str, size: str) -> Cost:
    """What a record, a token and a byte must cost for these cases (measured, tokens); no cost is below zero."""
    given = np.asarray([[found.records, tokens, getattr(found, size)] for found, tokens in cases], dtype=float)
    spent = np.asarray([getattr(found, seconds) for found, _ in cases])
    used = [0, 1, 2]
    while True:
        # relative errors, and columns of one scale
        scale = given[:, used].max(axis=0)
        cost = np.linalg.lstsq(given[:, used] / scale / spent[:, None], np.ones(len(spent)), rcond=None)[0] / scale
        if (cost >= 0).all():
            break
        used.pop(int(np.argmin(cost * scale)))
    found = dict(zip(used, cost.tolist(), strict=True))
    return found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Checked
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Check:
    """Predicted over measured for a sampled share of a model's step."""

    model: str
    records: int
    tokens: int
    blocks: float
    batches: float
    write: float
    read: float
    cut: float


def check_model(model: Model, costs: Costs, *, megabytes: int, rounds: int) -> Check:
    """Take a share of a step of about so many megabytes of routes through the real code; compare."""
    lengths = draw_lengths(10_000, seed=1)
    stop = int(np.searchsorted(np.cumsum(lengths), megabytes * 10**6 / model.ids)) + 1
    tokens = sum(lengths[:stop])
    found = measure(model, lengths[:stop], rounds=rounds)
    size = predict_bytes(model, lengths[:stop], record_bytes=costs.record_bytes)
    return Check(
        model=model.name,
        records=stop,
        tokens=tokens,
        blocks=round(size.blocks / found.blocks, 4),
        batches=round(size.batches / found.batches, 4),
        write=round(_spent(costs.write, stop, tokens, size.blocks) / found.write_s, 3),
        read=round(_spent(costs.read, stop, tokens, size.blocks) / found.read_s, 3),
        cut=round(_spent(costs.cut, stop, tokens, size.batches) / found.cut_s, 3),
    )


def _spent(cost: Cost, records: float, tokens: float, size: float) -> float:
    return cost[0] * records + cost[1] * tokens + cost[2] * size


# ----------------------------------------------------------------------------------------------------------------------
# Predicted
# ----------------------------------------------------------------------------------------------------------------------

#: Forms in which stacks move routes: bytes of one id on the wire, who does it, where that stands.
FORMS = (
    ("prime-rl", 4 / 3, "base64 of uint8"),
    ("verl", 2.0, "int16 tensor, zeros behind the end"),
    ("NeMo RL, over HTTP", 8 / 3, "base64 of int16 (`nrlre1`)"),
    ("slime, SGLang", 16 / 3, "base64 of int32"),
)


def predict(step: Step, costs: Costs) -> dict[str, Any]:
    """One step: bytes per link, memory, CPU-seconds, and which of them comes nearest to what there is."""
    model, rollouts, tokens = step.model, len(step.lengths), sum(step.lengths)
    size = predict_bytes(model, step.lengths, record_bytes=costs.record_bytes)
    replicas = step.data_parallel
    per_replica = size.batches / replicas
    replicas_on_node = max(1.0, GPUS_PER_NODE / model.replica)
    ranks_cut = min(GPUS_PER_NODE, model.replica) // model.tensor_parallel * replicas_on_node
    own = min(1.0, replicas_on_node / replicas)
    stages = min(1.0, GPUS_PER_NODE / (model.tensor_parallel * model.context_parallel) / model.pipeline_parallel)
    read = _spent(costs.read, rollouts, tokens, size.blocks)
    cut = ranks_cut * _spent(costs.cut, rollouts / replicas, tokens / replicas, per_replica)
    write = _spent(costs.write, rollouts, tokens, size.blocks)
    row = {
        "model": model.name,
        "gpus": step.gpus,
        "rollouts": rollouts,
        "tokens": tokens,
        "blocks_gb": size.blocks / 1e9,
        "engine_out_gb": size.blocks / step.engines / 1e9,
        "node_in_whole_gb": size.blocks / 1e9,
        "node_in_fetched_gb": size.blocks * own * stages / 1e9,
        "store_out_whole_gb": size.blocks * step.nodes / 1e9,
        "rank_batches_gb": per_replica / 1e9,
        "driver_mb": rollouts * costs.ticket / 1e6,
        "relay_holds_gb": size.blocks / 1e9,
        "writer_cpu_s": write / step.engines,
        "relay_read_cpu_s": read,
        "relay_read_own_cpu_s": read * own,
        "relay_cut_cpu_s": cut,
        "forms_gb": {name: tokens * model.ids * width / 1e9 for name, width, _ in FORMS},
        "padded_int16_gb": rollouts * LONGEST * model.ids * 2 / 1e9,
        "padded_int32_rank_gb": rollouts / replicas * LONGEST * model.ids * 4 / 1e9,
    }
    return {**row, "shares": _shares(row)}


def _shares(row: Mapping[str, Any]) -> dict[str, float]:
    """How much of what there is each part takes, where every node's relay reads all blocks."""
    return {
        "the folder's file system": row["store_out_whole_gb"] / STORE_GB_S / STEP_S,
        "a relay's core": (row["relay_read_cpu_s"] + row["relay_cut_cpu_s"]) / STEP_S,
        "an engine's core": row["writer_cpu_s"] / STEP_S,
        "a node's link": row["node_in_whole_gb"] / NODE_GB_S / STEP_S,
        "a node's memory": row["relay_holds_gb"] / NODE_GB,
    }


def first_to_break(row: Mapping[str, Any]) -> str:
    """The part that takes the largest share of what there is."""
    shares: dict[str, float] = row["shares"]
    return max(shares, key=shares.__getitem__)


# ----------------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------------


def cost_tables(found: Mapping[str, Any]) -> str:
    """The tables of ``docs/explanation/cost.md``, from what ``scale.json`` holds."""
    return "\n".join(_table_lines(found))


Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def _figure(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: _short(row[name])


_SIZE: Sequence[Column] = (
    ("model", lambda row: str(row["model"])),
    ("GPUs", lambda row: f"{row['gpus']:,}"),
    ("blocks", _figure("blocks_gb")),
)
_LINKS: Sequence[Column] = (
    *_SIZE,
    ("rollouts", lambda row: f"{row['rollouts']:,}"),
    ("out of an engine", _figure("engine_out_gb")),
    ("into a node that fetches its part", _figure("node_in_fetched_gb")),
    ("out of the folder, all nodes read all", _figure("store_out_whole_gb")),
    ("a rank's batches", _figure("rank_batches_gb")),
    ("driver, MB", _figure("driver_mb")),
)
_SECONDS: Sequence[Column] = (
    *_SIZE[:2],
    ("a writer", _figure("writer_cpu_s")),
    ("a relay reads all", _figure("relay_read_cpu_s")),
    ("a relay reads its part", _figure("relay_read_own_cpu_s")),
    ("a relay cuts for its ranks", _figure("relay_cut_cpu_s")),
    ("nearest to its bound", lambda row: f"{first_to_break(row)}, {max(row['shares'].values()):.0%}"),
)
_OTHERS: Sequence[Column] = (
    *_SIZE,
    *((f"{name}: {what}", partial(lambda name, row: _short(row["forms_gb"][name]), name)) for name, _, what in FORMS),
    ("int16 table padded to the longest", _figure("padded_int16_gb")),
    ("the same as int32, a rank's", _figure("padded_int32_rank_gb")),
)


def _table_lines(found: Mapping[str, Any]) -> Iterator[str]:
    rows = [row for row in found["steps"] if row["gpus"] != 128]
    for title, columns in (
        ("Bytes of one step, in GB:", _LINKS),
        ("CPU-seconds of one step, and what is nearest to its bound where every relay reads all:", _SECONDS),
        ("What the forms of other stacks take for the same steps, in GB, by arithmetic:", _OTHERS),
    ):
        yield title
        yield ""
        yield from _table([name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])
        yield ""
    yield "Predicted over measured, a share of each model's step through the real code:"
    yield ""
    yield from _table(
        ["model", "records", "tokens", "blocks", "batches", "write, CPU", "read, CPU", "cut, CPU"],
        [[str(value) for value in check.values()] for check in found["checks"]],
    )
    yield ""
    yield f"CPU-seconds are those of one core of: {found['machine']}."


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(cells)} |"


def _short(value: float) -> str:
    """Two or three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def page_with(text: str, tables: str) -> str:
    """The page with its tables in place of those that it has."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}"


def simulate(*, full: bool) -> dict[str, Any]:
    """What ``scale.json`` holds."""
    megabytes, rounds = (96, 5) if full else (24, 3)
    costs = Costs.measured(megabytes=megabytes, rounds=rounds)
    return {
        "machine": machine(),
        "costs": asdict(costs),
        "checks": [asdict(check_model(model, costs, megabytes=megabytes, rounds=rounds)) for model in MODELS],
        "steps": [predict(step, costs) for step in steps()],
    }


def main(*, full: bool = False) -> list[Result]:
    """Simulate, write ``scale.json`` and the page's tables; how far off the predictions are."""
    found = simulate(full=full)
    (HERE / "scale.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), cost_tables(found)), encoding="utf-8")
    return list(_results(found))


def _results(found: Mapping[str, Any]) -> Iterator[Result]:
    for what, bar in (("blocks", BYTES_TOLERANCE), ("batches", BYTES_TOLERANCE)):
        yield _off(found, what, bar, unit="bytes predicted over measured, or its inverse, the worst of all models")
    for what in ("write", "read", "cut"):
        yield _off(found, what, CPU_TOLERANCE, unit="CPU-seconds predicted over measured, or its inverse, the worst")


def _off(found: Mapping[str, Any], what: str, bar: float, *, unit: str) -> Result:
    peers = {check["model"]: check[what] for check in found["checks"]}
    worst = max(max(ratio, 1 / ratio) for ratio in peers.values())
    return Result(name=f"scale/{what}", value=round(worst, 4), unit=unit, bar=bar, higher_is_better=False, peers=peers)


if __name__ == "__main__":
    for result in main():
        print(f"{result.name}: {result.value:g} {result.unit}")
    print(cost_tables(json.loads((HERE / "scale.json").read_text(encoding="utf-8"))))
