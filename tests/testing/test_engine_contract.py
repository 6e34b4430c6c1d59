"""The engine's contract: an honest server has no finding, and each planted fault is named, wherever it lies."""

from __future__ import annotations

import itertools
import json
import unittest
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from routeplane.capture.http.openai import EngineAnswer, EngineRequest, HttpEngine
from routeplane.cli.main import main
from routeplane.record.spec import RouteSpec
from routeplane.testing.contracts import EngineContract
from routeplane.testing.contracts.engine_contract import CheckOptions, EngineFault, check_engine
from tests.testing.wrong_server import FAULTS, SPEC, VOCABULARY, WrongServer, serving

SEEDS = 10
OPTIONS = CheckOptions(vocabulary=VOCABULARY)


class Direct(HttpEngine):
    """The client of a server in this process; JSON is made and read as over HTTP."""

    def __init__(self, server: WrongServer, *, knows: bool = False) -> None:
        super().__init__("http://here", server.spec, model="hash-moe")
        self.server, self._knows = server, knows

    def ask(self, request: EngineRequest) -> EngineAnswer:
        """Without a socket."""
        body = json.loads(json.dumps(self.body(request)))
        if request.stream:
            return self.read_chunks(list(itertools.islice(self.server.stream(body), request.hang_up_after)), request)
        return self.read(self.server.complete(body), request)

    def update(self) -> int:
        """Load other weights."""
        return self.server.update()

    def reference(self, token_ids: Sequence[int]) -> NDArray[Any] | None:
        """The router's own rows, where it is to know them."""
        return self.server.rows(list(token_ids))[:, list(self.server.spec.layer_ids)] if self._knows else None


class TestAnHonestEngine(EngineContract):
    """The suite, as a user inherits it."""

    spec = SPEC
    options = OPTIONS
    engine = Direct(WrongServer())


