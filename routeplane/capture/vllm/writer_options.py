"""What the writer inside an engine is told: by the engine's configuration, and by each request.

``additional_config={"routeplane": {...}}`` of the engine becomes a ``WriterConfig``;
``SamplingParams.extra_args={"routeplane": {...}}`` of a request, which HTTP clients send as ``vllm_xargs``, becomes
``RequestOptions``. Pure values; knows no vLLM and opens nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from routeplane.capture.resuming import FollowedRows
from routeplane.errors import DataError, UsageError, refused
from routeplane.record.parse import check_count, check_optional_int64, check_text

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord

__all__ = ["KEY", "RequestOptions", "WriterConfig", "choice_of", "request_args"]

#: Where both stand: in ``additional_config``, in ``extra_args``, and in the answer's ``kv_transfer_params``.
KEY = "routeplane"

# vLLM's ids: `{id}-{8 hex digits}`, and before it `{index}_` for each of several choices
# (v1/engine/input_processor.py, assign_request_id; v1/engine/parallel_sampling.py, ParentRequest.get_child_info)
_INTERNAL = re.compile(r"(?:(?P<choice>[0-9]+)_)?(?P<external>.+)-[0-9a-f]{8}", re.DOTALL)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def choice_of(request_id: str) -> tuple[str, int | None]:
    """Split the id that an engine runs a sequence under.

    Args:
        request_id: The engine's id.

    Returns:
        The id that the request came with, and the index of the choice where the request has several.

    >>> choice_of("2_cmpl-7-0-0123abcd")
    ('cmpl-7-0', 2)
    >>> choice_of("cmpl-7-0-0123abcd")
    ('cmpl-7-0', None)
    """
    found = _INTERNAL.fullmatch(request_id)
    if found is None:
        return request_id, None
    return found["external"], None if found["choice"] is None else int(found["choice"])


def _no_options() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterConfig:
    """Where an engine's records go, and what happens when they cannot.

    Args:
        place: Where blocks go: a folder for the default carrier.
        run: Name of the training run. A place that holds another run refuses the start.
        carrier: Dotted name of what opens the place, called as ``carrier(place, spec, run=, producer=, **options)``.
        options: Further arguments of the carrier (``groups``, ``encoding``).
        limits: Bounds of the carrier by name, as in its ``BlockLimits``: ``max_bytes``, ``timeout_s``, ``sync``.
        producer: Name of this server among those that write to the place. Its data-parallel ranks are
            ``{producer}-{rank}``, each a producer of its own.
        block_bytes: A block is sealed at this payload,
        block_age_s: or when its first record is this old,
        wait_s: or at once while an answer waits for its ticket. An answer that waited this long leaves without one; its
            ``routeplane_pending`` names the record that is still to come.
        queue_bytes: Rows that may wait for the writer thread.
        on_full: What a sequence does that finds the queue full: ``wait`` holds up the engine, ``lose`` stores its rows
            as ``lost``.
        retry_s: How long a carrier that fails is opened again and again before its records count as lost.
        on_loss: ``count`` goes on, ``fail`` ends the engine.
        default: What becomes of requests that say nothing: ``ship`` or ``skip``.
        weights_version: Version of the weights at the start.
        probe_every_s: How often the engine's rows are compared with those of a second pass; None: at the start only.

    >>> WriterConfig.from_additional({"routeplane": {"place": "/data/routes", "run": "run-7"}}).producer_of(rank=1)
    'engine-1'
    """

    place: str
    run: str
    carrier: str = "routeplane.stream.folder.open_writer"
    options: Mapping[str, Any] = field(default_factory=_no_options, repr=False)
    limits: Mapping[str, Any] = field(default_factory=_no_options)
    producer: str = "engine"
    block_bytes: int = 2**26
    block_age_s: float = 1.0
    wait_s: float = 30.0
    queue_bytes: int = 2**28
    on_full: Literal["wait", "lose"] = "wait"
    retry_s: float = 60.0
    on_loss: Literal["count", "fail"] = "count"
    default: Literal["ship", "skip"] = "ship"
    weights_version: int | None = None
    probe_every_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("place", "run", "producer"):
            _checked(check_text, getattr(self, name), name)
        if not isinstance(self.carrier, str) or not _DOTTED.fullmatch(self.carrier):
            raise refused("carrier as the dotted name of a function", repr(self.carrier))
        for name in ("options", "limits"):
            if not isinstance(getattr(self, name), Mapping):
                raise refused(f"{name} as a mapping", repr(getattr(self, name)))
        for name in ("block_bytes", "queue_bytes"):
            _checked(check_count, getattr(self, name), name, below=2**63)
        for name in ("block_age_s", "wait_s", "retry_s", "probe_every_s"):
            _check_seconds(name, getattr(self, name), optional=name == "probe_every_s")
        for name, choices in (("on_full", ("wait", "lose")), ("on_loss", ("count", "fail")), ("default", _DEFAULTS)):
            if getattr(self, name) not in choices:
                raise refused(f"{name} of {choices}", repr(getattr(self, name)))
        _checked(check_optional_int64, self.weights_version, "weights_version")

    @classmethod
    def from_additional(cls, additional_config: object) -> WriterConfig:
        """Read the part of vLLM's ``additional_config`` that is ours.

        Args:
            additional_config: What the engine was started with.

        Returns:
            The configuration. Raises UsageError naming what is absent or unknown.
        """
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if given is None:
            raise refused(f"additional_config={{{KEY!r}: {{'place': ..., 'run': ...}}}}", _keys_of(additional_config))
        return cls(**_known(cls, given, "additional_config", required={"place", "run"}))

    def producer_of(self, *, rank: int) -> str:
        """Name the producer of one data-parallel rank."""
        return f"{self.producer}-{rank}"


_DEFAULTS = ("ship", "skip")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """What one request asks of the writer.

    Args:
        capture: Whether its rows are recorded at all; validation and judge traffic says False.
        inline: Leave the rows in the answer, as an engine without a writer does, and write no record (a probe).
        sample_id: Name of the sample; None takes the id that the request came with. Each of several choices is recorded
            as ``{sample_id}/{index}`` in one group.
        attempt: The record's attempt.
        group: The record's group; None takes ``sample_id`` where there are several choices.
        weights_version: Version of the weights when it was sent.
        follow: Rows for the gates to follow, as ``FollowedRows.to_json`` writes them (``forcing``); the writer leaves
            them alone.

    >>> RequestOptions(sample_id="prompt-7").name_of("1_cmpl-7-0-0123abcd")
    ('prompt-7/1', 'prompt-7')
    """

    capture: bool = True
    inline: bool = False
    sample_id: str | None = None
    attempt: int = 0
    group: str | None = None
    weights_version: int | None = None
    follow: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.follow is not None and not isinstance(self.follow, Mapping):
            raise refused("follow as an object", repr(self.follow)[:80])
        for name in ("capture", "inline"):
            if not isinstance(getattr(self, name), bool):
                raise refused(f"{name} as true or false", repr(getattr(self, name)))
        for name in ("sample_id", "group"):
            if getattr(self, name) is not None:
                _checked(check_text, getattr(self, name), name)
        _checked(check_count, self.attempt, "attempt", below=2**31)
        _checked(check_optional_int64, self.weights_version, "weights_version")

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None, *, default: str = "ship") -> RequestOptions:
        """Read what a request's ``extra_args`` say.

        HTTP carries scalars only (``vllm_xargs``): there the object travels as its JSON text.

        Args:
            extra_args: The request's ``SamplingParams.extra_args``.
            default: ``ship`` or ``skip``: what becomes of requests that say nothing.

        Returns:
            The options. Raises UsageError naming what is unknown.
        """
        given = (extra_args or {}).get(KEY)
        if given is None:
            return cls(capture=default == "ship")
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                raise refused(f"extra_args[{KEY!r}] as JSON", repr(given[:80])) from None
        return cls(**_known(cls, given, "extra_args", required=set()))

    def name_of(self, request_id: str) -> tuple[str, str | None]:
        """Name one of the request's sequences: ``(sample_id, group)``, by the id that the engine runs it under."""
        external, choice = choice_of(request_id)
        stem = self.sample_id if self.sample_id is not None else (request_id if choice is None else external)
        if choice is None:
            return stem, self.group
        return f"{stem}/{choice}", self.group if self.group is not None else stem


