"""What the real vLLM server of the tests loads: the middleware, and a parser that takes generated words for a tool
call.

Read by the server's process. Where the tickets' stream goes stands in a variable of its environment, which is the
tests' to set: the library reads none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from routeplane.capture import CaptureOptions
from routeplane.capture.http import RouteMiddleware
from routeplane.record.interfaces import RouteSink
from routeplane.record.spec import RouteSpec
from routeplane.stream import new_stream

#: The variable with the path of a FIFO.
FIFO = "ROUTEPLANE_TESTS_FIFO"


def open_sink(spec: RouteSpec) -> RouteSink:
    """A stream into the FIFO; each record leaves at once, since nothing buffers it."""
    fifo = open(os.environ[FIFO], "wb", buffering=0)  # noqa: SIM115  open as long as the server is
    return new_stream(fifo, spec, max_bytes=1)


class Routes(RouteMiddleware):
    """As a user writes it: vLLM gives a middleware nothing but the application."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            app, sink="tests.capture.serving:open_sink", stream="rollouts", options=CaptureOptions(cached=0)
        )


@ToolParserManager.register_module("words")
class WordsAreArguments(ToolParser):  # type: ignore[misc]  # no engine's types are followed
    """Every answer is one call of ``look_up`` with the generated text as its argument."""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """All of the text, as it was generated."""
        function = FunctionCall(name="look_up", arguments=json.dumps({"words": model_output}))
        call = ToolCall(type="function", function=function)
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[call], content=None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        """The tests stream no tool call."""
        return None
