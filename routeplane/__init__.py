"""routeplane: carry mixture-of-experts routing decisions safely from rollout engines to trainers.

    capture  ->  record  ->  stream / archive  ->  batch  ->  replay

The names below need numpy, pyarrow and xxhash only. Stages with heavier needs are imported by module:
``routeplane.batch`` (torch), ``routeplane.replay.transformers``, ``routeplane.capture.vllm``, ...
"""

from routeplane.errors import ErrorKind, Problem, RouteplaneError
from routeplane.record.alarms import find_alarms
from routeplane.record.aligned import AlignedColumn
from routeplane.record.assembly import Assembly, AssemblyReport, UnfedTokens, assemble
from routeplane.record.calls import ModelCall, merge_layers
from routeplane.record.counts import metrics_text
from routeplane.record.interfaces import RouteSink, RouteSource, RouteTicket
from routeplane.record.prefixes import as_delta, resolve, share_prompts
from routeplane.record.record import Prefix, RecordKey, RouteRecord
from routeplane.record.schema import FORMAT_VERSION
from routeplane.record.spans import Capture, Coverage, Sampling, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import check_routes, find_problems
from routeplane.stream import MemoryStream, new_stream, open_stream

__version__ = "0.1.0"

__all__ = [
    "FORMAT_VERSION",
    "MISSING",
    "AlignedColumn",
    "Assembly",
    "AssemblyReport",
    "Capture",
    "Coverage",
    "ErrorKind",
    "MemoryStream",
    "ModelCall",
    "Prefix",
    "Problem",
    "RecordKey",
    "RouteRecord",
    "RouteSink",
    "RouteSource",
    "RouteSpec",
    "RouteTicket",
    "RouteplaneError",
    "Sampling",
    "Span",
    "UnfedTokens",
    "__version__",
    "as_delta",
    "assemble",
    "check_routes",
    "find_alarms",
    "find_problems",
    "merge_layers",
    "metrics_text",
    "new_stream",
    "open_stream",
    "resolve",
    "share_prompts",
]
