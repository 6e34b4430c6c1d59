"""Contract suites: what every implementation of a seam must do, as pytest classes that its tests inherit.

Each suite stands in a module of its own and loads on first use, with the third party that it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routeplane.testing.contracts.carrier_contract import CarrierContract
    from routeplane.testing.contracts.engine_contract import EngineContract
    from routeplane.testing.contracts.replay_contract import ReplayContract
    from routeplane.testing.contracts.stream_contract import LiveContract, StreamContract

__all__ = ["CarrierContract", "EngineContract", "LiveContract", "ReplayContract", "StreamContract"]

#: public name -> the module that defines it
_HOMES = {
    "CarrierContract": "routeplane.testing.contracts.carrier_contract",
    "EngineContract": "routeplane.testing.contracts.engine_contract",
    "LiveContract": "routeplane.testing.contracts.stream_contract",
    "ReplayContract": "routeplane.testing.contracts.replay_contract",
    "StreamContract": "routeplane.testing.contracts.stream_contract",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
