"""NeMo Gym as an environment: ``make_environment`` is a factory for ``build_environment_actor``.

Gym's servers (model, resources, agents) run below the actor, in Gym's own Python and started by Gym's own helper
(``gym_servers``). Owns that process, Gym's part of the configuration that follows from ours, and what a rollout must
hold. Imports nothing of Gym.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routeplane.capture.wire import decode
from routeplane.errors import DataError, ErrorKind, FleetError, refused
from routeplane.fleet.environment import ALL_KEYS, EnvironmentConfig
from routeplane.fleet.teardown import Process, children_of, end_processes
from routeplane.record.spec import MISSING

__all__ = ["GymEnvironment", "check_routes", "gym_config", "make_environment"]

#: Keys of the environment's mapping that are for this file; all others are Gym's configuration.
_OWN_KEYS = ("gym_python", "gym_folder", "gym_start_seconds", "gym_rollout_seconds")
#: Keys that NeMo RL's own actor reads, and no part of NeMo Gym 0.4: passed on, they would have no effect.
_NEMO_RL_KEYS = (
    "invalid_tool_call_patterns",
    "pad_dynamic_image_shapes",
    "routes_dtype",
    "thinking_tags",
    "tokenizer_config",
    "use_fastokens",
)
#: What Gym's model server asks the middleware for; release 0.4 validates routes as nested lists.
_ROUTES_HEADER = ("x-routeplane-form", "nemo-lists")
#: How much of the servers' output stands in an error.
_TAIL = 4000
#: Seconds that servers have for an orderly end; Gym's own patience with each is shorter.
_STOP_SECONDS = 20.0


def make_environment(config: EnvironmentConfig) -> GymEnvironment:
    """The factory, ``routeplane.fleet.gym_environment:make_environment``. Nothing is started yet."""
    return GymEnvironment(config)


#: Gym and its servers check their own configuration.
make_environment.consumes = ALL_KEYS  # type: ignore[attr-defined]


def gym_config(config: EnvironmentConfig) -> dict[str, Any]:
    """Gym's configuration: the environment's mapping without what is ours, and the engine's URLs, as a copy.

    ``policy_base_url`` becomes the list of the endpoints' URLs; where routes are required, the policy's model server is
    told to return token ids and to ask for routes, unless the mapping says otherwise. Raises UsageError (ARGUMENT)
    where the mapping names other URLs of its own, since two resolutions would drift apart, and for NeMo RL's keys that
    Gym does not read.
    """
    unread = [key for key in _NEMO_RL_KEYS if key in config.settings]
    if unread:
        raise refused("keys that NeMo Gym reads", f"{', '.join(unread)}, which NeMo RL's own actor reads")
    built = {key: copy.deepcopy(value) for key, value in config.settings.items() if key not in _OWN_KEYS}
    if "policy_base_url" in built:
        raise refused("the engine's URLs from its endpoints alone", f"policy_base_url {built['policy_base_url']!r}")
    built["policy_base_url"] = list(config.endpoints.urls)
    built.setdefault("policy_api_key", "none")
    if config.require_routes:
        server = built
        for key in ("policy_model", "responses_api_models", "vllm_model"):
            server = server.setdefault(key, {})
        server.setdefault("return_token_id_information", True)
        server.setdefault("default_headers", {}).setdefault(*_ROUTES_HEADER)
    return built


class GymEnvironment:
    """Gym's servers below this process. ``environment`` of the configuration: Gym's own, ``config_paths`` above all.

    Besides, ``gym_python``: the interpreter of Gym's environment (default: this one); ``gym_folder``: where Gym keeps
    caches, logs and its servers' environments (default: a temporary one; Gym's ``uv_venv_dir`` and
    ``skip_venv_if_present`` say which environments exist already, else Gym makes them with uv);
    ``gym_start_seconds``, ``gym_rollout_seconds``: bounds.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        own = config.settings
        self._require_routes = config.require_routes
        self._gym = gym_config(config)
        self._python = str(own.get("gym_python") or sys.executable)
        self._start_seconds = float(own.get("gym_start_seconds", 600.0))
        self._rollout_seconds = float(own.get("gym_rollout_seconds", 3600.0))
        self._temporary = None if own.get("gym_folder") else tempfile.TemporaryDirectory(prefix="routeplane-gym-")
        self._folder = Path(str(own["gym_folder"]) if self._temporary is None else self._temporary.name)
        self._process: subprocess.Popen[str] | None = None
        self._urls: Mapping[str, str] = {}

    def start(self) -> None:
        """Start all servers and wait for them. Raises FleetError: ENVIRONMENT with their last words where they end."""
        self._folder.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("gym_servers.py")
        # Gym calls uv and its servers' Python by name; -P: the folder of the script holds modules of ours
        command = ["sh", "-c", 'PATH="$1:$PATH" exec "$2" -P "$3"', "sh"]
        command += [str(Path(self._python).parent), self._python, str(script)]
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        told = self._told(json.dumps(self._gym))
        if not told:
            raise FleetError(f"expected NeMo Gym's servers, got:\n{self._last_words()}", kind=ErrorKind.ENVIRONMENT)
        self._urls = json.loads(told)

    def rollout(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """One rollout by Gym's agent: ``example`` as a row of Gym's data, with ``agent_ref``; what its ``run`` answers.

        Raises UsageError (ARGUMENT) for an agent that is not one of the servers, DataError (ROUTES_MISSING) where
        routes are required and a model call has none, or rows that are all MISSING, FleetError (ENVIRONMENT) with the
        server's words.
        """
        agent = str((example.get("agent_ref") or {}).get("name"))
        if agent not in self._urls:
            raise refused(f"agent_ref.name among {', '.join(sorted(self._urls))}", repr(agent))
        answer = self._post(f"{self._urls[agent]}/run", example)
        if self._require_routes:
            check_routes(answer)
        return answer

    def is_healthy(self) -> bool:
        """Whether the servers came up, their parent runs and each of them answers."""
        if self._process is None or self._process.poll() is not None or not self._urls:
            return False
        return all(_answers(url) for url in self._urls.values())

    def close(self) -> None:
        """End the servers, then whatever process is left of them. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            # servers that are not up yet are not waited for: their parent does not listen until they are
            _end(process, children_of(process.pid), patience=_STOP_SECONDS if self._urls else 0.0)
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def _log(self) -> Path:
        return self._folder / "gym.log"

    def _told(self, config: str) -> str:
        """The line that the servers' parent says once they are up; empty where it ended. Raises FleetError."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise FleetError("expected a process, got none", kind=ErrorKind.CLOSED)
        lines: list[str] = []
        output = process.stdout

        def talk(writer: Any) -> None:
            writer.write(config + "\n")
            writer.flush()
            lines.append(output.readline())

        thread = threading.Thread(target=talk, args=(process.stdin,), daemon=True)
        thread.start()
        thread.join(self._start_seconds)
        if thread.is_alive():
            raise FleetError(
                f"expected NeMo Gym's servers within {self._start_seconds} s, got none:\n{self._last_words()}",
                kind=ErrorKind.NOT_READY,
            )
        return lines[0] if lines else ""

    def _last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]

    def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self._rollout_seconds) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
        except urllib.error.HTTPError as error:
            with error:
                words = error.read(_TAIL).decode(errors="replace")
            raise FleetError(
                f"expected a rollout from {url}, got status {error.code}: {words}", kind=ErrorKind.ENVIRONMENT
            ) from None
        except OSError as error:
            raise FleetError(f"expected a rollout from {url}, got {error}", kind=ErrorKind.ENVIRONMENT) from error


