"""The demo: its controls and its table by themselves, one small run against figures worked out by hand, the full size.

The small run is the real thing in two child processes; the reference loads the same model and reads the same stream.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeForCausalLM

from routeplane.batch import collate
from routeplane.cli.demo import DemoOptions, format_table, run_demo
from routeplane.cli.demo import rollout as demo_engine
from routeplane.cli.demo import transformers_trainer as demo_trainer
from routeplane.cli.demo.scoring import shifted_by_layer, shifted_by_token
from routeplane.cli.main import main
from routeplane.errors import ErrorKind, MissingExtraError, RouteplaneError, UsageError
from routeplane.inspect import survey
from routeplane.inspect.look import check as check_streams
from routeplane.inspect.look import summarise
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.replay import transformers as gates
from routeplane.stream import open_stream
from routeplane.testing.builders import watermark, watermarked_record, watermarked_spec
from tests.cli.demo_findings import severities

SPEC = watermarked_spec(layers=(1, 2, 5), top_k=4)
COLUMNS = ("live", "replay", "shift_token", "shift_layer")
#: Design section 7.
KEYS = {
    *("tokens", "rows", "coverage", "flipped_share", "stream_bytes", "seconds", "ablation"),
    *(f"{figure}_{column}" for figure in ("mean_abs_diff", "max_abs_diff", "kl") for column in ("live", "replay")),
}

# ---- the controls ---------------------------------------------------------------------------------------------------


def rows_at(sample: int, places: list[tuple[int, int]]) -> NDArray[np.int16]:
    """Watermarked rows ``[len(places), K]`` of the given tokens and layers."""
    return np.stack([watermark(sample, token, layer=layer, k=np.arange(SPEC.top_k)) for token, layer in places])


@pytest.mark.parametrize("last_token_fed", [False, True])
def test_shifting_by_a_token_gives_each_token_its_predecessors_rows(last_token_fed: bool) -> None:
    """In every layer, the first token the last fed one's; a token that was not fed stays without rows."""
    record = watermarked_record(3, num_tokens=9, spec=SPEC, last_token_fed=last_token_fed)
    shifted = shifted_by_token(record)
    fed = 9 if last_token_fed else 8
    for slot, layer in enumerate(SPEC.layer_ids):
        expected = rows_at(3, [((token - 1) % fed, layer) for token in range(fed)])
        assert expected.tolist() == shifted.routes[:fed, slot].tolist()
    assert (shifted.routes[fed:] == -1).all()


def test_shifting_by_a_layer_gives_each_layer_the_one_befores_rows() -> None:
    """For every token, the first layer the last's."""
    record = watermarked_record(3, num_tokens=9, spec=SPEC)
    shifted = shifted_by_layer(record)
    for slot, layer in enumerate((5, 1, 2)):
        expected = rows_at(3, [(token, layer) for token in range(8)])
        assert expected.tolist() == shifted.routes[:8, slot].tolist()
    assert (shifted.routes[8] == -1).all()


@pytest.mark.parametrize("shift", [shifted_by_token, shifted_by_layer])
def test_a_control_is_legal_under_a_checksum_of_its_own(shift: Callable[[RouteRecord], RouteRecord]) -> None:
    """Nothing but its content tells it from the truth: it verifies, and only rows and checksum differ."""
    record = watermarked_record(3, num_tokens=9, spec=SPEC)
    before = record.routes.tolist()
    shifted = shift(record).verify()
    assert record.checksum != shifted.checksum
    assert before == record.routes.tolist()
    assert record.equals(replace(shifted, routes=record.routes, checksum=None))
    assert (np.sort(shifted.routes) != np.sort(record.routes)).any(axis=2)[:8].all()


def test_shifts_go_all_the_way_round() -> None:
    """As many shifts as there are fed tokens, or layers, give the record back: no row is lost on the way."""
    record = watermarked_record(3, num_tokens=9, spec=SPEC)
    by_token = by_layer = record
    for _ in range(8):
        by_token = shifted_by_token(by_token)
    for _ in range(3):
        by_layer = shifted_by_layer(by_layer)
    assert [record.checksum] * 2 == [by_token.checksum, by_layer.checksum]


