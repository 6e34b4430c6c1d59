"""NeMo Gym as an environment: what follows from our configuration, servers that never come, and Gym over vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from routeplane.errors import DataError, ErrorKind, FleetError, UsageError
from routeplane.fleet.actors import ActorOptions, build_environment_actor
from routeplane.fleet.endpoints import Endpoints
from routeplane.fleet.environment import EnvironmentConfig, build_config
from routeplane.fleet.gym_environment import check_routes, gym_config, make_environment
from routeplane.fleet.teardown import children_of
from routeplane.record.spec import RouteSpec
from tests.capture.reading import gym_rollout
from tests.fleet.workers import has_ended
from tests.ray_cluster import local_cluster

ROOT = Path(__file__).parents[2]
GYM = ROOT / ".venv-gym"
FACTORY = "routeplane.fleet.gym_environment:make_environment"
TINY = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1))
URLS = Endpoints.of(["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"])


def built(config: Mapping[str, Any], *, captured: RouteSpec | None = TINY) -> EnvironmentConfig:
    """As every set-up builds it."""
    return build_config(config, URLS, captured=captured)


# ----------------------------------------------------------------------------------------------------------------------
# Configuration
# ----------------------------------------------------------------------------------------------------------------------


def test_gym_gets_the_engines_urls_and_asks_for_routes() -> None:
    """All URLs in shard order; token ids and the header on the policy's model server; every other key is Gym's."""
    found = gym_config(built({"config_paths": ["a.yaml"], "gym_python": "python", "dry_run": True}))
    assert {
        "config_paths": ["a.yaml"],
        "dry_run": True,
        "policy_base_url": ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"],
        "policy_api_key": "none",
        "policy_model": {
            "responses_api_models": {
                "vllm_model": {
                    "return_token_id_information": True,
                    "default_headers": {"x-routeplane-form": "nemo-lists"},
                }
            }
        },
    } == found


def test_a_set_up_without_capture_asks_for_no_routes() -> None:
    """Distillation: the policy's model server is left as its files say."""
    assert {"policy_base_url", "policy_api_key"} == set(gym_config(built({}, captured=None)))


def test_what_the_user_says_of_the_model_server_stays_and_is_not_changed() -> None:
    """Another form, and a header beside it; the mapping that came in is as it was."""
    header = {"x-routeplane-form": "nemo", "x-mine": "1"}
    config = {"policy_model": {"responses_api_models": {"vllm_model": {"default_headers": dict(header)}}}}
    environment = built(config)
    server = gym_config(environment)["policy_model"]["responses_api_models"]["vllm_model"]
    assert {"default_headers": header, "return_token_id_information": True} == server
    assert config == environment.settings


def test_urls_of_another_source_are_refused() -> None:
    """Two resolutions of the engine's URLs would drift apart."""
    with pytest.raises(UsageError, match="policy_base_url") as caught:
        make_environment(built({"policy_base_url": "http://127.0.0.1:3/v1"}))
    assert ErrorKind.ARGUMENT == caught.value.kind


#: Keys that NeMo RL's actor reads.
NEMO_RL_KEYS = (
    "thinking_tags",
    "invalid_tool_call_patterns",
    "use_fastokens",
    "tokenizer_config",
    "pad_dynamic_image_shapes",
    "routes_dtype",
)


@pytest.mark.parametrize("key", NEMO_RL_KEYS)
def test_a_key_that_gym_does_not_read_is_refused(key: str) -> None:
    """Gym's configuration takes any key at its top level, and would ignore it."""
    with pytest.raises(UsageError, match=f"expected keys that NeMo Gym reads, got {key}"):
        make_environment(built({key: None}))


# ----------------------------------------------------------------------------------------------------------------------
# Servers that do not come
# ----------------------------------------------------------------------------------------------------------------------


def test_an_interpreter_without_gym_says_so() -> None:
    """The last words of the process that ended are in the error."""
    environment = make_environment(built({"gym_python": sys.executable}))
    try:
        with pytest.raises(FleetError, match=r"ModuleNotFoundError: No module named '(nemo_gym|ray)'") as caught:
            environment.start()
        assert ErrorKind.ENVIRONMENT == caught.value.kind
        assert not environment.is_healthy()
    finally:
        environment.close()
        environment.close()