def check_routes(answer: Mapping[str, Any]) -> None:
    """Raise DataError (ROUTES_MISSING) unless every model call of a rollout carries rows that hold ids.

    A payload whose rows are all MISSING has the field and no content; a row of the last token, which no engine fed,
    does not count. Raises DataError as ``capture.wire.decode`` for a payload that cannot be read.

    Example::

        >>> item = {"prompt_token_ids": [5], "generation_token_ids": [7], "routed_experts": [[[0, 1]], [[0, 1]]]}
        >>> check_routes({"response": {"output": [item]}})
    """
    calls = [
        (place, item)
        for place, item in enumerate(answer.get("response", {}).get("output", ()))
        if item.get("generation_token_ids")
    ]
    without = [place for place, item in calls if item.get("routed_experts") is None]
    empty = [place for place, item in calls if place not in without and not _has_ids(item)]
    if without or empty or not calls:
        raise DataError(
            f"expected rows of ids with every model call of a rollout, got {len(calls)} calls, "
            f"no routes @ items {without}, only MISSING rows @ items {empty}",
            kind=ErrorKind.ROUTES_MISSING,
        )


def _has_ids(item: Mapping[str, Any]) -> bool:
    fed = len(item.get("prompt_token_ids") or ()) + len(item["generation_token_ids"]) - 1
    return bool((decode(item["routed_experts"]).routes[: fed or None] != MISSING).any())


def _answers(url: str) -> bool:
    """Whether a server says anything: Gym's have no page at their root."""
    try:
        with urllib.request.urlopen(url, timeout=10.0):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


def _end(process: subprocess.Popen[str], below: tuple[Process, ...], *, patience: float) -> None:
    """Close stdin, which asks for an orderly end; kill what is left after it."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    end_processes(below)