# ---- options, prompts, the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"engine": "sglang"}, {"trainer": "nanotron"}, {"transport": "smoke"}, {"engine": None}]
)
def test_options_that_are_not_there_are_refused(options: dict[str, Any]) -> None:
    """By name, with what there is."""
    (name,) = options
    with pytest.raises(UsageError, match=f"expected {name} of .*transformers|file.*, got {options[name]!r}") as caught:
        DemoOptions(out="x", **options)
    assert ErrorKind.ARGUMENT == caught.value.kind


def test_one_seed_has_no_interval() -> None:
    """Pairs need two; without any there is no table. Only Transformers on both sides have the runs."""
    with pytest.raises(UsageError, match="ablation of 0 or 2 to 10 seeds, got 1"):
        DemoOptions(out="x", ablation=1)
    assert [] == DemoOptions(out="x", engine="vllm").ablation_runs()
    assert [3, 4] == [run.seed for run in DemoOptions(out="x", seed=3, ablation=2).ablation_runs()]


def test_options_travel_as_json() -> None:
    """What a child is started with is what the parent holds."""
    options = DemoOptions(out="a folder/ü", engine="vllm", seed=3, layers=2, progress=False)
    assert options == DemoOptions(**json.loads(json.dumps(asdict(options))))


def test_prompts_are_text_of_the_length_asked_for() -> None:
    """Bytes of different real texts, whatever the length."""
    found = demo_engine.demo_prompts(len(demo_engine.PROMPTS), 200)
    assert {200} == {len(prompt) for prompt in found}
    assert len(found) == len({tuple(prompt[:32]) for prompt in found})
    assert bytes(found[1]).startswith(b"Call me Ishmael.")


def test_the_table_shows_every_figure() -> None:
    """Every number that a person compares stands in the row and the column of its name."""
    figures: dict[str, Any] = {
        "engine": "transformers",
        "trainer": "transformers",
        "transport": "file",
        "seed": 7,
        "tokens": 1_024,
        "rows": 12_192,
        "coverage": {"captured": 1_010, "cached": 6, "not_fed": 8, "missing": 3},
        "flipped_share": 0.1234,
        "stream_bytes": 65_432,
        "seconds": {"generate": 1.25, "total": 9.0},
    }
    for row, figure in enumerate(("mean_abs_diff", "max_abs_diff", "kl")):
        figures |= {f"{figure}_{column}": (row + 1) + (at + 1) / 100 for at, column in enumerate(COLUMNS)}
    figures |= {"mean_abs_diff_replay": 0.25, "mean_abs_diff_live": 1.0}
    table = format_table(figures)
    lines = [line.split() for line in table.splitlines()]
    assert ["mean", "|logprob", "difference|", "1.00000", "0.25000", "1.03000", "1.04000"] in lines
    assert ["max", "|logprob", "difference|", "2.01000", "2.02000", "2.03000", "2.04000"] in lines
    assert ["KL", "(k3)", "3.01000", "3.02000", "3.03000", "3.04000"] in lines
    for text in ("seed 7", "1024 tokens", "12192 rows", "captured 1010", "cached 6", "not fed 8", "missing 3"):
        assert text in table
    for text in ("12.3%", "mean difference 4.0x", "maximum 1.0x", "65432 bytes", "generate 1.2", "total 9.0"):
        assert text in table


# ---- a stage that fails ---------------------------------------------------------------------------------------------

STAGES = {
    "dies": "exit 3",
    "says_nothing": "exit 0",
    "ends_with_noise": "echo '{\"records\": 1, \"seconds\": {}}'; echo 'Engine core shut down'",
    "ends_with_a_number": "echo 0",
    "ends_without_seconds": "echo '{}'",
}


