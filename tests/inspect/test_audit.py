"""The audit of a trainer's own batch: planted faults are located exactly, clean batches of real engines have none.

Axes: S tokens of a sample, D decoder layers, L captured layers, K top-k slots.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from routeplane import ErrorKind, RouteSpec, new_stream
from routeplane.batch import LAYOUTS
from routeplane.cli.main import main
from routeplane.errors import UsageError
from routeplane.inspect import AuditReport, audit_batch, load_batch
from routeplane.inspect.audit import OWN_LAYOUT
from tests.batch.native import BUILDERS, FAMILIES, Sample, engine_samples, families, record_of, vary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


ROOT = Path(__file__).parents[2]


def clean(layout: str, family: str, seed: int) -> tuple[Any, list[Sample], RouteSpec]:
    """A batch in a layout, and the samples in it."""
    rng = np.random.default_rng(seed)
    spec, _ = families()[family]
    pool = engine_samples(family)
    named = LAYOUTS[layout].names is not None
    samples = [
        vary(pool[index], rng, name=f"s{at}" if named else f"row-{at}")
        for at, index in enumerate(rng.choice(len(pool), 4, replace=False))
    ]
    return BUILDERS[layout](samples, spec), samples, spec


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", BUILDERS)
def test_clean_batches_have_no_findings(layout: str, family: str) -> None:
    """Real routes, truncated, packed and multi-turn, K = 1 too: not one finding, alone or against their records."""
    look_for_false_findings(layout, family, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("layout", BUILDERS)
def test_a_thousand_clean_batches_have_no_findings(layout: str) -> None:
    """The same on 1,000 batches of a layout, of all families and of what vLLM answered."""
    for at, family in enumerate(FAMILIES):
        look_for_false_findings(layout, family, range(1_000 + at, 2_000, len(FAMILIES)))


def look_for_false_findings(layout: str, family: str, seeds: range) -> None:
    """Audit clean batches, alone and against the records that their routes came from."""
    for seed in seeds:
        batch, samples, spec = clean(layout, family, seed)
        alone = audit_batch(batch, spec, layout=layout)
        compared = audit_batch(batch, spec, layout=layout, against=[record_of(each, spec) for each in samples])

        assert () == alone.problems
        assert () == compared.problems
        assert 0 == compared.uncompared
        assert len(samples) == compared.samples


# ----------------------------------------------------------------------------------------------------------------------
# Planted faults
# ----------------------------------------------------------------------------------------------------------------------


Place = tuple[ErrorKind, str | None, int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Samples with a fault, and the findings that are right: none where the fault changed no row that a batch has."""

    samples: list[Sample]
    expected: Sequence[Place]


def shown(sample: Sample, layout: str) -> int:
    """Rows of a sample that a batch of the layout has: some stacks replace those behind the last sampled token."""
    kind = LAYOUTS[layout]
    return sample.fed if kind.filler == "arange" else min(len(sample.rows), len(sample.tokens) - (not kind.last_row))


def changed(old: Sample, new: Sample, layout: str, spec: RouteSpec) -> NDArray[np.int64]:
    """The rows in which a routed layer differs."""
    differ_RL = (old.rows != new.rows)[: shown(old, layout), list(spec.layer_ids)]
    return np.flatnonzero(differ_RL.any(axis=(1, 2)))


def shifted_layer(samples: list[Sample], rng: np.random.Generator, spec: RouteSpec, layout: str) -> Planted:
    """From a token on, one layer holds another layer's routes."""
    at = int(rng.integers(len(samples)))
    ours, theirs = rng.choice(len(spec.layer_ids), 2, replace=False)
    ours, theirs = spec.layer_ids[ours], spec.layer_ids[theirs]
    rows = samples[at].rows.copy()
    token = int(rng.integers(0, samples[at].fed - 1))
    rows[token:, ours] = rows[token:, theirs]
    made = _with(samples, at, rows)
    wrong = changed(samples[at], made[at], layout, spec)
    return Planted(
        samples=made, expected=[(ErrorKind.LAYERS, samples[at].name, int(wrong[0]), ours)] if len(wrong) else []
    )


def shifted_turn(samples: list[Sample], rng: np.random.Generator, spec: RouteSpec, layout: str) -> Planted:
    """From a turn's boundary on, each token has the row of the token before."""
    at = int(rng.integers(len(samples)))
    rows = samples[at].rows.copy()
    token = int(rng.integers(1, samples[at].fed - 2))
    rows[token:] = samples[at].rows[token - 1 : -1]
    made = _with(samples, at, rows)
    wrong = changed(samples[at], made[at], layout, spec)
    if len(wrong) < 2:
        return Planted(samples=samples, expected=[])
    return Planted(samples=made, expected=[(ErrorKind.TOKEN_MISMATCH, samples[at].name, int(wrong[0]), None)])


