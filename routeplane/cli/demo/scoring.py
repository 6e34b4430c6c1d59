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
from routeplane.batch.collation import BatchOptions, microbatches
from routeplane.batch.logprobs import Masks, label_logprobs, token_logprobs
from routeplane.cli.demo import DemoOptions, open_source
from routeplane.inspect.overview import REPLAY_LOGPROBS, icepop_weights, tis_weights, treatment_column
from routeplane.record.codec import write_batch
from routeplane.record.spans import Coverage
from routeplane.record.validate import missing_rows
from routeplane.stream import MemoryStream, new_stream, open_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.batch.plan import Layout
    from routeplane.record.record import RecordKey, RouteRecord
    from routeplane.record.spec import RouteSpec
    from routeplane.replay.handle import ReplayHandle

__all__ = ["TrainerModel", "run_stage", "score_ablation", "score_stream", "shifted_by_layer", "shifted_by_token"]

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
    figures = score_stream(options, load)
    started = time.perf_counter()
    figures["ablation"] = score_ablation(options.ablation_runs(), load)
    figures["seconds"]["ablation_score"] = time.perf_counter() - started
    sys.stdout.write(json.dumps(figures) + "\n")


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


# ----------------------------------------------------------------------------------------------------------------------
# Ablation: routes and sampling masks, each with and without, on the same tokens
# ----------------------------------------------------------------------------------------------------------------------

#: A ratio beyond this, or below its inverse, is extreme.
_EXTREME = 2.0
#: Student's t for two-sided 95% intervals, by the number of pairs.
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
_PAIRS = (("neither", "masks"), ("routes", "both"), ("neither", "routes"), ("masks", "both"))


def score_ablation(runs: Sequence[DemoOptions], load: Callable[[DemoOptions], TrainerModel]) -> dict[str, Any] | None:
    """Score the runs' tokens with and without replayed routes and sampling masks; None where there is no run.

    ``treatments``: name -> figure -> mean over the seeds, and each. ``paired``: changes of a figure from one treatment
    to another, with 95% intervals over the seeds. Without masks the softmax is over the whole vocabulary, at the
    temperature of sampling all the same.
    """
    if not runs:
        return None
    found: list[dict[str, dict[str, float]]] = []
    ids = tokens = stored = 0
    how = None
    for run in runs:
        with open_source(run.stream, transport=run.transport) as reader:
            records = list(reader)
            reader.admit(records).require()
        found.append(_treatments(load(run), records, keep=run.trainer_stream))
        ids += sum(len(record.columns["sampling_mask"].values) for record in records)
        tokens += sum(record.num_tokens - record.spans[0].stop for record in records)
        batch = write_batch(records, records[0].spec, encoding="plain")
        stored += sum(batch.column(name).nbytes for name in ("sampling_mask", "sampling_mask_state"))
        how = records[0].spans[-1].sampling
    if how is None:
        raise RuntimeError("the engine stage writes sampling parameters")
    rows = {
        name: {figure: _over_seeds([each[name][figure] for each in found]) for figure in found[0][name]}
        for name in found[0]
    }
    return {
        "seeds": [run.seed for run in runs],
        "tokens": tokens,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "treatments": rows,
        "paired": [
            _paired(rows, figure, *pair)
            for pair in _PAIRS
            for figure in ("mean_ratio", "k3", "extreme_share", "effective_share")
        ],
        "masks": {"mean_ids": ids / tokens, "bytes_a_token": stored / tokens},
    }


def _treatments(trainer: TrainerModel, records: Sequence[RouteRecord], *, keep: str) -> dict[str, dict[str, float]]:
    """The figures of one seed by treatment. Writes the trainer's side to ``keep``, for ``report --attribute``."""
    with trainer.attach(records[0].spec) as handle:
        live = _LiveRoutes(handle)
        without = _score_masks(trainer, records, live.recording)
    with trainer.attach(records[0].spec) as handle:
        followed = _score_masks(trainer, records, handle.replaying)
    own = [live.record(record) for record in records]
    flipped = _flipped_share(records, own)
    cells = {"neither": without["ignore"], "masks": without["apply"]}
    cells |= {"routes": followed["ignore"], "both": followed["apply"]}
    columns = {
        treatment_column(["masks"]): without["apply"],
        treatment_column(["routes"]): followed["ignore"],
        treatment_column(["routes", "masks"]): followed["apply"],
    }
    scored = (
        replace(
            record,
            logprobs=without["ignore"].logprobs[record.key],
            columns={name: cell.logprobs[record.key] for name, cell in columns.items()},
            checksum=None,
        )
        for record in own
    )
    _keep(keep, scored, records[0].spec)
    made = {name: _ratio_figures(cell.difference_T) for name, cell in cells.items()}
    for name, row in made.items():
        row["flipped_share"] = flipped if name in ("neither", "masks") else 0.0
    for name in ("neither", "masks", "both"):
        made |= {f"{name}_{how}": row for how, row in _corrections(cells[name].difference_T).items()}
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """Trainer minus engine log-probability of every sampled token; and the trainer's by record, NaN elsewhere."""

    difference_T: NDArray[np.float64]
    logprobs: dict[RecordKey, NDArray[np.float32]]