@pytest.mark.parametrize("knows", [False, True], ids=["alone", "against a reference"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_an_honest_engine_has_no_finding(seed: int, knows: bool) -> None:
    """Every check is made and holds."""
    options = CheckOptions(vocabulary=VOCABULARY, seed=seed)
    result = check_engine(Direct(WrongServer(seed=seed), knows=knows), SPEC, options=options)

    assert [] == list(map(str, result.findings))
    assert {"held"} == set(result.checks.values())
    assert 0 == result.flipped


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    """The kind that was planted, and no other, at ten seeded places."""
    named = []
    for seed in range(SEEDS):
        result = check_engine(Direct(WrongServer(fault, seed=seed)), SPEC, options=OPTIONS)
        named.append({str(one.kind) for one in result.findings})

    assert [{FAULTS[fault]}] * SEEDS == named


# ----------------------------------------------------------------------------------------------------------------------
# Kinds that have no server of their own
# ----------------------------------------------------------------------------------------------------------------------


def test_a_reversed_axis_of_routers_alone_shows_against_a_reference() -> None:
    """Where every layer routes, the order shows against the rows of another forward, and against nothing else."""
    spec = RouteSpec(num_experts=160, top_k=4, layer_ids=(0, 1, 2, 3), decoder_layers=4)
    alone, against = (
        check_engine(Direct(WrongServer("layer axis reversed", spec=spec), knows=knows), spec, options=OPTIONS)
        for knows in (False, True)
    )

    assert [] == list(alone.findings)
    assert [EngineFault.LAYERS_REVERSED] == [one.kind for one in against.findings]


class Changed(Direct):
    """An honest server whose rows are changed on their way."""

    def __init__(self, change: Any) -> None:
        super().__init__(WrongServer())
        self._change = change

    def ask(self, request: EngineRequest) -> EngineAnswer:
        """The answer with other rows."""
        answer = super().ask(request)
        choices = [replace(choice, routes=self._change(np.array(choice.routes))) for choice in answer.choices]
        return replace(answer, choices=tuple(choices))


def _put(rows_RDK: NDArray[Any], layer: int, ids: Any) -> NDArray[Any]:
    rows_RDK[:, layer] = ids
    return rows_RDK


def _later(rows_RDK: NDArray[Any]) -> NDArray[Any]:
    """A row of the token behind, in one layer."""
    rows_RDK[:-1, 5] = rows_RDK[1:, 5].copy()
    return rows_RDK


CHANGES: dict[str, tuple[Any, EngineFault]] = {
    "MoE layers alone": (lambda rows: rows[:, list(SPEC.layer_ids)], EngineFault.LAYER_COUNT),
    "ids in a dense layer": (lambda rows: _put(rows, 3, [1, 2, 3, 4]), EngineFault.LAYERS_OTHER),
    "a physical id": (lambda rows: _put(rows, 4, [1, 2, 3, 160]), EngineFault.IDS_WRAPPED),
    "an expert twice": (lambda rows: _put(rows, 4, [1, 2, 3, 3]), EngineFault.IDS_REPEATED),
    "one row for all tokens": (lambda rows: _put(rows, 4, [1, 2, 3, 4]), EngineFault.ROWS_CONSTANT),
    "one layer shifted": (_later, EngineFault.ROWS_SHIFTED),
    "a kernel that writes nothing": (lambda rows: _put(rows, 2, 0), EngineFault.ROWS_UNWRITTEN),
}


@pytest.mark.parametrize(("change", "kind"), CHANGES.values(), ids=CHANGES)
def test_rows_changed_on_their_way_are_named(change: Any, kind: EngineFault) -> None:
    """What a proxy, a kernel or a load balancer does to rows has its kind too."""
    result = check_engine(Changed(change), SPEC, options=OPTIONS)

    assert [kind] == [one.kind for one in result.findings]


def test_what_is_not_in_its_form_is_unreadable() -> None:
    """An answer that cannot be decoded is a finding, not an error."""

    class Garbled(Direct):
        def ask(self, request: EngineRequest) -> EngineAnswer:
            return self.read({"choices": [{"token_ids": [7], "routed_experts": "k05VTVBZ"}]}, request)

    result = check_engine(Garbled(WrongServer()), SPEC, options=OPTIONS)
    assert [EngineFault.UNREADABLE] == [one.kind for one in result.findings]


class Flipping(Direct):
    """A server in low precision: a slot of some rows has another expert."""

    def __init__(self, share: float) -> None:
        super().__init__(WrongServer())
        self._share, self._random = share, np.random.default_rng(0)

    def ask(self, request: EngineRequest) -> EngineAnswer:
        """The answer with flips."""
        answer = super().ask(request)
        choices = []
        for choice in answer.choices:
            rows_RDK = np.array(choice.routes)
            flipped_RL = self._random.random((len(rows_RDK), SPEC.num_layers)) < self._share
            for row, at in np.argwhere(flipped_RL):
                first = rows_RDK[row, SPEC.layer_ids[at], 0]
                rows_RDK[row, SPEC.layer_ids[at], 0] = (first + 1) % 40
            choices.append(replace(choice, routes=rows_RDK))
        return replace(answer, choices=tuple(choices))


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_near_ties_are_not_findings(share: float) -> None:
    """Rows of which one expert in one layer differs, as bfloat16 makes some of a hundred, are the same rows."""
    assert [] == list(check_engine(Flipping(share), SPEC, options=OPTIONS).findings)


# ----------------------------------------------------------------------------------------------------------------------
# The suite, HTTP, and the command
# ----------------------------------------------------------------------------------------------------------------------


def test_the_suite_fails_where_the_check_does() -> None:
    """A planted fault fails the test of its check; what no check made is skipped."""

    class OfWrongOne(EngineContract):
        spec = SPEC
        options = OPTIONS
        engine = Direct(WrongServer("choices share rows"))

        def update(self) -> None:
            """Cannot be tried."""

    suite = OfWrongOne()
    suite.test_rows_are_those_of_prompt_and_generation()
    with pytest.raises(AssertionError, match="choice_rows"):
        suite.test_choices_have_rows_of_their_own()
    with pytest.raises(unittest.SkipTest, match="update"):
        suite.test_an_update_is_seen_in_version_and_rows()


ARGUMENTS = ["--layers", "2,4,5,6", "--experts", "160", "--top-k", "4", "--vocabulary", str(VOCABULARY), "--json"]


@pytest.mark.parametrize("fault", [None, *(fault for fault in FAULTS if "weights" not in fault)])
def test_the_command_names_it_over_http(fault: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """``routeplane probe`` ends with 0 or 1, and tells the kind."""
    with serving(WrongServer(fault, seed=3)) as url:
        status = main(arguments=["probe", url, *ARGUMENTS])
    found = json.loads(capsys.readouterr().out)

    assert (0 if fault is None else 1) == status
    assert ([] if fault is None else [FAULTS[fault]]) == sorted({one["kind"] for one in found["findings"]})
    assert (
        "not offered: expected an engine whose weights can be updated, got one without update()"
        == found["checks"]["update"]
        or fault is not None
    )


def test_the_command_reads_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--model`` says geometry and vocabulary; another geometry than the server's is a finding."""
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 9}
    config |= {"num_experts": 160, "num_experts_per_tok": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    with serving(WrongServer()) as url:
        status = main(arguments=["probe", url, "--model", str(tmp_path), "--header", "x-a: b"])
    assert 1 == status
    assert "layer_count: expected 9" in capsys.readouterr().out


def test_the_command_says_why_it_could_not_ask(capsys: pytest.CaptureFixture[str]) -> None:
    """No server, no geometry and no URL end with 2."""
    for arguments, said in (
        (["http://127.0.0.1:9", *ARGUMENTS], "127.0.0.1:9 to answer"),
        (["http://127.0.0.1:9"], "--top-k"),
        (["somewhere", *ARGUMENTS], "http"),
    ):
        assert 2 == main(arguments=["probe", *arguments])
        assert said in capsys.readouterr().err


def test_the_page_lists_every_kind() -> None:
    """The how-to has a row for each kind of finding."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "check-a-stream.md").read_text(encoding="utf-8")
    assert [] == [kind.value for kind in EngineFault if f"| `{kind.value}` |" not in page]