def request_args(
    *,
    capture: bool = True,
    inline: bool = False,
    sample_id: str | None = None,
    attempt: int = 0,
    group: str | None = None,
    weights_version: int | None = None,
    follow: RouteRecord | None = None,
) -> dict[str, Any]:
    """Build ``SamplingParams.extra_args`` for one request.

    Args:
        capture: As all arguments, a field of ``RequestOptions``.
        inline: ...
        sample_id: ...
        attempt: ...
        group: ...
        weights_version: ...
        follow: A record whose tokens begin the prompt, and whose rows the gates are to follow (``forcing``). The prompt
            must then be sent with ``cache_salt=`` what stands in ``["routeplane"]["follow"]["salt"]``.

    Returns:
        A dict that also travels as JSON. Raises UsageError for values that the engine would refuse.

    >>> request_args(sample_id="prompt-7", weights_version=12)
    {'routeplane': {'capture': True, 'sample_id': 'prompt-7', 'attempt': 0, 'weights_version': 12}}
    """
    made = RequestOptions(
        capture=capture,
        inline=inline,
        sample_id=sample_id,
        attempt=attempt,
        group=group,
        weights_version=weights_version,
        follow=None if follow is None else FollowedRows.of(follow, weights_version=weights_version).to_json(),
    )
    content = {item.name: getattr(made, item.name) for item in fields(made)}
    return {
        KEY: {
            name: value
            for name, value in content.items()
            if (value is not None and value is not False) or name == "capture"
        }
    }


def _known(
    cls: type[WriterConfig] | type[RequestOptions], given: object, where: str, *, required: set[str]
) -> dict[str, Any]:
    names = [item.name for item in fields(cls)]
    unknown = sorted(set(given) - set(names)) if isinstance(given, Mapping) else [given]
    if not isinstance(given, Mapping) or unknown or not required <= set(given):
        raise refused(f"{where}[{KEY!r}] with keys of {names}", _keys_of(given))
    return dict(given)


def _keys_of(given: object) -> str:
    """Names and no values: a carrier's options may hold secrets, and errors are logged."""
    return f"the keys {sorted(map(str, given))}"[:200] if isinstance(given, Mapping) else repr(given)[:80]


def _check_seconds(name: str, value: object, *, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise refused(f"{name} as a number of seconds above 0", repr(value))


def _checked(check: Any, value: object, name: str, **limits: Any) -> None:
    try:
        check(value, name, **limits)
    except DataError as error:
        raise UsageError(f"{KEY}: {error}", kind=error.kind) from None