def test_servers_that_never_answer_end_in_their_time(tmp_path: Path) -> None:
    """The bound is the configuration's, and the process is gone."""
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nread line\nread line\n")
    silent.chmod(0o755)
    environment = make_environment(built({"gym_python": str(silent), "gym_start_seconds": 0.2}))
    try:
        with pytest.raises(FleetError, match=r"within 0\.2 s") as caught:
            environment.start()
        assert ErrorKind.NOT_READY == caught.value.kind
        below = [process for process in children_of(os.getpid()) if str(tmp_path).encode() in command_of(process.pid)]
    finally:
        environment.close()
    assert 1 == len(below)
    assert has_ended(below[0])


def command_of(pid: int) -> bytes:
    """What a process was started as."""
    return (Path("/proc") / str(pid) / "cmdline").read_bytes()


# ----------------------------------------------------------------------------------------------------------------------
# NeMo Gym itself
# ----------------------------------------------------------------------------------------------------------------------


def gym_environments(folder: Path) -> None:
    """Gym makes an environment for each server, unless there is one: here all are the one that has Gym."""
    for server in (
        "resources_servers/example_single_tool_call",
        "responses_api_agents/simple_agent",
        "responses_api_models/vllm_model",
    ):
        (folder / server).mkdir(parents=True)
        (folder / server / ".venv").symlink_to(GYM.resolve())


