"""The environment's configuration: split, copied, never changed; required from what is captured, and nothing else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from routeplane.errors import DataError, ErrorKind, FleetError, UsageError
from routeplane.fleet.endpoints import Endpoints
from routeplane.fleet.environment import OUR_KEYS, EnvironmentConfig, EnvironmentWorker, build_config, carry_dtype
from routeplane.record.spec import RouteSpec

SPEC = RouteSpec(num_experts=64, top_k=4, layer_ids=(0, 1))
URLS = Endpoints.of(["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"])


def whole() -> dict[str, Any]:
    """What a user writes: all of ours, and some of the environment's."""
    return {
        "tokenizer_config": {"padding_side": "left", "extra": {"chat_template": "x"}},
        "pad_dynamic_image_shapes": True,
        "invalid_tool_call_patterns": ["<tool_call>"],
        "thinking_tags": ["<think>", "</think>"],
        "use_fastokens": True,
        "servers": {"calculator": {"port": 1, "tools": ["add"]}},
        "config_paths": ["a.yaml"],
    }


# ----------------------------------------------------------------------------------------------------------------------
# build_config
# ----------------------------------------------------------------------------------------------------------------------


def test_keys_of_ours_are_lifted_out_and_the_rest_is_the_environments() -> None:
    """C-187: every key of ours arrives by name; the environment sees none of them."""
    built = build_config(whole(), URLS, captured=SPEC)
    given = whole()
    assert {key: given[key] for key in OUR_KEYS} == {
        key: list(value) if isinstance(value := getattr(built, key), tuple) else value for key in OUR_KEYS
    }
    assert {"servers": given["servers"], "config_paths": given["config_paths"]} == built.environment
    assert URLS == built.endpoints


def test_the_callers_mapping_is_neither_changed_nor_shared() -> None:
    """What a later set-up does to its mapping, or the environment to its own, reaches nobody else."""
    given = whole()
    built = build_config(given, URLS, captured=SPEC)
    assert whole() == given
    given["servers"]["calculator"]["port"] = 2
    given["tokenizer_config"]["extra"]["chat_template"] = "y"
    assert 1 == built.environment["servers"]["calculator"]["port"]
    assert built.tokenizer_config is not None
    assert "x" == built.tokenizer_config["extra"]["chat_template"]


@pytest.mark.parametrize(
    ("captured", "required"), [pytest.param(SPEC, True, id="grpo"), pytest.param(None, False, id="distillation")]
)
def test_routes_are_required_where_they_are_captured(captured: RouteSpec | None, required: bool) -> None:
    """A set-up that captures nothing must not demand routes."""
    assert required is build_config(whole(), URLS, captured=captured).require_routes


@pytest.mark.parametrize(
    ("experts", "dtype"), [(8, "int8"), (128, "int8"), (129, "int16"), (256, "int16"), (32_767, "int16")]
)
def test_the_dtype_follows_from_the_one_spec(experts: int, dtype: str) -> None:
    """The boundaries of NeMo RL's carry dtype (facts 1.3), up to the widest router that the format has."""
    assert dtype == carry_dtype(RouteSpec(num_experts=experts, top_k=2, layer_ids=(0,)))
    assert (
        dtype == build_config({}, URLS, captured=RouteSpec(num_experts=experts, top_k=2, layer_ids=(0,))).routes_dtype
    )


def test_without_capture_the_dtype_is_int16() -> None:
    """As NeMo RL says where it knows no model."""
    assert "int16" == carry_dtype(None)


def test_a_key_that_neither_side_consumes_is_an_error() -> None:
    """A misspelt key would silently be the default."""
    with pytest.raises(UsageError, match="use_fasttokens") as caught:
        build_config({**whole(), "use_fasttokens": True}, URLS, captured=SPEC, known=["servers", "config_paths"])
    assert ErrorKind.ARGUMENT == caught.value.kind
    build_config(whole(), URLS, captured=SPEC, known=["servers", "config_paths"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_fastokens", "yes"),
        ("pad_dynamic_image_shapes", 1),
        ("tokenizer_config", "path"),
        ("thinking_tags", "<think>"),
        ("invalid_tool_call_patterns", [1]),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(key: str, value: object) -> None:
    """A text where a list is meant would be taken letter by letter."""
    with pytest.raises(UsageError, match=key):
        build_config({key: value}, URLS, captured=SPEC)


def test_routes_without_an_endpoint_are_a_plan_that_cannot_work() -> None:
    """Nobody would be asked for them; without capture no endpoint is fine."""
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
        if self.config.environment.get("fail") == "start":
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
    made.start()
    assert made.is_healthy()
    assert [1, None] == made.rollout(1)
    made.close()
    made.close()
    with pytest.raises(FleetError):
        made.rollout(1)


def test_a_tokenizer_is_installed_once() -> None:
    """It serves every later call; a second one is a mistake of the set-up."""
    made = worker()
    made.start()
    made.set_tokenizer(pickle.dumps("the tokenizer"))
    assert [1, "the tokenizer"] == made.rollout(1)
    with pytest.raises(FleetError, match="second"):
        made.set_tokenizer(pickle.dumps("another"))
    made.close()


def test_faults_of_infrastructure_and_of_data_are_told_apart_and_pickle() -> None:
    """The environment's own error leaves as FleetError with its words; ours leaves as it is."""
    made = worker()
    made.start()
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
        made.start()
    environment = made._environment
    made.close()
    assert isinstance(environment, Counting)
    assert ["start", "close"] == environment.calls


@pytest.mark.parametrize("factory", ["nothing", "tests.fleet.test_environment:", ":counting"])
def test_a_factory_that_is_no_name_is_refused(factory: str) -> None:
    """Named in the error."""
    made = EnvironmentWorker(build_config({}, URLS, captured=None), factory)
    with pytest.raises(UsageError, match=r"package\.module:function"):
        made.start()


def test_copies_are_deep_for_configs_of_any_depth() -> None:
    """No level is shared with the caller."""
    given = {"a": {"b": [{"c": [1]}]}}
    kept = copy.deepcopy(given)
    built = build_config(given, URLS, captured=None)
    given["a"]["b"][0]["c"].append(2)
    assert kept == built.environment
