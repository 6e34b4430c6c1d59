"""Stage 4: the trainer's gates follow the rows that the engine recorded.

``gate`` holds the rule, ``handle`` binds rows to the forward that uses them, and one module per framework finds its
gates: ``routeplane.replay.transformers``. Importing this package needs torch and no model library.
"""

from routeplane.replay.gate import RecordedRoutes
from routeplane.replay.handle import GateReport, NoReplay, ReplayHandle, ReplayReport

__all__ = ["GateReport", "NoReplay", "RecordedRoutes", "ReplayHandle", "ReplayReport"]
