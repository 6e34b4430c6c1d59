"""The readers with their options as keyword arguments, for tests that vary one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from routeplane.capture import CaptureOptions, sglang
from routeplane.capture.choices import read_rows
from routeplane.capture.http import chunks, gym, messages, openai
from routeplane.record.calls import ModelCall
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec

__all__ = [
    "chunk_calls",
    "gym_calls",
    "gym_rollout",
    "log_record",
    "payload_rows",
    "response_calls",
    "sglang_call",
]

_NAMES = {field.name for field in fields(CaptureOptions)}


def _split(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a reader, with the options in an object."""
    options = CaptureOptions(**{name: value for name, value in given.items() if name in _NAMES})
    return {"options": options, **{name: value for name, value in given.items() if name not in _NAMES}}


def response_calls(response: object, spec: RouteSpec, **given: Any) -> tuple[ModelCall, ...]:
    """``openai.calls``."""
    return openai.calls(response, spec, **_split(given))


def chunk_calls(parts: Any, spec: RouteSpec, **given: Any) -> tuple[ModelCall, ...]:
    """``chunks.calls``."""
    return chunks.calls(parts, spec, **_split(given))


def gym_calls(result: object, spec: RouteSpec, **given: Any) -> tuple[ModelCall, ...]:
    """``gym.calls``."""
    return gym.calls(result, spec, **_split(given))


def gym_rollout(result: object, spec: RouteSpec, **given: Any) -> gym.GymRollout:
    """``gym.records``."""
    return gym.records(result, spec, **_split(given))


def log_record(log: Any, spec: RouteSpec, **given: Any) -> RouteRecord:
    """The one record of ``messages.records``."""
    [record] = messages.records(log, spec, **_split(given))
    return record


def sglang_call(answer: Any, spec: RouteSpec, **given: Any) -> ModelCall:
    """The one call of ``sglang.calls``."""
    [call] = sglang.calls(answer, spec, **_split(given))
    return call


def payload_rows(value: object, spec: RouteSpec, **given: Any) -> tuple[Any, int]:
    """``choices.read_rows``."""
    return read_rows(value, spec, **_split(given))