def swapped(samples: list[Sample], rng: np.random.Generator, spec: RouteSpec, layout: str) -> Planted:
    """Two samples have each other's routes, as far as both have any."""
    first, second = rng.choice(len(samples), 2, replace=False).tolist()
    lengths = min(len(samples[first].rows), len(samples[second].rows))
    made = list(samples)
    for mine, theirs in ((first, second), (second, first)):
        rows = samples[mine].rows.copy()
        rows[:lengths] = samples[theirs].rows[:lengths]
        made[mine] = replace(samples[mine], rows=rows)
    expected: list[Place] = []
    for at in sorted((first, second)):
        wrong = changed(samples[at], made[at], layout, spec)
        if len(wrong) < 2:
            return Planted(samples=samples, expected=[])
        expected.append((ErrorKind.TOKEN_MISMATCH, samples[at].name, int(wrong[0]), None))
    return Planted(samples=made, expected=expected)


def zero_tail(samples: list[Sample], rng: np.random.Generator, spec: RouteSpec, layout: str) -> Planted:
    """The rows from a token on are zeros, as where an engine returned fewer."""
    return _tail(samples, rng, spec, layout, value=0)


def filler_tail(samples: list[Sample], rng: np.random.Generator, spec: RouteSpec, layout: str) -> Planted:
    """The rows from a token on are the stack's own filler, and would be replayed as routes."""
    fillers: dict[str, Any] = {"zeros": 0, "missing": -1, "arange": np.arange(spec.top_k)}
    return _tail(samples, rng, spec, layout, value=fillers[LAYOUTS[layout].filler])


def _tail(samples: list[Sample], rng: np.random.Generator, spec: RouteSpec, layout: str, *, value: Any) -> Planted:
    at = int(rng.integers(len(samples)))
    rows = samples[at].rows.copy()
    token = int(rng.integers(1, samples[at].fed))
    rows[token:, list(spec.layer_ids)] = value
    made = _with(samples, at, rows)
    # of a top-1 model zeros are a route as well: what was one before is not told
    wrong = np.intersect1d(changed(samples[at], made[at], layout, spec), np.arange(token, samples[at].fed))
    expected = [(ErrorKind.ROUTES_MISSING, samples[at].name, int(wrong[0]), None)] if len(wrong) else []
    return Planted(samples=made if expected else samples, expected=expected)


def illegal_row(samples: list[Sample], rng: np.random.Generator, spec: RouteSpec, layout: str) -> Planted:
    """One row names an expert that its layer does not have."""
    at = int(rng.integers(len(samples)))
    rows = samples[at].rows.copy()
    token, layer = int(rng.integers(0, samples[at].fed)), int(rng.choice(spec.layer_ids))
    rows[token, layer, 0] = 99
    return Planted(
        samples=_with(samples, at, rows), expected=[(ErrorKind.ID_OUT_OF_RANGE, samples[at].name, token, layer)]
    )


def _with(samples: list[Sample], at: int, rows: Any) -> list[Sample]:
    return [*samples[:at], replace(samples[at], rows=rows), *samples[at + 1 :]]


FAULTS: dict[str, Callable[[list[Sample], np.random.Generator, RouteSpec, str], Planted]] = {
    "shifted_layer": shifted_layer,
    "shifted_turn": shifted_turn,
    "swapped": swapped,
    "zero_tail": zero_tail,
    "filler_tail": filler_tail,
    "illegal_row": illegal_row,
}


def located(report: AuditReport) -> list[tuple[ErrorKind, str | None, int | None, int | None]]:
    """Kind and place of each finding."""
    return [(each.kind, each.sample, each.token, each.layer) for each in report.problems]


def look_for(fault: str, layout: str, seeds: range) -> int:
    """Plant a fault at a place that the seed draws, and hold the findings to it; how many were planted."""
    found = 0
    for seed in seeds:
        for family in FAMILIES:
            _, samples, spec = clean(layout, family, seed)
            planted = FAULTS[fault](samples, np.random.default_rng(seed + 100), spec, layout)
            records = [record_of(each, spec) for each in samples]
            batch = BUILDERS[layout](planted.samples, spec)
            report = audit_batch(batch, spec, layout=layout, against=records)
            # against its record an illegal row is another one too
            of_interest = [each for each in located(report) if each[0] != ErrorKind.CHECKSUM or fault != "illegal_row"]

            assert list(planted.expected) == of_interest, f"{family}, seed {seed}"
            found += len(planted.expected)
    return found


