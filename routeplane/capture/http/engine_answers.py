"""What a server's answers say of a writer inside its engine: a ticket for every choice, streamed or not, and counts.

vLLM passes on the ticket of one choice, and none in a stream. The rest is asked of the engine, through the
``collective_rpc`` that every engine client has and ``RouteScheduler`` answers. Knows no vLLM: the client is the
application's (``app.state.engine_client``).

Server-sent events are taken apart at empty lines, whatever pieces they come in.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from routeplane.errors import refused

__all__ = ["EngineAnswers", "EventStream"]

_KEY = "routeplane"


class EngineAnswers:
    """The writer inside the engine of one server.

    Args:
        app: The server's application, whose ``state`` has vLLM's configuration and engine client.

    Every data-parallel rank has a writer, and is asked: ``collective_rpc`` of vLLM's client reaches all of them, but
    returns the first one's answer alone.

    Raises:
        UsageError: The engine has no writer.

    Example:
        ``await EngineAnswers(scope["app"]).tickets("cmpl-7", choices=2)``
    """

    def __init__(self, app: object) -> None:
        state = getattr(app, "state", None)
        config = getattr(getattr(state, "vllm_config", None), "additional_config", None)
        if not isinstance(config, Mapping) or _KEY not in config:
            raise refused(
                "a server whose engine writes (--scheduler-cls routeplane.capture.vllm.RouteScheduler)", "one without"
            )
        self._client: Any = getattr(state, "engine_client", None)

    async def scalars(self) -> dict[str, float]:
        """Ask the engine for its counts, labelled by data-parallel rank as vLLM's own metrics are."""
        ranks = await self._ask("routeplane_report")
        return {f'{name}{{engine="{at}"}}': found[name] for name in ranks[0] for at, found in enumerate(ranks)}

    async def tickets(self, response_id: str, *, choices: int, last: int = 0) -> dict[int, str]:
        """Ask the engine for the tickets of a response.

        Args:
            response_id: The ``id`` of the response, or of a chunk of its stream.
            choices: The request's ``n``.
            last: The highest index of a choice that is asked for.

        Returns:
            The choices' ``index`` -> ticket as JSON, of those that have ended.
        """
        ranks = await self._ask("routeplane_tickets", response_id, prompts=last // choices + 1)
        return {_index(name, choices): ticket for found in ranks for name, ticket in found.items()}

    async def _ask(self, command: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The answers of all data-parallel ranks that this front end serves."""
        core: Any = getattr(self._client, "engine_core", None)
        ranks = getattr(core, "core_engines", ())
        if len(ranks) < 2:
            answers = [await self._client.collective_rpc(command, args=args, kwargs=kwargs)]
        else:
            ask = core._call_utility_async  # vLLM has no other call to a rank; ``interface`` names it
            answers = await asyncio.gather(
                *(ask("collective_rpc", command, None, args, kwargs, engine=rank) for rank in ranks)
            )
        return [answer[0] for answer in answers]

    async def put_tickets(self, document: MutableMapping[str, Any], *, choices: int) -> int:
        """Put a ticket on every choice of a response that has ended.

        Args:
            document: A response, or a chunk of its stream; it is changed: ``routed_experts`` of its choices.
            choices: The request's ``n``.

        Returns:
            How many tickets were put. Raises UsageError for a choice that ended and has none.
        """
        ended = [choice for choice in document.get("choices", ()) if choice.get("finish_reason") is not None]
        if not ended:
            return 0
        known = _tickets_of(document)
        indices = [int(choice.get("index", 0)) for choice in ended]
        if not known.keys() >= set(indices):
            known |= await self.tickets(str(document.get("id")), choices=choices, last=max(indices))
        for choice in ended:
            at = int(choice.get("index", 0))
            if at in known:
                choice["routed_experts"] = known[at]
            elif choice["finish_reason"] not in ("abort", "error"):
                said = document.get("kv_transfer_params") or {}
                why = said.get(f"{_KEY}_error", said.get(f"{_KEY}_pending", "the engine has no record of it"))
                raise refused(f"a ticket for choice {at}", f"none: {why} @ call {document.get('id')}")
        return len(ended)


def _index(name: str, choices: int) -> int:
    """``2`` is a choice; ``1.2`` the third choice of the second prompt."""
    prompt, _, choice = name.rpartition(".")
    return int(prompt or 0) * choices + int(choice)


def _tickets_of(document: Mapping[str, Any]) -> dict[int, str]:
    """Those that vLLM passed on."""
    said = document.get("kv_transfer_params") or {}
    several = said.get(f"{_KEY}_choices")
    if several is not None:
        return {int(at): ticket for at, ticket in several.items()}
    return {0: said[_KEY]} if _KEY in said and len(document.get("choices", ())) == 1 else {}


class EventStream:
    """Changes the events of a stream that are JSON objects, and passes all else on.

    Args:
        change: Changes one event's object in place.

    >>> import asyncio
    >>> async def number(document): document["n"] = 1
    >>> events = EventStream(number)
    >>> asyncio.run(events.feed(b'data: {}\\n'))
    b''
    >>> asyncio.run(events.feed(b'\\ndata: [DONE]\\n\\n'))
    b'data: {"n":1}\\n\\ndata: [DONE]\\n\\n'
    """

    def __init__(self, change: Callable[[dict[str, Any]], Awaitable[object]]) -> None:
        self._change = change
        self._rest = b""

    async def feed(self, piece: bytes, *, last: bool = False) -> bytes:
        """Take a piece of the stream.

        Args:
            piece: Bytes, wherever they were cut.
            last: Whether nothing follows.

        Returns:
            The events that are whole, changed.
        """
        *whole, self._rest = (self._rest + piece).split(b"\n\n")
        made = [await self._event(event) + b"\n\n" for event in whole]
        if last:
            made.append(self._rest)
            self._rest = b""
        return b"".join(made)

    async def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        try:
            document = json.loads(event[len(b"data: ") :])
        except ValueError:
            return event
        before = json.dumps(document, separators=(",", ":"))
        await self._change(document)
        after = json.dumps(document, separators=(",", ":"))
        return event if before == after else b"data: " + after.encode()
