"""Stage two of the demo, for any trainer: read the stream, score it live, replayed, and replayed wrongly on purpose.

A trainer's own module says how its model is loaded, called and attached to; figures go to stdout as one line of JSON,
progress to stderr. Knows no model library, so that it runs in each trainer's environment.

Axes: T packed tokens, L captured layers, K top-k slots, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from routeplane.batch.batch import RouteBatch
from routeplane.batch.collation import microbatches
from routeplane.batch.logprobs import token_logprobs
from routeplane.cli.demo import DemoOptions, open_source
from routeplane.inspect.overview import REPLAY_LOGPROBS
from routeplane.record.coverage import Coverage
from routeplane.record.validate import missing_rows
from routeplane.stream import MemoryStream, new_stream, open_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.batch.plan import Layout
    from routeplane.record.record import RecordKey, RouteRecord
    from routeplane.record.spec import RouteSpec
    from routeplane.replay.handle import ReplayHandle

__all__ = ["TrainerModel", "run_stage", "score_stream", "shifted_by_layer", "shifted_by_token"]

# Tokens of one microbatch: small, so that the demo crosses a microbatch boundary.
_MICROBATCH_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerModel:
    """A trainer's model, in float32, with the engine's weights. ``logits``: of a batch, rows in the batch's order."""

    layout: Layout
    logits: Callable[[RouteBatch], torch.Tensor]
    attach: Callable[[RouteSpec], ReplayHandle]


def shifted_by_token(record: RouteRecord) -> RouteRecord:
    """Control: every fed token gets its predecessor's rows (the first one the last's): right shape, wrong content."""
    routes_SLK = record.routes.copy()
    fed = sum(capture.stop - capture.start for capture in record.captures if capture.state != "not_fed")
    routes_SLK[:fed] = np.roll(routes_SLK[:fed], 1, axis=0)
    return replace(record, routes=routes_SLK, checksum=None)


def shifted_by_layer(record: RouteRecord) -> RouteRecord:
    """Control: every layer gets the rows of the one before (the first the last's)."""
    return replace(record, routes=np.ascontiguousarray(np.roll(record.routes, 1, axis=1)), checksum=None)


def _score(
    trainer: TrainerModel,
    records: Sequence[RouteRecord],
    bind: Callable[[RouteBatch], AbstractContextManager[object]],
    bar: Any,
    *,
    logprobs: dict[RecordKey, NDArray[np.float32]] | None = None,
) -> NDArray[np.float64]:
    """Trainer minus engine log-probability of every generated token, in stream order; each forward inside ``bind``.

    ``logprobs`` takes the trainer's, float32 ``[S]`` of each record, NaN where a token was not generated.
    """
    differences: list[torch.Tensor] = []
    stream = MemoryStream()
    with new_stream(stream, records[0].spec, max_bytes=2**40) as sink:
        for record in records:
            sink.write(record)
    for micro in microbatches(open_stream(stream), tokens=_MICROBATCH_TOKENS, layout=trainer.layout):
        with torch.inference_mode(), bind(micro):
            logits = trainer.logits(micro)
        ours_T = token_logprobs(logits, micro)
        if micro.logprobs is None:
            raise RuntimeError("the engine stage writes log-probabilities")
        differences.append((ours_T - micro.logprobs)[micro.generation_mask])
        if logprobs is not None:
            generated_T = torch.where(micro.generation_mask, ours_T, torch.nan).float()
            logprobs.update(_by_record(micro, generated_T[~micro.pad_mask].numpy()))
    bar.update()
    return torch.cat(differences).double().numpy()


def _by_record(micro: RouteBatch, values_T: NDArray[Any]) -> Iterator[tuple[RecordKey, NDArray[Any]]]:
    """The values of each record of a batch; ``values_T``: of all tokens but padding."""
    edges = np.cumsum([0, *micro.lengths.tolist()])
    for key, (start, stop) in zip(micro.keys, itertools.pairwise(edges), strict=True):
        yield key, values_T[start:stop]


def _figures(name: str, difference_T: NDArray[np.float64]) -> dict[str, float]:
    """Mean and maximum absolute difference, and the k3 estimate of KL(engine || trainer): E[r - 1 - log r]."""
    return {
        f"mean_abs_diff_{name}": float(np.abs(difference_T).mean()),
        f"max_abs_diff_{name}": float(np.abs(difference_T).max()),
        f"kl_{name}": float((np.exp(difference_T) - 1.0 - difference_T).mean()),
    }


