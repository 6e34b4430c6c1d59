"""routeplane: carry mixture-of-experts routing decisions safely from rollout engines to trainers.

    capture  ->  record  ->  stream / archive  ->  batch  ->  replay

The names below need numpy, pyarrow and xxhash only. Stages with heavier needs are imported by module:
``routeplane.batch`` (torch), ``routeplane.replay.transformers``, ``routeplane.capture.vllm``, ...
"""

from routeplane.errors import ErrorKind, Problem, RouteplaneError
from routeplane.record.assembly import Assembly, AssemblyReport, assemble
from routeplane.record.calls import ModelCall, merge_layers
from routeplane.record.coverage import Coverage
from routeplane.record.interfaces import RouteSink, RouteSource, RouteTicket
from routeplane.record.prefixes import resolve, share_prompts
from routeplane.record.record import Prefix, RecordKey, RouteRecord
from routeplane.record.schema import FORMAT_VERSION
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import check_routes, find_problems
from routeplane.stream import MemoryStream, new_stream, open_stream

__version__ = "0.1.0"

__all__ = [
    "FORMAT_VERSION",
    "MISSING",
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
    "Span",
    "__version__",
    "assemble",
    "check_routes",
    "find_problems",
    "merge_layers",
    "new_stream",
    "open_stream",
    "resolve",
    "share_prompts",
]
