"""The demo's environment: a conversation with a tool that says random bytes, asked of the engine over HTTP.

A module of its own, since an environment's process must not import what the engine and the trainer need: on few cores
that would hold up the engine, which everybody waits for.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeplane.fleet.environment import EnvironmentConfig

__all__ = ["TOOL_TOKENS", "TURNS", "TURN_TOKENS", "Conversations", "make_environment"]

#: Turns of one rollout, tokens that the engine adds in each, and tokens that the "tool" answers with.
TURNS, TURN_TOKENS, TOOL_TOKENS = 3, 24, 8


class Conversations:
    """Asks the engine over HTTP, TURNS times, each time with all that was said and a tool's answer."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._urls = config.endpoints.urls
        self._require_routes = config.require_routes

    def start(self) -> None:
        """Load what this environment plays with; here, nothing."""

    def rollout(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The engine's responses, one for each turn."""
        rng = random.Random(example["seed"])
        url = self._urls[example["index"] % len(self._urls)]
        history, responses = list(example["prompt"]), []
        for turn in range(TURNS):
            body = {
                "model": "policy",
                "prompt": history,
                "max_tokens": TURN_TOKENS,
                "temperature": 1.0,
                "seed": example["seed"] + turn,
                "logprobs": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = _post(f"{url}/completions", body)
            if self._require_routes and "routed_experts" not in response["choices"][0]:
                raise RuntimeError("expected routes in the response, got none")
            responses.append(response)
            history += response["choices"][0]["token_ids"]
            history += [rng.randrange(256) for _ in range(TOOL_TOKENS)]
        return responses

    def is_healthy(self) -> bool:
        """Whether every engine answers."""
        return all(_get(f"{url}/models") for url in self._urls)

    def close(self) -> None:
        """Nothing to take down."""


def make_environment(config: EnvironmentConfig) -> Conversations:
    """The factory that the environment's actor is given by name."""
    return Conversations(config)


make_environment.consumes = ()  # type: ignore[attr-defined]


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found
