"""What the writer inside an engine is told: once by the engine's configuration, and per request by its extra arguments.

Pure values; knows no vLLM and opens nothing. ``additional_config={"routeplane": {...}}`` of the engine becomes a
``WriterConfig``; ``SamplingParams.extra_args={"routeplane": {...}}`` of a request, which HTTP clients send as
``vllm_xargs``, becomes a ``Shipping``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from routeplane.errors import DataError, UsageError, refused
from routeplane.record.parse import check_count, check_optional_int64, check_text

__all__ = ["KEY", "Shipping", "WriterConfig", "shipping_args"]

#: Where both stand: in ``additional_config``, in ``extra_args``, and in the answer's ``kv_transfer_params``.
KEY = "routeplane"

# a child of a request with several choices: vllm/v1/engine/parallel_sampling.py, ParentRequest.get_child_info
_CHILD = re.compile(r"([0-9]+)_.+", re.DOTALL)


def _no_options() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterConfig:
    """Where an engine's records go.

    ``sink``: dotted name of a factory, called as ``factory(target, spec, **options)``, that gives a RouteSink;
    ``routeplane.stream.new_stream`` takes a path. ``target``: its first argument; in a text, ``{rank}`` is the
    data-parallel rank (several engine processes may not share a stream) and ``{index}`` the number of the stream.
    ``stream``: what tickets call the stream, same placeholders; None takes the target. ``records_per_stream``: a new
    stream begins after so many records, so that a reader gets them while the engine runs; None: one until the engine
    ends. ``default``: what becomes of requests that say nothing. ``weights_version``: of requests that do not say, up
    to the first pause of the engine, after which it is unknown.
    """

    sink: str
    target: Any
    options: Mapping[str, Any] = field(default_factory=_no_options)
    stream: str | None = None
    records_per_stream: int | None = None
    default: Literal["ship", "skip"] = "ship"
    weights_version: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sink, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", self.sink):
            raise refused("sink as the dotted name of a factory", repr(self.sink))
        if self.stream is None and not isinstance(self.target, str):
            raise refused("a name of the stream where its target is no text", repr(self.target))
        if not isinstance(self.options, Mapping):
            raise refused("options as a mapping", repr(self.options))
        if self.default not in ("ship", "skip"):
            raise refused("default of ('ship', 'skip')", repr(self.default))
        if self.records_per_stream is not None:
            _checked(check_count, self.records_per_stream, "records_per_stream", below=2**63)
            if self.records_per_stream == 0 or "{index}" not in str(self.target):
                raise refused("records_per_stream of at least 1 and {index} in the target", repr(self.target))
        _checked(check_optional_int64, self.weights_version, "weights_version")

    @classmethod
    def from_additional(cls, additional_config: object) -> WriterConfig:
        """The part of vLLM's ``additional_config`` that is ours. Raises UsageError naming what is absent or unknown."""
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if given is None:
            raise refused(f"additional_config={{{KEY!r}: {{'sink': ..., 'target': ...}}}}", repr(additional_config))
        return cls(**_known(cls, given, "additional_config"))

    def target_of(self, *, rank: int, index: int) -> Any:
        """The factory's first argument for one stream of one engine process."""
        return _filled(self.target, rank=rank, index=index) if isinstance(self.target, str) else self.target

    def stream_of(self, *, rank: int, index: int) -> str:
        """What tickets call that stream."""
        return _filled(self.target if self.stream is None else self.stream, rank=rank, index=index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipping:
    """What one request asks of the writer.

    ``capture``: whether its rows are shipped at all; validation and judge traffic says False. ``inline``: leave them in
    the answer, as an engine without a writer does, and write no record (a probe). ``sample_id``: None takes
    the engine's own request id, which is unique. ``choices``: the request's n; each of several choices is recorded as
    ``{sample_id}/{index}`` in one group. ``weights_version``: of the weights when it was sent.
    """

    capture: bool = True
    inline: bool = False
    sample_id: str | None = None
    attempt: int = 0
    group: str | None = None
    choices: int = 1
    weights_version: int | None = None

    def __post_init__(self) -> None:
        for name in ("capture", "inline"):
            if not isinstance(getattr(self, name), bool):
                raise refused(f"{name} as true or false", repr(getattr(self, name)))
        for name in ("sample_id", "group"):
            if getattr(self, name) is not None:
                _checked(check_text, getattr(self, name), name)
        _checked(check_count, self.attempt, "attempt", below=2**31)
        _checked(check_count, self.choices, "choices", below=2**31)
        _checked(check_optional_int64, self.weights_version, "weights_version")

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None, *, config: WriterConfig) -> Shipping:
        """What a request's ``extra_args`` say; ``config`` where they are silent. Raises UsageError.

        HTTP carries scalars only (``vllm_xargs``): there the object travels as its JSON text.
        """
        given = (extra_args or {}).get(KEY)
        if given is None:
            return cls(capture=config.default == "ship", weights_version=config.weights_version)
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                raise refused(f"extra_args[{KEY!r}] as JSON", repr(given[:80])) from None
        return cls(**{"weights_version": config.weights_version, **_known(cls, given, "extra_args")})

    def name_of(self, request_id: str) -> tuple[str, str | None]:
        """``(sample_id, group)`` of one of the request's sequences, by the id that the engine runs it under."""
        if self.choices <= 1:
            return self.sample_id if self.sample_id is not None else request_id, self.group
        child = _CHILD.fullmatch(request_id)
        if child is None:
            raise refused(f"one of {self.choices} choices, as {{index}}_{{id}}", repr(request_id))
        stem = self.sample_id if self.sample_id is not None else request_id.partition("_")[2]
        return f"{stem}/{int(child[1])}", self.group if self.group is not None else stem


def shipping_args(
    *,
    capture: bool = True,
    inline: bool = False,
    sample_id: str | None = None,
    attempt: int = 0,
    group: str | None = None,
    choices: int = 1,
    weights_version: int | None = None,
) -> dict[str, Any]:
    """``SamplingParams.extra_args`` for one request; fields as in ``Shipping``. Raises UsageError."""
    made = Shipping(
        capture=capture,
        inline=inline,
        sample_id=sample_id,
        attempt=attempt,
        group=group,
        choices=choices,
        weights_version=weights_version,
    )
    content = {item.name: getattr(made, item.name) for item in fields(made)}
    return {
        KEY: {
            name: value
            for name, value in content.items()
            if (value is not None and value is not False) or name == "capture"
        }
    }


def _known(cls: type[WriterConfig] | type[Shipping], given: object, where: str) -> dict[str, Any]:
    names = [item.name for item in fields(cls)]
    unknown = sorted(set(given) - set(names)) if isinstance(given, Mapping) else [given]
    required = {"sink", "target"} if cls is WriterConfig else set()
    if not isinstance(given, Mapping) or unknown or not required <= set(given):
        raise refused(f"{where}[{KEY!r}] with keys of {names}", repr(given)[:200])
    return dict(given)


def _checked(check: Any, value: object, name: str, **limits: Any) -> None:
    try:
        check(value, name, **limits)
    except DataError as error:
        raise UsageError(f"{KEY}: {error}", kind=error.kind) from None


def _filled(text: str, *, rank: int, index: int) -> str:
    return text.replace("{rank}", str(rank)).replace("{index}", f"{index:06d}")