def received_by(head: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that Gym's head server hands to its servers."""
    with urllib.request.urlopen(f"http://{head['host']}:{head['port']}/global_config_dict_yaml", timeout=30) as answer:
        found: dict[str, Any] = yaml.safe_load(json.loads(answer.read()))
        return found


def without_others(received: Any, sent: Any) -> Any:
    """What was received at the keys that were sent; Gym adds its own."""
    if not isinstance(sent, Mapping):
        return received
    return {key: without_others(received[key], value) for key, value in sent.items() if key in received}


def free_port() -> int:
    """A port that no process has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gym_settings(folder: Path) -> dict[str, Any]:
    """One of Gym's own examples: its resources server and agent, its model server for training; three steps at most."""
    from tests.capture.tiny_server import WORDS

    server = {
        "uses_reasoning_parser": False,
        "extra_body": {"allowed_token_ids": WORDS, "ignore_eos": True, "seed": 7},
    }
    name = "example_single_tool_call"
    return {
        "config_paths": [
            f"resources_servers/{name}/configs/{name}.yaml",
            "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
        ],
        "policy_model_name": "tiny",
        "policy_model": {"responses_api_models": {"vllm_model": server}},
        f"{name}_simple_agent": {"responses_api_agents": {"simple_agent": {"max_steps": 3}}},
        "uv_venv_dir": str(folder / "environments"),
        "skip_venv_if_present": True,
        "gym_python": str(GYM / "bin" / "python"),
        "gym_folder": str(folder / "gym"),
        "gym_start_seconds": 240,
        "head_server": {"host": "127.0.0.1", "port": free_port()},
    }


@pytest.mark.slow
@pytest.mark.gym
@pytest.mark.vllm
def test_gym_reads_none_of_the_keys_that_are_refused() -> None:
    """No file of the release that is tested names one of them, but for a test of its own of how tags are removed."""
    sought = re.compile(rb"\b(" + "|".join(NEMO_RL_KEYS).encode() + rb")\b")
    packages = next((GYM / "lib").glob("python3*")) / "site-packages"
    files = [
        path
        for package in ("nemo_gym", "resources_servers", "responses_api_agents", "responses_api_models")
        for kind in ("*.py", "*.yaml")
        for path in (packages / package).rglob(kind)
    ]
    assert len(files) > 500
    assert [] == [path for path in files if sought.search(path.read_bytes())]


@pytest.mark.slow
@pytest.mark.gym
@pytest.mark.vllm
def test_a_rollout_of_gyms_own_servers_is_the_engines_record(tmp_path: Path) -> None:
    """The builder's actor, Gym's helper, three servers, a real engine: rows as an independent forward has them."""
    from tests.capture.tiny_server import running_server, write_model
    from tests.capture.vllm_engine import SPEC, reference_rows

    settings, sent = gym_settings(tmp_path), dict[str, Any]()
    gym_environments(tmp_path / "environments")
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model")
    example = {
        "agent_ref": {"name": "example_single_tool_call_simple_agent"},
        "responses_create_params": {
            "input": [{"role": "user", "content": "w100 w101 w102"}],
            "tools": [
                {
                    "type": "function",
                    "name": "look_up",
                    "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
                    "strict": False,
                }
            ],
            "max_output_tokens": 7,
            "temperature": 1.0,
        },
    }
    with (
        running_server(tmp_path / "model", fifo=tmp_path / "fifo", log=tmp_path / "log") as server,
        local_cluster(object_store_bytes=100 * 2**20),
    ):

        async def roll() -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
            with pytest.raises(UsageError, match="expected an environment with set_tokenizer"):
                # refused before a server starts: Gym takes no tokenizer, its model server asks the engine
                await build_environment_actor(
                    settings, URLS, factory=FACTORY, captured=SPEC, tokenizer="t", options=ActorOptions(venv=str(GYM))
                )
            handle = await build_environment_actor(
                settings,
                Endpoints.of([f"{server.url}/v1"]),
                factory=FACTORY,
                captured=SPEC,
                options=ActorOptions(venv=str(GYM)),
            )
            try:
                answer = await handle.rollout(example)
                assert await handle.is_healthy()
                sent.update(gym_config(handle.config))
                return answer, received_by(settings["head_server"]), children_of(handle.pid)
            finally:
                await asyncio.to_thread(handle.close)

        answer, received, processes = asyncio.run(roll())
    # every key that was sent is in what Gym's head server hands to its servers
    assert without_others(received, sent) == sent
    # the rows that Gym validated are whole numbers, one row a token, and the one that was not fed is MISSING
    calls = [item for item in answer["response"]["output"] if "generation_token_ids" in item]
    rows = [np.asarray(item["routed_experts"]) for item in calls]
    assert [("int64", -1)] * 3 == [(each.dtype.name, int(each[-1].max())) for each in rows]
    [record] = gym_rollout(answer, SPEC, sample_id="s", weights_version=1, axis="captured", cached=0).records
    assert np.int16 == record.routes.dtype
    assert 1.0 == answer["reward"]
    assert 3 == len([span for span in record.spans if span.kind == "generation"])
    assert reference_rows(model, record.token_ids)[:-1] == np.sort(record.routes[:-1], axis=2).tolist()
    assert len(processes) > 3
    assert all(has_ended(process) for process in processes)


MISSING_ROWS = {
    "lists": [[[-1, -1]], [[-1, -1]]],
    "nrlre1": "nrlre1:int16:1x1x2://///w==",
}


@pytest.mark.parametrize("rows", MISSING_ROWS.values(), ids=MISSING_ROWS)
def test_rows_that_are_all_missing_are_not_routes(rows: object) -> None:
    """The field is there and holds nothing: presence is a matter of content."""
    item = {"generation_token_ids": [7], "routed_experts": rows}
    with pytest.raises(DataError, match=r"only MISSING rows @ items \[0\]"):
        check_routes({"response": {"output": [item]}})


def test_a_row_of_the_last_token_is_not_content() -> None:
    """A harness fills the row that no engine made; the rows of the tokens that were fed are what counts."""
    item = {"prompt_token_ids": [5], "generation_token_ids": [7], "routed_experts": [[[-1, -1]], [[0, 1]]]}
    with pytest.raises(DataError, match=r"only MISSING rows @ items \[0\]"):
        check_routes({"response": {"output": [item]}})
    check_routes({"response": {"output": [{**item, "routed_experts": [[[0, 1]], [[-1, -1]]]}]}})


def test_a_call_without_the_field_is_named() -> None:
    """The second call of two."""
    items = [{"generation_token_ids": [7], "routed_experts": [[[0, 1]]]}, {"generation_token_ids": [7]}]
    with pytest.raises(DataError, match=r"no routes @ items \[1\]"):
        check_routes({"response": {"output": items}})
