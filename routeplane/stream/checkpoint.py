"""A ledger saved as a spool folder, blocks and all, from which any service can be started. Decides nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeplane.errors import refused
from routeplane.stream.delivery import Block, Totals
from routeplane.stream.spool import Spool
from routeplane.stream.spooled import save_spec

if TYPE_CHECKING:
    from routeplane.record.schema import Encoding
    from routeplane.record.spec import RouteSpec
    from routeplane.stream.ledger import Ledger
    from routeplane.stream.roster import LedgerState

__all__ = ["save_ledger"]


def save_ledger(
    ledger: Ledger, folder: Path, *, to_bytes: Callable[[Any], Any], known: tuple[RouteSpec, Encoding] | None
) -> int:
    """Write what is not acknowledged by every group, and how far everybody is; how many blocks.

    The folder appears when it is complete. Raises UsageError where it is there already, TransportError (NO_ROOM).
    """
    if folder.exists():
        raise refused("a folder that is not there yet", str(folder))
    written = folder.with_name(f".{folder.name}.tmp")
    spool = Spool(written, to_bytes=to_bytes, in_memory=True)
    try:
        blocks = _fill(spool, ledger, ledger.snapshot())
    finally:
        spool.close()
    if known is not None:
        save_spec(written, known[0], encoding=known[1])
    os.rename(written, folder)
    return blocks


def _fill(spool: Spool, ledger: Ledger, state: LedgerState) -> int:
    for group, at in state.groups.items():
        spool.joined(group)
        for name, through in at.items():
            spool.acknowledged(group, producer=name, through=through)
    count = 0
    for name, producer in state.producers.items():
        held = _held(ledger, state, name)
        before = producer.totals
        for block in held:
            before = _minus(before, block)
        spool.attached(name, first=producer.settled, before=before)
        for block in held:
            spool.keep(block)
        if producer.end != "open":
            spool.ended(name, end=producer.end, withdrawn=())
        count += len(held)
    if state.floor is not None:
        spool.retired(state.floor)
    if state.sealed:
        spool.sealed()
    return count


def _held(ledger: Ledger, state: LedgerState, producer: str) -> list[Block]:
    """The producer's blocks that some group is not done with, in order."""
    found: dict[int, Block] = {}
    for key, place in state.places.items():
        if place.producer == producer and place.sequence >= state.producers[producer].settled:
            block = ledger.find(key)
            if block is not None:
                found[block.sequence] = block
    return [found[sequence] for sequence in sorted(found)]


def _minus(totals: Totals, block: Block) -> Totals:
    return replace(
        totals,
        blocks=totals.blocks - 1,
        records=totals.records - len(block.keys),
        tokens=totals.tokens - block.tokens,
    )