@pytest.mark.parametrize("layout", BUILDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_located_exactly(fault: str, layout: str) -> None:
    """Kind, sample, token and layer of each fault, at random places; nothing else is found."""
    assert look_for(fault, layout, range(2)) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("layout", BUILDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_hundreds_of_planted_faults_are_located_exactly(fault: str, layout: str) -> None:
    """The same at some 200 places each."""
    assert look_for(fault, layout, range(40)) >= 150


def test_a_shifted_axis_shows_in_dense_layers() -> None:
    """Routes one layer off in a model with dense layers need no record: a dense layer holds ids."""
    batch, _, spec = clean("verl", "qwen3_dense_first", 0)
    batch["routed_experts"] = batch["routed_experts"].roll(-1, dims=2)

    report = audit_batch(batch, spec, layout="verl")

    kinds = {(each.kind, each.layer) for each in report.problems}
    assert {(ErrorKind.DENSE_SLOT, 0), (ErrorKind.UNCAPTURED_SLOT, 3)} <= kinds


def test_filler_that_is_legal_is_a_share_until_captured_lengths_are_given() -> None:
    """SkyRL's arange cannot be told from a route: the report says how much there is, and captured lengths locate it."""
    batch, samples, spec = clean("skyrl", "mixtral", 1)
    at = int(np.argmax([each.fed for each in samples]))
    width, each = batch["sequences"].shape[1], samples[at]
    start = width - len(each.tokens)
    batch["rollout_expert_indices"][at, start + 2 : start + each.fed] = torch.arange(spec.top_k, dtype=torch.uint8)
    captured = [sample.fed if index != at else 2 for index, sample in enumerate(samples)]

    unsure = audit_batch(batch, spec, layout="skyrl")
    sure = audit_batch(batch, spec, layout="skyrl", captured=captured)

    assert () == unsure.problems
    assert each.fed - 2 <= unsure.filler_rows
    assert "which is a legal route too: give captured lengths" in unsure.advice[0]
    assert [(ErrorKind.ROUTES_MISSING, f"row-{at}", 2, None)] == located(sure)


# ----------------------------------------------------------------------------------------------------------------------
# Files and the command
# ----------------------------------------------------------------------------------------------------------------------


def test_one_command_finds_what_was_planted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A verl batch on disk against the run's stream: exit 1, and each fault with its sample, token and layer."""
    _, samples, spec = clean("verl", "olmoe", 3)
    planted = swapped(samples, np.random.default_rng(0), spec, "verl")
    torch.save(BUILDERS["verl"](planted.samples, spec), tmp_path / "step.pt")
    torch.save(BUILDERS["verl"](samples, spec), tmp_path / "clean.pt")
    with new_stream(str(tmp_path / "run.arrows"), spec) as sink:
        for each in samples:
            sink.write(record_of(each, spec))
    rest = ["--layout", "verl", "--against", str(tmp_path / "run.arrows"), "--decoder-layers", "4"]

    assert 1 == main(arguments=["audit", str(tmp_path / "step.pt"), *rest])
    shown = capsys.readouterr().out
    first, second = planted.expected
    assert f"got those of sample {second[1]} @ sample {first[1]}, token {first[2]}" in shown
    assert 0 == main(arguments=["audit", str(tmp_path / "clean.pt"), *rest])
    assert 2 == main(arguments=["audit", str(tmp_path / "step.pt"), "--layout", "verl"])


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The how-to page saves a batch of verl with planted faults; its command prints what the page says."""
    page = (ROOT / "docs" / "how-to" / "read-in-a-trainer.md").read_text(encoding="utf-8")
    section = page[page.index("## Audit a batch of another stack") :]
    python, command, shown = (
        re.findall(rf"^```{label}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[0]
        for label in ("python", "bash", "text")
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(python, "page", "exec"), {"__name__": "page"})

    assert 1 == main(arguments=command.split()[1:])
    assert shown == capsys.readouterr().out


def test_batches_are_read_from_files(tmp_path: Path) -> None:
    """torch, npz, slime's debug dump, Parquet and our own stream: each read as what it holds, and audited."""
    spec, _ = families()["olmoe"]
    skyrl, samples, _ = clean("skyrl", "olmoe", 5)
    np.savez(tmp_path / "batch.npz", **{name: value.numpy() for name, value in skyrl.items()})
    torch.save({"rollout_id": 0, "samples": BUILDERS["slime"](samples, spec)}, tmp_path / "rollout_0.pt")
    vllm = copy.deepcopy(BUILDERS["vllm"](samples, spec))
    torch.save(vllm, tmp_path / "arrays.pt")
    for each in vllm:
        each["routed_experts"] = each["routed_experts"].tolist()
    pq.write_table(pa.Table.from_pylist(vllm), tmp_path / "batch.parquet")
    with new_stream(str(tmp_path / "run.arrows"), spec) as sink:
        for sample in samples:
            sink.write(record_of(sample, spec))

    for name, layout in (
        ("batch.npz", "skyrl"),
        ("rollout_0.pt", "slime"),
        ("arrays.pt", "vllm"),
        ("batch.parquet", "vllm"),
        ("run.arrows", OWN_LAYOUT),
    ):
        report = audit_batch(load_batch(tmp_path / name), spec, layout=layout)
        assert () == report.problems, name
        assert len(samples) == report.samples
    with pytest.raises(UsageError, match=r"\.npz"):
        load_batch(tmp_path / "batch.pickle")


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    """A torch file is read as data: a class that it names is refused."""
    torch.save({"samples": ErrorKind.SHAPE, "more": Sample}, tmp_path / "batch.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        load_batch(tmp_path / "batch.pt")


def test_reports_merge() -> None:
    """Counts and findings of two batches add up, and have stable names."""
    batch, _, spec = clean("verl", "olmoe", 0)
    once = audit_batch(batch, spec, layout="verl")

    twice = once.merge(once)
    assert 2 * once.rows == twice.rows
    assert 8.0 == twice.scalars()["routeplane/audit_samples"]
