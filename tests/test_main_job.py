"""The main job end to end on a small real model: generate and record, stream, collate, replay, train.

Engine and trainer run the same float32 weights here, so that replay of the engine's own routes must change nothing, and
anything that lands in a wrong place must show. A Qwen3-MoE whose first layer is dense. Axes: N rows, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routeplane import RouteRecord, RouteSpec, assemble, open_stream
from routeplane.batch import RouteBatch, collate, microbatches, token_logprobs
from routeplane.capture import transformers as capture
from routeplane.cli.demo.scoring import shifted_by_layer, shifted_by_token
from routeplane.errors import DataError, ErrorKind, ReplayError, SpecError
from routeplane.replay import transformers as gates
from routeplane.stream import MemoryStream, new_stream
from tests.batch.laid_out import laid_out
from tests.replay.tiny_models import listed_gates

EXPERTS, TOP_K, LAYERS = 8, 2, (1, 2, 3)
SPEC = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=LAYERS, model="Qwen3MoeForCausalLM")
PROMPTS = ((5, 6, 7), (9,), (4, 5, 6, 7, 8, 9), (11, 12))
MAX_TOKENS = 9
#: of the generations; the cached and the whole forward sum in another order
TOLERANCE = 1e-5
LAYOUTS = ({"layout": "packed"}, {"layout": "padded"}, {"layout": "padded", "padding_side": "left"})
layouts = pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(options.values()))


def build(**changes: Any) -> Any:
    """A model with weights large enough that other experts are other outputs."""
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "initializer_range": 0.2,
        "max_position_embeddings": 128,
        "eos_token_id": None,
        **changes,
    }
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).train(False)


@cache
def engine() -> Any:
    """The model that generates; no test changes it."""
    return build()


@cache
def recorded() -> tuple[RouteRecord, ...]:
    """What it generated, as records."""
    return tuple(capture.records(engine(), PROMPTS, spec=SPEC, max_tokens=MAX_TOKENS, seed=1, weights_version=4))


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """The records as a stream file."""
    with new_stream(tmp_path / "routes.arrows", SPEC, encoding="auto") as sink:
        for record in recorded():
            sink.write(record)
    return tmp_path / "routes.arrows"


def logits_of(model: Any, batch: RouteBatch) -> torch.Tensor:
    """One forward of a batch, rows in gate order ``[N, V]``, padding left out."""
    with torch.no_grad():
        logits: torch.Tensor = model(**batch.model_inputs()).logits
    return logits.reshape(batch.num_rows, -1)[~batch.pad_mask.view(-1)]


def replayed(model: Any, batch: RouteBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """The logits under the batch's routes, and the report's scalars."""
    with gates.attach(model, batch.spec) as replay:
        with replay.replaying(batch):
            logits = logits_of(model, batch)
    return logits, replay.report().scalars()


def loss_fn(output: Any, micro: RouteBatch) -> torch.Tensor:
    """What a trainer might minimise: the negative log-likelihood of what was sampled."""
    return -token_logprobs(output.logits, micro)[micro.generation_mask].mean()


# ---- the ten lines --------------------------------------------------------------------------------------------------


def ten_lines(model: Any, path: Path, *, tokens: int) -> Any:
    """Design section 5, literally but for ``tokens`` and for the report, which is returned."""
    with open_stream(path) as reader, gates.attach(model, reader.spec) as replay:
        for micro in microbatches(reader, tokens=tokens, layout="packed"):
            with replay.replaying(micro):
                loss = loss_fn(model(**micro.model_inputs()), micro)
                loss.backward()  # type: ignore[no-untyped-call]
        return replay.report()


@pytest.mark.parametrize(("tokens", "count"), [(16_384, 1), (30, 2), (15, 4)])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
def test_the_ten_lines_train(stream: Path, tokens: int, count: int, checkpointing: bool | None) -> None:
    """Every row is consumed, none flips, and gradients are those of the live model: the routes are its own."""
    model, live = copy.deepcopy(engine()), copy.deepcopy(engine())
    if checkpointing is not None:
        model.train().activation_checkpointing_enable({"use_reentrant": checkpointing})
    report = ten_lines(model, stream, tokens=tokens)
    with open_stream(stream) as reader:
        batches = list(microbatches(reader, tokens=tokens, layout="packed"))
    for micro in batches:
        loss_fn(live(**micro.model_inputs()), micro).backward()  # type: ignore[no-untyped-call]

    rows = sum(len(prompt) + MAX_TOKENS - 1 for prompt in PROMPTS)
    assert (count, count) == (len(batches), report.microbatches)
    assert [(layer, rows, len(PROMPTS), 0, count) for layer in LAYERS] == [
        (gate.layer_id, gate.forced_rows, gate.live_rows, gate.flipped_rows, gate.consumed) for gate in report.gates
    ]
    expected = {name: value.grad for name, value in live.named_parameters()}
    for name, value in model.named_parameters():
        assert value.grad is not None, name
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    for gate, router in listed_gates(model):
        assert router.get_parameter("weight").grad.abs().max() > 1e-6, str(gate)
    assert "flipped (0.00%)" in str(report)


def test_the_model_is_its_own_again_afterwards(stream: Path) -> None:
    """No hook and no stand-in stays; the live logits are bit for bit what they were."""
    model = copy.deepcopy(engine())
    batch = collate(recorded(), SPEC)
    before, attributes = logits_of(model, batch), [sorted(vars(part)) for part in model.modules()]
    ten_lines(model, stream, tokens=16_384)
    assert attributes == [sorted(vars(part)) for part in model.modules()]
    assert [] == [name for name, part in model.named_modules() if part._forward_hooks or part._forward_pre_hooks]
    assert torch.equal(before, logits_of(model, batch))


# ---- own routes, and wrong ones -------------------------------------------------------------------------------------


@layouts
def test_own_routes_change_nothing(options: dict[str, Any]) -> None:
    """The engine's routes in the same precision: the trainer's logits within 1e-5, not one row flipped."""
    batch = collate(recorded(), SPEC, **laid_out(options))
    found, scalars = replayed(engine(), batch)
    rows = len(LAYERS) * sum(len(prompt) + MAX_TOKENS - 1 for prompt in PROMPTS)
    assert (rows, 0) == (scalars["routeplane/replay_rows_forced"], scalars["routeplane/replay_rows_flipped"])
    torch.testing.assert_close(found, logits_of(engine(), batch), rtol=0, atol=TOLERANCE)


def test_own_routes_in_their_own_order_are_bit_identical() -> None:
    """Where the recorded row has the live order of experts too, the sums are the same sums."""
    (record,) = capture.records(engine(), [PROMPTS[2]], spec=SPEC, max_tokens=1, seed=1)
    batch = collate([record], SPEC)
    assert torch.equal(logits_of(engine(), batch), replayed(engine(), batch)[0])


@layouts
def test_the_trainer_scores_what_the_engine_sampled(options: dict[str, Any]) -> None:
    """Under replay, token log-probabilities are the engine's own, each at its token."""
    batch = collate(recorded(), SPEC, **laid_out(options))
    with gates.attach(engine(), SPEC) as replay, replay.replaying(batch), torch.no_grad():
        found = token_logprobs(engine()(**batch.model_inputs()).logits, batch)
    assert batch.logprobs is not None
    assert len(PROMPTS) * MAX_TOKENS == int(batch.generation_mask.sum())
    torch.testing.assert_close(
        found[batch.generation_mask], batch.logprobs[batch.generation_mask], rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("shift", [shifted_by_token, shifted_by_layer])
@layouts
def test_shifted_routes_are_another_model(options: dict[str, Any], shift: Callable[[RouteRecord], RouteRecord]) -> None:
    """One token or one layer off: most rows flip, and logits move by more than any rounding."""
    batch = collate([shift(record) for record in recorded()], SPEC, **laid_out(options))
    found, scalars = replayed(engine(), batch)
    assert scalars["routeplane/replay_flipped_share"] > 0.5
    moved_N = (found - logits_of(engine(), batch)).abs().amax(dim=-1)
    assert moved_N.median() > 1_000 * TOLERANCE


def test_routes_of_another_sequence_are_another_model() -> None:
    """Two records of one length whose rows were exchanged: legal, and nothing like the truth."""
    first, second = capture.records(engine(), [(5, 6), (7, 8)], spec=SPEC, max_tokens=MAX_TOKENS, seed=1)
    swapped = [replace(mine, routes=other.routes, checksum=None) for mine, other in ((first, second), (second, first))]
    assert replayed(engine(), collate([first, second], SPEC))[1]["routeplane/replay_flipped_share"] == 0
    assert replayed(engine(), collate(swapped, SPEC))[1]["routeplane/replay_flipped_share"] > 0.5


def test_an_updated_policy_flips_and_replay_holds_it() -> None:
    """After an update the trainer would choose otherwise; the recorded choice stands, under the new weights."""
    trained = copy.deepcopy(engine())
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, router in listed_gates(trained):
            router.get_parameter("weight").add_(0.1 * torch.randn(EXPERTS, 32, generator=noise))
    batch = collate(recorded(), SPEC)
    found, scalars = replayed(trained, batch)
    assert 0.02 < scalars["routeplane/replay_flipped_share"] < 0.9
    assert (found - logits_of(trained, batch)).abs().max() > 1_000 * TOLERANCE


# ---- another process ------------------------------------------------------------------------------------------------

TRAINER = """
import json, sys
import numpy as np, torch
from transformers import Qwen3MoeForCausalLM
from routeplane import open_stream
from routeplane.batch import microbatches, token_logprobs
from routeplane.replay import transformers as gates
from tests.replay.tiny_models import listed_gates

torch.set_num_threads(1)
model = Qwen3MoeForCausalLM.from_pretrained(sys.argv[1]).train(False)
found = {}
with open_stream(sys.argv[2]) as reader, gates.attach(model, reader.spec) as replay:
    for micro in microbatches(reader, tokens=30, layout="packed"):
        with replay.replaying(micro), torch.no_grad():
            scores = token_logprobs(model(**micro.model_inputs()).logits, micro)
        for key, start, length in zip(micro.keys, micro.cu_seqlens.tolist(), micro.lengths.tolist()):
            found[str(key)] = scores[start + 1 : start + length].tolist()
    report = {"complete": reader.report().complete, **replay.report().scalars()}
print(json.dumps({"scores": found, "report": report}))
"""


def test_another_process_replays_what_was_recorded(stream: Path, tmp_path: Path) -> None:
    """It knows the engine by two paths alone, and scores every token as a forward here does."""
    engine().save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, str(tmp_path / "model"), str(stream)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {str(record.key) for record in recorded()} == set(found["scores"])
    for record in recorded():
        tokens = torch.from_numpy(record.token_ids.astype(np.int64))
        with torch.no_grad():
            scores_NV = torch.log_softmax(engine()(input_ids=tokens[None], use_cache=False).logits[0, :-1], dim=-1)
        expected = scores_NV.gather(1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(found["scores"][str(record.key)], expected.numpy(), rtol=0, atol=TOLERANCE)
    report = found["report"]
    rows = len(LAYERS) * sum(len(prompt) + MAX_TOKENS - 1 for prompt in PROMPTS)
    assert (True, rows, 0) == (
        report["complete"],
        report["routeplane/replay_rows_forced"],
        report["routeplane/replay_rows_flipped"],
    )


# ---- what is refused ------------------------------------------------------------------------------------------------

OTHER_MODELS: dict[str, dict[str, Any]] = {
    "another_dense_layer": {"mlp_only_layers": [1]},
    "no_dense_layer": {"mlp_only_layers": []},
    "fewer_layers": {"num_hidden_layers": 3},
    "more_experts": {"num_experts": EXPERTS + 1},
    "another_top_k": {"num_experts_per_tok": TOP_K + 1},
}


@pytest.mark.parametrize("changes", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_a_model_of_another_geometry_is_refused(stream: Path, changes: dict[str, Any]) -> None:
    """Before a forward: by the trainer that attaches, and by the engine that would record under this spec."""
    model = build(**changes)
    with open_stream(stream) as reader, pytest.raises(ReplayError) as caught:
        gates.attach(model, reader.spec)
    assert ErrorKind.SPEC_MISMATCH == caught.value.kind
    with pytest.raises(SpecError):
        capture.records(model, PROMPTS, spec=SPEC, max_tokens=1)


def test_a_dense_model_is_refused(stream: Path) -> None:
    """A model without gates can follow no routes, and its configuration gives no spec."""
    model = build(mlp_only_layers=[0, 1, 2, 3])
    with open_stream(stream) as reader, pytest.raises(ReplayError) as caught:
        gates.attach(model, reader.spec)
    assert ErrorKind.NO_SEAM == caught.value.kind
    with pytest.raises(SpecError) as refused:
        RouteSpec.from_hf_config(model.config)
    assert ErrorKind.DENSE_MODEL == refused.value.kind


def test_a_corrupt_stream_reaches_no_gate(stream: Path) -> None:
    """The ten lines stop with a typed error that names the sample; no gradient was made."""
    data = bytearray(stream.read_bytes())
    rows = recorded()[0].routes[:-1].astype(np.uint8).tobytes()
    at = bytes(data).index(rows)
    data[at : at + TOP_K] = bytes([1] * TOP_K)
    stream.write_bytes(data)
    model = copy.deepcopy(engine())
    with pytest.raises(DataError, match="sample sample-0, token 0, layer 1") as caught:
        ten_lines(model, stream, tokens=16_384)
    assert ErrorKind.DUPLICATE_ID == caught.value.kind
    assert all(value.grad is None for value in model.parameters())


def test_a_cut_stream_reaches_no_gate(stream: Path) -> None:
    """A missing trailer is known before the first batch."""
    stream.write_bytes(stream.read_bytes()[:-100])
    model = copy.deepcopy(engine())
    with pytest.raises(EOFError):
        ten_lines(model, stream, tokens=16_384)
    assert all(value.grad is None for value in model.parameters())


# ---- several turns --------------------------------------------------------------------------------------------------


def test_two_turns_replay_as_one_sequence() -> None:
    """The second call's prompt holds the first turn and what a user added: one record, whose every row is live's."""
    common: dict[str, Any] = {"spec": SPEC, "max_tokens": 6}
    first = capture.calls(engine(), PROMPTS[:2], seed=1, call_ids=["a-0", "b-0"], weights_version=4, **common)
    prompts = [[*call.token_ids.tolist(), 33, 34, 35] for call in first]
    second = capture.calls(engine(), prompts, seed=2, call_ids=["a-1", "b-1"], weights_version=5, **common)
    records = []
    for name, calls in zip("ab", zip(first, second, strict=True), strict=True):
        assembly = assemble(calls, SPEC, sample_id=name)
        (record,) = assembly.records
        assert (1, 0) == (assembly.report.boundary_tokens, assembly.report.drift_rows)
        assert len(LAYERS) * (calls[0].num_tokens - 1) == assembly.report.overlap_rows
        turns = [calls[0].num_tokens, calls[1].num_tokens]
        assert [
            (0, turns[0] - 1, "captured", 4),
            (turns[0] - 1, turns[1] - 1, "captured", 5),
            (turns[1] - 1, turns[1], "not_fed", None),
        ] == [(item.start, item.stop, item.state, item.weights_version) for item in record.captures]
        assert ["prompt", "generation", "prompt", "generation"] == [span.kind for span in record.spans]
        records.append(record)
    stream = MemoryStream()
    with new_stream(stream, SPEC) as sink:
        for record in records:
            sink.write(record)
    (batch,) = microbatches(open_stream(stream), tokens=64)
    assert 2 * 2 * 6 == int(batch.generation_mask.sum())
    found, scalars = replayed(engine(), batch)
    forced = len(LAYERS) * sum(record.num_tokens - 1 for record in records)
    assert (forced, 0) == (scalars["routeplane/replay_rows_forced"], scalars["routeplane/replay_rows_flipped"])
    torch.testing.assert_close(found, logits_of(engine(), batch), rtol=0, atol=TOLERANCE)
    assert batch.logprobs is not None
    with torch.no_grad():
        scores = token_logprobs(engine()(**batch.model_inputs()).logits, batch)
    mask = batch.generation_mask
    torch.testing.assert_close(scores[mask], batch.logprobs[mask], rtol=0, atol=TOLERANCE)
