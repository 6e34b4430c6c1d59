"""The environment's configuration: split, copied, never changed; required from what is captured, and nothing else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from routeplane.errors import DataError, ErrorKind, FleetError, UsageError
from routeplane.fleet.endpoints import Endpoints
from routeplane.fleet.environment import ALL_KEYS, EnvironmentConfig, EnvironmentWorker, build_config
from routeplane.record.spec import RouteSpec

SPEC = RouteSpec(num_experts=64, top_k=4, layer_ids=(0, 1))
URLS = Endpoints.of(["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"])


def whole() -> dict[str, Any]:
    """What a user writes for an environment."""
    return {
        "thinking_tags": ["<think>", "</think>"],
        "servers": {"calculator": {"port": 1, "tools": ["add"]}},
        "config_paths": ["a.yaml"],
    }


# ----------------------------------------------------------------------------------------------------------------------
# build_config
# ----------------------------------------------------------------------------------------------------------------------


def test_every_key_reaches_the_environment() -> None:
    """C-187: nothing is lifted out, renamed or dropped on the way."""
    built = build_config(whole(), URLS, captured=SPEC)
    assert whole() == built.settings
    assert URLS == built.endpoints


def test_the_callers_mapping_is_neither_changed_nor_shared() -> None:
    """What a later set-up does to its mapping, or the environment to its own, reaches no other."""
    given = whole()
    built = build_config(given, URLS, captured=SPEC)
    assert whole() == given
    given["servers"]["calculator"]["port"] = 2
    assert 1 == built.settings["servers"]["calculator"]["port"]


@pytest.mark.parametrize(
    ("captured", "required"), [pytest.param(SPEC, True, id="grpo"), pytest.param(None, False, id="distillation")]
)
def test_routes_are_required_where_they_are_captured(captured: RouteSpec | None, required: bool) -> None:
    """A set-up that captures nothing must not demand routes."""
    assert required is build_config(whole(), URLS, captured=captured).require_routes


def test_a_key_that_is_not_a_string_is_refused() -> None:
    """No factory can declare it."""
    with pytest.raises(UsageError, match="strings as keys"):
        build_config({1: "x"}, URLS, captured=SPEC)  # type: ignore[dict-item]


def test_routes_without_an_endpoint_are_a_plan_that_cannot_work() -> None:
    """No engine could be asked for them; without capture no endpoint is fine."""
    with pytest.raises(UsageError) as caught:
        build_config({}, Endpoints.of([]), captured=SPEC)
    assert ErrorKind.PLAN == caught.value.kind
    assert not build_config({}, Endpoints.of([]), captured=None).endpoints


def test_a_configuration_crosses_processes() -> None:
    """It pickles, and arrives equal."""
    built = build_config(whole(), URLS, captured=SPEC)
    assert built == pickle.loads(pickle.dumps(built))


# ----------------------------------------------------------------------------------------------------------------------
# The worker
# ----------------------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    """An error that only the environment knows, and that does not pickle."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.handle = lambda: code


class Counting:
    """An environment that counts what it is asked."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self.calls: list[str] = []
        self.tokenizer: Any = None

    def start(self) -> None:
        """Fail where the configuration says so."""
        self.calls.append("start")
        if self.config.settings.get("fail") == "start":
            raise OwnError(code=7)

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Keep it."""
        self.tokenizer = tokenizer

    def rollout(self, example: Any) -> Any:
        """Answer, or fail in the way that the example asks for."""
        if example == "own":
            raise OwnError(code=3)
        if example == "data":
            raise DataError("expected rows, got none", kind=ErrorKind.ROUTES_MISSING)
        return [example, self.tokenizer]

    def is_healthy(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Note it."""
        self.calls.append("close")


def counting(config: EnvironmentConfig) -> Counting:
    """The factory, by name."""
    return Counting(config)


counting.consumes = ("fail",)  # type: ignore[attr-defined]


def undeclared(config: EnvironmentConfig) -> Counting:
    """A factory that does not say what it consumes."""
    return Counting(config)


def passing(config: EnvironmentConfig) -> Counting:
    """A factory whose environment checks its keys itself."""
    return Counting(config)


passing.consumes = ALL_KEYS  # type: ignore[attr-defined]


def worker(**environment: Any) -> EnvironmentWorker:
    """A worker of a Counting environment."""
    return EnvironmentWorker(build_config(environment, URLS, captured=None), "tests.fleet.test_environment:counting")


def test_a_worker_answers_between_start_and_close() -> None:
    """Before and after, a call is out of turn, with the reason."""
    made = worker()
    with pytest.raises(FleetError) as caught:
        made.rollout(1)
    assert ErrorKind.ENVIRONMENT == caught.value.kind
    assert not made.is_healthy()
    made.start(None)
    assert made.is_healthy()
    assert [1, None] == made.rollout(1)
    made.close()
    made.close()
    with pytest.raises(FleetError):
        made.rollout(1)


def test_a_key_that_the_factory_does_not_consume_is_refused() -> None:
    """A misspelt key would silently be the default; nothing was made."""
    made = worker(fali="start")
    with pytest.raises(UsageError, match=r"counting consumes \(fail\), got fali"):
        made.start(None)
    assert made._environment is None


def test_a_factory_declares_its_keys_or_takes_all() -> None:
    """Without a declaration every key would be a guess."""
    settings = build_config({"a": 1}, URLS, captured=None)
    with pytest.raises(UsageError, match="declare the keys that it consumes"):
        EnvironmentWorker(settings, "tests.fleet.test_environment:undeclared").start(None)
    EnvironmentWorker(settings, "tests.fleet.test_environment:passing").start(None)


def test_a_tokenizer_is_installed_once() -> None:
    """It serves every later call."""
    made = worker()
    made.start(pickle.dumps("the tokenizer"))
    assert [[1, "the tokenizer"], [2, "the tokenizer"]] == [made.rollout(1), made.rollout(2)]
    made.close()


def test_faults_of_infrastructure_and_of_data_are_told_apart_and_pickle() -> None:
    """The environment's own error leaves as FleetError with its words; ours leaves as it is."""
    made = worker()
    made.start(None)
    with pytest.raises(FleetError, match=r"OwnError: code 3") as caught:
        made.rollout("own")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (ErrorKind.ENVIRONMENT, True) == (copied.kind, "in rollout" in copied.message)
    with pytest.raises(DataError) as data:
        made.rollout("data")
    assert ErrorKind.ROUTES_MISSING == data.value.kind
    made.close()


def test_a_start_that_fails_can_still_be_closed() -> None:
    """What was made before the failure is taken down."""
    made = worker(fail="start")
    with pytest.raises(FleetError, match="starting the environment"):
        made.start(None)
    environment = made._environment
    made.close()
    assert isinstance(environment, Counting)
    assert ["start", "close"] == environment.calls


@pytest.mark.parametrize("factory", ["nothing", "tests.fleet.test_environment:", ":counting"])
def test_a_factory_without_a_dotted_name_is_refused(factory: str) -> None:
    """Named in the error."""
    made = EnvironmentWorker(build_config({}, URLS, captured=None), factory)
    with pytest.raises(UsageError, match=r"package\.module:function"):
        made.start(None)


def test_copies_are_deep_for_configs_of_any_depth() -> None:
    """No level is shared with the caller."""
    given = {"a": {"b": [{"c": [1]}]}}
    kept = copy.deepcopy(given)
    built = build_config(given, URLS, captured=None)
    given["a"]["b"][0]["c"].append(2)
    assert kept == built.settings