def _score_masks(
    trainer: TrainerModel,
    records: Sequence[RouteRecord],
    bind: Callable[[RouteBatch], AbstractContextManager[object]],
) -> dict[Masks, _Scores]:
    """Every sampled token with masks and without, out of one forward."""
    differences: dict[Masks, list[torch.Tensor]] = {"apply": [], "ignore": []}
    logprobs: dict[Masks, dict[RecordKey, NDArray[np.float32]]] = {"apply": {}, "ignore": {}}
    for micro in microbatches(
        iter(records),
        tokens=_MICROBATCH_TOKENS,
        layout=trainer.layout,
        spec=records[0].spec,
        options=BatchOptions(labels=True),
    ):
        with torch.inference_mode(), bind(micro):
            logits = trainer.logits(micro)
        micro.mask_counts().require(max_unmasked=0.0)
        wanted = micro.columns["label_mask"]
        temperature = micro.columns["label_temperature"].reshape(*logits.shape[:-1], 1)
        scaled = logits / torch.where(temperature.isnan(), 1.0, temperature)
        given: dict[Masks, torch.Tensor] = {"apply": logits, "ignore": scaled}
        for masks, own in given.items():
            ours = label_logprobs(own, micro, masks=masks)
            differences[masks].append((ours - micro.columns["label_logprobs"])[wanted])
            labels_T = torch.where(wanted, ours, torch.nan).float()[~micro.pad_mask].numpy()
            # a label is the next token
            shifted = ((key, np.append(np.float32(np.nan), row[:-1])) for key, row in _by_record(micro, labels_T))
            logprobs[masks].update(shifted)
    return {
        masks: _Scores(difference_T=torch.cat(parts).double().numpy(), logprobs=logprobs[masks])
        for masks, parts in differences.items()
    }


def _ratio_figures(difference_T: NDArray[np.float64]) -> dict[str, float]:
    """What the ratios ``exp(difference)`` of trainer to engine do to an update."""
    ratio_T = np.exp(difference_T)
    error = float(ratio_T.std(ddof=1)) / len(ratio_T) ** 0.5
    return {
        "mean_ratio": float(ratio_T.mean()),
        "standard_errors": abs(float(ratio_T.mean()) - 1.0) / error,
        "k3": float((ratio_T - 1.0 - difference_T).mean()),
        "extreme_share": float((np.abs(difference_T) > np.log(_EXTREME)).mean()),
        "effective_share": _effective_share(ratio_T),
    }


def _effective_share(weight_T: NDArray[np.float64]) -> float:
    """Effective sample size of weighted tokens, over their number."""
    return float(weight_T.sum() ** 2 / (len(weight_T) * (weight_T**2).sum()))


def _corrections(difference_T: NDArray[np.float64]) -> dict[str, dict[str, float]]:
    """What takes the place of equal probabilities: weights cut at a bound, or tokens left out.

    ``touched_share``: tokens whose weight is not their ratio. k3 is that of the tokens that count.
    """
    ratio_T = np.exp(difference_T)
    k3_T = ratio_T - 1.0 - difference_T
    weights = {"tis": tis_weights(ratio_T), "icepop": icepop_weights(ratio_T)}
    return {
        how: {
            "mean_ratio": float(weight_T.mean()),
            "k3": float(k3_T[weight_T > 0].mean()),
            "extreme_share": float((np.abs(difference_T[weight_T > 0]) > np.log(_EXTREME)).mean()),
            "effective_share": _effective_share(weight_T),
            "touched_share": float((weight_T != ratio_T).mean()),
        }
        for how, weight_T in weights.items()
    }


def _flipped_share(engine: Sequence[RouteRecord], trainer: Sequence[RouteRecord]) -> float:
    """Share of rows, in all layers, that are other sets of experts."""
    differs = [
        (np.sort(ours.routes) != np.sort(theirs.routes)).any(axis=2)[~missing_rows(ours.routes)]
        for ours, theirs in zip(engine, trainer, strict=True)
    ]
    return float(np.concatenate(differs).mean())


def _over_seeds(values: list[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "seeds": values}


def _paired(rows: dict[str, dict[str, Any]], figure: str, without: str, with_: str) -> dict[str, Any]:
    """The mean change over the seeds, and its 95% interval."""
    change_R = np.subtract(rows[with_][figure]["seeds"], rows[without][figure]["seeds"])
    half = _T_95[len(change_R)] * float(change_R.std(ddof=1)) / len(change_R) ** 0.5
    mean = float(change_R.mean())
    return {
        "figure": figure,
        "without": without,
        "with": with_,
        "change": mean,
        "low": mean - half,
        "high": mean + half,
    }