@pytest.mark.parametrize("script", STAGES.values(), ids=STAGES)
def test_a_stage_without_figures_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """A child that died, or whose output is not a result, is an error."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RouteplaneError, match=r"routeplane\.cli\.demo\.rollout") as caught:
        run_demo(DemoOptions(out=str(tmp_path / "out"), progress=False))
    assert ErrorKind.CHILD_FAILED == caught.value.kind


def test_a_trainer_runs_in_the_environment_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own module, by the interpreter given; the engine by this one."""
    options = DemoOptions(out=str(tmp_path), trainer="megatron", trainer_python=str(tmp_path / "its python"))
    for name, script in {
        "python": 'echo \'{"records": 1, "seconds": {}}\'',
        "its python": f'echo "$2" > \'{tmp_path}/module\'; echo \'{{"tokens": 3, "seconds": {{}}}}\'',
    }.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    Path(options.stream).write_bytes(b"four")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    figures = run_demo(options)
    assert "routeplane.cli.demo.megatron_trainer" == (tmp_path / "module").read_text().strip()
    assert ("megatron", 1, 3, 4) == tuple(figures[key] for key in ("trainer", "records", "tokens", "stream_bytes"))


def test_a_trainer_that_is_not_installed_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named, and no engine has run a minute for nothing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "megatron" else name)
    with pytest.raises(MissingExtraError, match=r"routeplane\[megatron\]"):
        run_demo(DemoOptions(out=str(tmp_path / "out"), trainer="megatron"))
    assert not any((tmp_path / "out").iterdir())


# ---- a small run ----------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"seed": 5, "layers": 4, "sequences": 3, "max_tokens": 24, "ablation": 2, "progress": False}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoOptions, dict[str, Any]]:
    """A run with few sequences and layers, in two child processes, and its figures."""
    options = DemoOptions(out=str(tmp_path_factory.mktemp("demo") / "out"), **SMALL)
    return options, run_demo(options)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What the demo's own processes run with: the order of sums is part of a figure."""
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_rng_state(state)


def test_figures_have_the_names_that_stay(small: tuple[DemoOptions, dict[str, Any]]) -> None:
    """Those of design section 7 and the controls, all finite numbers that JSON can carry."""
    _, figures = small
    assert set() == KEYS - set(figures)
    assert figures == json.loads(json.dumps(figures, allow_nan=False))
    numbers = [
        figures[f"{figure}_{column}"] for figure in ("mean_abs_diff", "max_abs_diff", "kl") for column in COLUMNS
    ]
    assert all(number > 0 for number in numbers)
    assert {"build", "generate", "write", "read", "score", "total"} <= set(figures["seconds"])


def test_figures_count_what_the_stream_holds(small: tuple[DemoOptions, dict[str, Any]]) -> None:
    """The stream is left in the folder, is valid, and has the tokens, rows and bytes that were printed."""
    options, figures = small
    check = check_streams(options.stream)
    tokens = 3 * (32 + 24)
    assert ("valid", 3, tokens) == (check.verdict, check.records, check.tokens)
    assert (tokens, 4 * (tokens - 3), 3) == (figures["tokens"], figures["rows"], figures["records"])
    expected = {"captured": tokens - 3, "not_fed": 3, "missing": 0}
    assert expected == {name: count for name, count in figures["coverage"].items() if count or name == "missing"}
    assert Path(options.stream).stat().st_size == figures["stream_bytes"]


def test_replay_is_nearer_and_controls_are_farther(small: tuple[DemoOptions, dict[str, Any]]) -> None:
    """Also at this size: replay lowers the mean, wrong rows of the right shape raise it."""
    _, figures = small
    assert 0 < figures["flipped_share"] < 0.5
    assert figures["mean_abs_diff_replay"] < 0.75 * figures["mean_abs_diff_live"]
    assert figures["kl_replay"] < figures["kl_live"]
    for control in ("shift_token", "shift_layer"):
        assert figures[f"mean_abs_diff_{control}"] > 2 * figures["mean_abs_diff_live"]