def run_stage(arguments: Sequence[str], load: Callable[[DemoOptions], TrainerModel]) -> None:
    """Run the stage with the options given as JSON."""
    options = DemoOptions(**json.loads(arguments[0]))
    sys.stdout.write(json.dumps(score_stream(options, load)) + "\n")


def score_stream(options: DemoOptions, load: Callable[[DemoOptions], TrainerModel]) -> dict[str, Any]:
    """Read the whole stream of ``options``, load the trainer and score; the figures, with ``seconds`` by step."""
    torch.set_num_threads(1)  # matrices this small lose by threads, and one order of sums gives one table per seed
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    with open_source(options.stream, transport=options.transport) as reader:
        records = list(reader)
        reader.admit(records).require()
        spec, coverage = reader.spec, reader.report().coverage
    seconds["read"] = time.perf_counter() - started
    started = time.perf_counter()
    trainer = load(options)
    variants: dict[str, Callable[[RouteRecord], RouteRecord]] = {
        "replay": lambda record: record,
        "shift_token": shifted_by_token,
        "shift_layer": shifted_by_layer,
    }
    figures: dict[str, Any] = {}
    logprobs: dict[str, dict[RecordKey, NDArray[np.float32]]] = {"live": {}, "replay": {}}
    with tqdm(total=1 + len(variants), desc="trainer", disable=not options.progress, leave=False) as bar:
        with trainer.attach(spec) as watched:
            live = _LiveRoutes(watched)
            difference_T = _score(trainer, records, live.recording, bar, logprobs=logprobs["live"])
            figures.update(_figures("live", difference_T))
        for name, change in variants.items():
            with trainer.attach(spec) as replay:
                changed = [change(record) for record in records]
                difference_T = _score(trainer, changed, replay.replaying, bar, logprobs=logprobs.get(name))
                figures.update(_figures(name, difference_T))
                if name == "replay":
                    figures["flipped_share"] = replay.report().scalars()["routeplane/replay_flipped_share"]
    seconds["score"] = time.perf_counter() - started
    started = time.perf_counter()
    scored = (
        replace(
            live.record(record),
            logprobs=logprobs["live"][record.key],
            columns={REPLAY_LOGPROBS: logprobs["replay"][record.key]},
            checksum=None,
        )
        for record in records
    )
    _keep(options.trainer_stream, scored, spec)
    if options.stream != options.kept_stream:  # a file beside the blocks, to be looked at
        _keep(options.kept_stream, records, spec)
    seconds["keep"] = time.perf_counter() - started
    figures |= _counts(records, coverage)
    return {**figures, "seconds": seconds}


class _LiveRoutes:
    """What the trainer's own gates chose, sequence by sequence: the routes that replay would have replaced."""

    def __init__(self, handle: ReplayHandle) -> None:
        self._handle = handle
        self._routes: dict[RecordKey, NDArray[np.int16]] = {}

    @contextlib.contextmanager
    def recording(self, micro: RouteBatch) -> Iterator[None]:
        """Watch one forward of a batch."""
        with self._handle.recording(micro) as recorded:
            yield
        batch = recorded.into(micro)
        rows_TLK = batch.routes[~batch.pad_mask].cpu().numpy()
        self._routes.update(_by_record(batch, rows_TLK))

    def record(self, record: RouteRecord) -> RouteRecord:
        """The record with the trainer's rows wherever the engine has any."""
        routes_SLK = np.where(missing_rows(record.routes)[..., None], -1, self._routes[record.key]).astype(np.int16)
        return replace(record, routes=routes_SLK, checksum=None)


def _keep(path: str, records: Iterable[RouteRecord], spec: RouteSpec) -> None:
    with new_stream(path, spec, encoding="auto") as sink:
        for record in records:
            sink.write(record)


def _counts(records: Sequence[RouteRecord], coverage: Coverage) -> dict[str, Any]:
    tokens = sum(record.num_tokens for record in records)
    return {
        "tokens": tokens,
        "rows": coverage.fed * records[0].spec.num_layers,
        "coverage": {**dict(coverage.rows), "missing": coverage.missing},
    }
