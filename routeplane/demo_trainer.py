"""Stage two of the demo: read the stream, score its tokens in float32 live, replayed, and replayed wrongly on purpose.

Run as ``python -m routeplane.demo_trainer OPTIONS_JSON``; figures go to stdout as one line of JSON, progress to stderr.

Axes: T packed tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import Qwen3MoeForCausalLM

from routeplane.batch import microbatches, token_logprobs
from routeplane.coverage import Coverage
from routeplane.demo import DemoOptions
from routeplane.replay import transformers as gates
from routeplane.stream import MemoryStream, new_stream, open_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record import RouteRecord
    from routeplane.replay.handle import ReplayHandle

__all__ = ["main", "shifted_by_layer", "shifted_by_token"]

# Tokens of one microbatch: small, so that the demo crosses a microbatch boundary.
_MICROBATCH_TOKENS = 512


def shifted_by_token(record: RouteRecord) -> RouteRecord:
    """Control: every fed token gets its predecessor's rows (the first one the last's): right shape, wrong content."""
    routes_SLK = record.routes.copy()
    fed = sum(capture.stop - capture.start for capture in record.captures if capture.state != "not_fed")
    routes_SLK[:fed] = np.roll(routes_SLK[:fed], 1, axis=0)
    return replace(record, routes=routes_SLK, checksum=None)


def shifted_by_layer(record: RouteRecord) -> RouteRecord:
    """Control: every layer gets the rows of the one before (the first the last's)."""
    return replace(record, routes=np.ascontiguousarray(np.roll(record.routes, 1, axis=1)), checksum=None)


def _score(model: Any, records: Sequence[RouteRecord], replay: ReplayHandle | None, bar: Any) -> NDArray[np.float64]:
    """Trainer minus engine log-probability of every generated token, in stream order."""
    differences: list[torch.Tensor] = []
    stream = MemoryStream()
    with new_stream(stream, records[0].spec, max_bytes=2**40) as sink:
        for record in records:
            sink.write(record)
    for micro in microbatches(open_stream(stream), tokens=_MICROBATCH_TOKENS, layout="packed"):
        bound = replay.replaying(micro) if replay is not None else contextlib.nullcontext()
        with torch.inference_mode(), bound:
            logits = model(**micro.model_inputs()).logits
        ours_T = token_logprobs(logits, micro)
        if micro.logprobs is None:
            raise RuntimeError("the engine stage writes log-probabilities")
        differences.append((ours_T - micro.logprobs)[micro.generation_mask])
    bar.update()
    return torch.cat(differences).double().numpy()


def _figures(name: str, difference_T: NDArray[np.float64]) -> dict[str, float]:
    """Mean and maximum absolute difference, and the k3 estimate of KL(engine || trainer): E[r - 1 - log r]."""
    return {
        f"mean_abs_diff_{name}": float(np.abs(difference_T).mean()),
        f"max_abs_diff_{name}": float(np.abs(difference_T).max()),
        f"kl_{name}": float((np.exp(difference_T) - 1.0 - difference_T).mean()),
    }


def main(arguments: Sequence[str]) -> None:
    """Run the stage with the options given as JSON."""
    options = DemoOptions(**json.loads(arguments[0]))
    torch.set_num_threads(1)  # matrices this small lose by threads, and one order of sums gives one table per seed
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    with open_stream(options.stream) as reader:
        records = list(reader)
        reader.admit(records).require()
        spec, coverage = reader.spec, reader.report().coverage
    seconds["read"] = time.perf_counter() - started
    started = time.perf_counter()
    model = Qwen3MoeForCausalLM.from_pretrained(
        options.model_dir, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).train(False)
    variants: dict[str, Callable[[RouteRecord], RouteRecord]] = {
        "replay": lambda record: record,
        "shift_token": shifted_by_token,
        "shift_layer": shifted_by_layer,
    }
    figures: dict[str, Any] = {}
    with tqdm(total=1 + len(variants), desc="trainer", disable=not options.progress, leave=False) as bar:
        figures.update(_figures("live", _score(model, records, None, bar)))
        for name, change in variants.items():
            with gates.attach(model, spec) as replay:
                figures.update(_figures(name, _score(model, [change(record) for record in records], replay, bar)))
                if name == "replay":
                    figures["flipped_share"] = replay.report().scalars()["routeplane/replay_flipped_share"]
    seconds["score"] = time.perf_counter() - started
    figures |= _counts(records, coverage)
    sys.stdout.write(json.dumps({**figures, "seconds": seconds}) + "\n")


def _counts(records: Sequence[RouteRecord], coverage: Coverage) -> dict[str, Any]:
    tokens = sum(record.num_tokens for record in records)
    return {
        "tokens": tokens,
        "rows": coverage.fed * records[0].spec.num_layers,
        "coverage": {**dict(coverage.rows), "missing": coverage.missing},
    }


if __name__ == "__main__":
    main(sys.argv[1:])