@pytest.mark.usefixtures("one_thread")
def test_figures_are_those_worked_out_by_hand(small: tuple[DemoOptions, dict[str, Any]]) -> None:
    """Sequence by sequence, unpacked and each in a forward of its own: the same differences, flips and divergence."""
    options, figures = small
    model: Any = Qwen3MoeForCausalLM.from_pretrained(options.model_dir, dtype=torch.float32)
    model.train(False).set_experts_implementation("eager")
    with open_stream(options.stream) as reader:
        records = list(reader)
    flipped = 0
    differences: dict[str, list[NDArray[np.float64]]] = {column: [] for column in COLUMNS}
    for record in records:
        differences["live"].append(_difference(model, record))
        for column, change in (("replay", None), ("shift_token", shifted_by_token), ("shift_layer", shifted_by_layer)):
            followed = record if change is None else change(record)
            batch = collate([followed], record.spec)
            with gates.attach(model, record.spec) as handle:
                with handle.replaying(batch):
                    differences[column].append(_difference(model, record))
            if change is None:
                flipped += sum(gate.flipped_rows for gate in handle.report().gates)
    for column, parts in differences.items():
        each = np.concatenate(parts)
        assert 3 * 24 == len(each)
        assert np.abs(each).mean() == pytest.approx(figures[f"mean_abs_diff_{column}"], rel=1e-2)
        assert np.abs(each).max() == pytest.approx(figures[f"max_abs_diff_{column}"], rel=1e-2)
        assert np.mean(np.exp(each) - 1 - each) == pytest.approx(figures[f"kl_{column}"], rel=5e-2)
    assert flipped / figures["rows"] == pytest.approx(figures["flipped_share"], abs=2e-3)


# ---- the ablation ---------------------------------------------------------------------------------------------------


def test_the_ablation_is_on_the_same_tokens(small: tuple[DemoOptions, dict[str, Any]]) -> None:
    """Two seeds, each row of figures per seed; masks carry the ratio back to 1, routes and masks together most."""
    _, figures = small
    found = figures["ablation"]
    assert ([5, 6], 2 * 3 * 24, 0.8, 0.9) == tuple(found[name] for name in ("seeds", "tokens", "temperature", "top_p"))
    rows = found["treatments"]
    for row in rows.values():
        for figure in row.values():
            assert figure["mean"] == pytest.approx(np.mean(figure["seeds"]))
    assert rows["neither"]["mean_ratio"]["mean"] < 0.95
    assert abs(1 - rows["both"]["mean_ratio"]["mean"]) < 0.01
    assert rows["both"]["k3"]["mean"] < 0.5 * rows["masks"]["k3"]["mean"]
    assert rows["both"]["k3"]["mean"] < 0.1 * rows["routes"]["k3"]["mean"]
    for change in found["paired"]:
        seeds = np.subtract(*(rows[change[side]][change["figure"]]["seeds"] for side in ("with", "without")))
        assert change["change"] == pytest.approx(seeds.mean())
        # two pairs: half their distance, times Student's t of one degree of freedom
        assert change["high"] - change["change"] == pytest.approx(12.706 * abs(seeds[0] - seeds[1]) / 2)
    # 4 bytes an id, 5 a token, those of prompts too; and an int64 in each of two columns where a record ends
    ends = 2 * 3 * 16 / found["tokens"]
    assert found["masks"]["bytes_a_token"] == pytest.approx(4 * found["masks"]["mean_ids"] + 5 * 56 / 24 + ends)


def test_a_report_attributes_what_the_ablation_scored(
    small: tuple[DemoOptions, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The streams of a run, read again: total and residual are those of the table, masks and routes are the rest."""
    options, figures = small
    rows = figures["ablation"]["treatments"]
    for seed, run in enumerate(options.ablation_runs()):
        command = ["report", run.stream, "--against", run.trainer_stream, "--attribute", "--json"]
        assert 0 == main(arguments=[*command, "--out", str(tmp_path / "page.html")])
        found = json.loads(capsys.readouterr().out)["attribution"]

        assert 3 * 24 == found["tokens"]
        assert found["total"]["mean"] == pytest.approx(rows["neither"]["k3"]["seeds"][seed], rel=1e-3)
        assert found["residual"]["mean"] == pytest.approx(rows["both"]["k3"]["seeds"][seed], rel=1e-2, abs=1e-6)
        parts = [effect["mean"] for effect in found["effects"].values()]
        assert sum(parts) + found["residual"]["mean"] == pytest.approx(found["total"]["mean"])
        assert min(parts) > 5 * found["residual"]["mean"]
        assert {"weights", "staleness", "numerics"} == set(found["not_identifiable"])


@pytest.mark.usefixtures("one_thread")
def test_the_ablation_is_what_a_plain_softmax_gives(small: tuple[DemoOptions, dict[str, Any]]) -> None:
    """Token by token over the listed ids, each sequence in a forward of its own, live and with its routes."""
    options, figures = small
    found: dict[str, list[NDArray[np.float64]]] = {"neither": [], "masks": [], "routes": [], "both": []}
    for run in options.ablation_runs():
        model: Any = Qwen3MoeForCausalLM.from_pretrained(run.model_dir, dtype=torch.float32)
        model.train(False).set_experts_implementation("eager")
        with open_stream(run.stream) as reader:
            records = list(reader)
        parts: dict[str, list[float]] = {name: [] for name in found}
        for record in records:
            live = _masked_differences(model, record)
            with gates.attach(model, record.spec) as handle, handle.replaying(collate([record], record.spec)):
                followed = _masked_differences(model, record)
            for name, values in zip(found, (*live, *followed), strict=True):
                parts[name] += values
        for name, values in parts.items():
            found[name].append(np.asarray(values))
    for name, seeds in found.items():
        row = figures["ablation"]["treatments"][name]
        means = [np.exp(each).mean() for each in seeds]
        assert means == pytest.approx(row["mean_ratio"]["seeds"], rel=2e-3)
        k3 = [(np.exp(each) - 1 - each).mean() for each in seeds]
        assert k3 == pytest.approx(row["k3"]["seeds"], rel=5e-2)
        effective = [np.exp(each).sum() ** 2 / (len(each) * np.exp(2 * each).sum()) for each in seeds]
        assert effective == pytest.approx(row["effective_share"]["seeds"], rel=2e-3)


def _masked_differences(model: Any, record: RouteRecord) -> tuple[list[float], list[float]]:
    """Trainer minus engine of the sampled tokens: over all ids, and over those of the mask."""
    tokens = torch.from_numpy(record.token_ids.astype(np.int64))
    with torch.no_grad():
        logits_NV = model(input_ids=tokens[None], use_cache=False).logits[0].double() / 0.8
    over_all, over_mask = [], []
    assert record.logprobs is not None
    for at in range(record.spans[0].stop, record.num_tokens):
        row_V = logits_NV[at - 1]
        kept = torch.from_numpy(record.columns["sampling_mask"].entry(at).astype(np.int64))
        over_all.append(float(row_V[tokens[at]] - row_V.logsumexp(0)) - float(record.logprobs[at]))
        over_mask.append(float(row_V[tokens[at]] - row_V[kept].logsumexp(0)) - float(record.logprobs[at]))
    return over_all, over_mask


@pytest.mark.usefixtures("one_thread")
def test_the_trainers_stream_is_what_its_gates_choose(small: tuple[DemoOptions, dict[str, Any]]) -> None:
    """The experts with the highest router logits of each sequence in a forward of its own, near ties apart; no row
    where the engine has none."""
    options, _ = small
    model: Any = Qwen3MoeForCausalLM.from_pretrained(options.model_dir, dtype=torch.float32)
    model.train(False).set_experts_implementation("eager")
    with open_stream(options.stream) as engine, open_stream(options.trainer_stream) as trainer:
        pairs = list(zip(engine, trainer, strict=True))
    rows = other = 0
    for ours, theirs in pairs:
        assert (ours.key, ours.token_ids.tolist()) == (theirs.key, theirs.token_ids.tolist())
        assert ((ours.routes < 0) == (theirs.routes < 0)).all()
        tokens = torch.from_numpy(ours.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False, output_router_logits=True).router_logits
        best_SLK = torch.stack([each.topk(ours.spec.top_k).indices for each in logits], dim=1).numpy()
        differs_SL = (np.sort(best_SLK) != np.sort(theirs.routes)).any(axis=2)[:-1]
        rows, other = rows + differs_SL.size, other + int(differs_SL.sum())
    assert other <= 0.005 * rows


def test_the_trainers_stream_has_its_log_probabilities_live_and_under_replay(
    small: tuple[DemoOptions, dict[str, Any]],
) -> None:
    """Of generated tokens alone; a report's mean gaps are the demo's own figures."""
    options, figures = small
    with open_stream(options.stream) as engine, open_stream(options.trainer_stream) as trainer:
        spec, ours, theirs = engine.spec, list(engine), list(trainer)
    for record in theirs:
        assert record.logprobs is not None
        assert np.isnan(record.logprobs[:32]).all()
        assert np.isfinite(record.logprobs[32:]).all()
    ((live, tokens), (replayed, same)) = survey([("demo", ours)], spec, against=theirs).parts[0].gap_sums
    assert (3 * 24, 3 * 24) == (tokens, same)
    assert live / tokens == pytest.approx(figures["mean_abs_diff_live"], rel=1e-4)
    assert replayed / tokens == pytest.approx(figures["mean_abs_diff_replay"], rel=1e-4)


def _difference(model: Any, record: RouteRecord) -> NDArray[np.float64]:
    """Trainer minus engine, over what was sampled; the engine's log-probabilities as they stand in the record."""
    tokens = torch.from_numpy(record.token_ids.astype(np.int64))
    with torch.no_grad():
        scores_NV = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0].double(), dim=-1)
    ours_N = scores_NV[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    assert record.logprobs is not None
    difference_N = ours_N - record.logprobs[1:]
    return np.asarray(difference_N[np.isfinite(difference_N)], dtype=np.float64)


@pytest.mark.usefixtures("one_thread")
def test_the_same_seed_gives_the_same_figures(
    small: tuple[DemoOptions, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both stages again, here and into another folder: only seconds differ; and another seed gives others."""
    _, figures = small
    found: dict[str, Any] = {}
    options = DemoOptions(out=str(tmp_path), **SMALL)
    for stage in (demo_engine, demo_trainer):
        stage.main([json.dumps(asdict(options))])
        found |= json.loads(capsys.readouterr().out.splitlines()[-1])
    same = set(found) - {"seconds"}
    assert {name: figures[name] for name in same} == {name: found[name] for name in same}
    assert figures["stream_bytes"] == Path(options.stream).stat().st_size
    demo_engine.main([json.dumps(asdict(replace(options, seed=6)))])
    with open_stream(options.stream) as other, open_stream(small[0].stream) as first:
        assert [record.checksum for record in first] != [record.checksum for record in other]


@pytest.mark.usefixtures("one_thread")
def test_the_model_is_a_real_moe_with_every_layer_routed(small: tuple[DemoOptions, dict[str, Any]]) -> None:
    """Its configuration alone gives the spec of the stream."""
    options, _ = small
    model: Any = Qwen3MoeForCausalLM.from_pretrained(options.model_dir)
    expected = RouteSpec(num_experts=32, top_k=4, layer_ids=(0, 1, 2, 3), model="Qwen3MoeForCausalLM")
    with open_stream(options.stream) as reader:
        assert [expected] * 3 == [RouteSpec.from_hf_config(model.config), RouteSpec.from_model(model), reader.spec]
    assert "narrow" == summarise(options.stream)[0].to_dict()["encoding"]


# ---- full size ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_replay_pays_at_full_size(tmp_path: Path, seed: int) -> None:
    """The mean falls to a third or less, the maximum to a quarter; each control is three times worse than live.

    A healthy run has notes, and neither errors nor warnings.
    """
    options = DemoOptions(out=str(tmp_path), seed=seed, progress=False)
    figures = run_demo(options)
    assert {"note"} >= severities(options)
    assert (8 * 128, 12 * 8 * 127) == (figures["tokens"], figures["rows"])
    assert figures["mean_abs_diff_live"] >= 3 * figures["mean_abs_diff_replay"]
    assert figures["max_abs_diff_live"] >= 4 * figures["max_abs_diff_replay"]
    for control in ("shift_token", "shift_layer"):
        assert figures[f"mean_abs_diff_{control}"] >= 3 * figures["mean_abs_diff_live"]


# ---- what carries the stream ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["folder"])
def test_the_figures_do_not_depend_on_what_carries_the_stream(transport: Any, tmp_path: Path) -> None:
    """Over sealed blocks in a folder, the trainer scores what it scores from a file."""
    small: dict[str, Any] = {"sequences": 2, "prompt_tokens": 8, "max_tokens": 8, "layers": 2, "progress": False}

    file = run_demo(DemoOptions(out=str(tmp_path / "file"), **small))
    carried = run_demo(DemoOptions(out=str(tmp_path / transport), transport=transport, **small))

    own = {"transport", "seconds", "stream_bytes"}
    assert {name: value for name, value in file.items() if name not in own} == {
        name: value for name, value in carried.items() if name not in own
    }
    assert 0 < carried["stream_bytes"]
