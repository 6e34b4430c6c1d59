"""Blocks on disk: durability ``spool``. A folder holds one stream; another process goes on where one was killed.

    lock                 held by the one process that uses the folder
    journal.jsonl        who came, what was kept, acknowledged, ended; the folder says what the journal says
    <producer>/<n>.arrows    block n of a producer, a whole stream of its own that ``open_stream`` reads

A block is written, synced and renamed before its line is appended, and removed after the line that lets it go: a crash
leaves at most a file that the journal does not know, and that goes at the next start.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from routeplane.errors import ErrorKind, FormatError, TruncatedError, UsageError
from routeplane.record.record import RecordKey
from routeplane.stream.delivery import Block, Totals
from routeplane.stream.files import PublishedPath
from routeplane.stream.journal import Journal, no_room, read_journal
from routeplane.stream.roster import LedgerState, ProducerState
from routeplane.stream.shelf import Place

__all__ = ["Recovered", "Spool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What a folder held. Payloads of ``blocks`` are paths."""

    state: LedgerState
    blocks: tuple[Block, ...]


@dataclass(kw_only=True, slots=True)
class _Row:
    """A producer as the journal tells it. ``base``: where it began; ``before``: what blocks below that held."""

    base: int
    before: Totals
    owner: str | None = None
    end: str = "open"
    blocks: dict[int, Block] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)


class Spool:
    """The Store of a folder; made where there is none. One process at a time, which ``close`` or its end lets go.

    ``to_bytes``: a block's payload as the bytes of a whole stream; ``in_memory``: whether the ledger goes on holding
    the payload it was given, rather than the path.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        to_bytes: Callable[[Any], Any] = memoryview,
        in_memory: bool = False,
    ) -> None:
        self._folder, self._to_bytes, self._in_memory = Path(folder), to_bytes, in_memory
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        try:
            self._rows, self._groups, self._floor, self._sealed = self._read()
            self._let_go_of_settled()
            self._check_files()
            self._journal = Journal(self._folder / "journal.jsonl", entries=self._entries())
        except BaseException:
            os.close(self._lock)
            raise

    def _locked(self) -> int:
        file = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise UsageError(
                f"expected a spool of this process alone, got {self._folder}: stop the other, or use another folder",
                kind=ErrorKind.PRODUCER_TAKEN,
            ) from None
        return file

    # -- what was --------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[dict[str, _Row], dict[str, dict[str, int]], int | None, bool]:
        rows: dict[str, _Row] = {}
        groups: dict[str, dict[str, int]] = {}
        floor, sealed = None, False
        for entry in read_journal(self._folder / "journal.jsonl"):
            name, row = entry.get("producer"), rows.get(entry.get("producer", ""))
            match entry["what"]:
                case "attached" if row is None:
                    rows[str(name)] = _Row(base=entry["first"], before=Totals(**entry["before"]))
                case "owned" if row is not None:
                    row.owner = entry["owner"]
                case "kept" if row is not None:
                    row.blocks[entry["sequence"]] = self._block(entry)
                case "left" if row is not None:
                    row.left.add(entry["sequence"])
                case "ended" if row is not None:
                    row.end = entry["end"]
                    for sequence in entry["withdrawn"]:
                        del row.blocks[sequence]
                case "joined":
                    groups.setdefault(entry["group"], {})
                case "acknowledged":
                    groups.setdefault(entry["group"], {})[str(name)] = entry["through"]
                case "retired":
                    floor = entry["below"] if floor is None else max(floor, entry["below"])
                case "sealed":
                    sealed = True
        return rows, groups, floor, sealed

    def _block(self, entry: Mapping[str, Any]) -> Block:
        return Block(
            producer=entry["producer"],
            sequence=entry["sequence"],
            keys=tuple(RecordKey(*key) for key in entry["keys"]),
            tokens=entry["tokens"],
            nbytes=entry["nbytes"],
            digest=int(entry["digest"], 16),
            weights_version=entry["weights_version"],
            payload=self._path(entry["producer"], entry["sequence"]),
        )

    def _path(self, producer: str, sequence: int) -> Path:
        # quoted, so that no name leaves the folder; the prefix, so that "." and ".." are names like others
        return self._folder / f"p-{quote(producer, safe='')}" / f"{sequence:012d}.arrows"

    def _settled(self, producer: str) -> int:
        """Every group is done with the producer's blocks below this number."""
        base = self._rows[producer].base
        settled = min((max(at.get(producer, base), base) for at in self._groups.values()), default=base)
        # a consumer may say that it has more than is here, from a service before this folder
        return min(settled, self._sent(producer))

    def _sent(self, producer: str) -> int:
        row = self._rows[producer]
        return max(row.blocks, default=row.base - 1) + 1

    def _let_go_of_settled(self) -> None:
        """Also of what was retired: a process may have been killed before it noted that they left."""
        for name, row in self._rows.items():
            settled = self._settled(name)
            row.left |= {at for at, block in row.blocks.items() if at < settled or not self._is_wanted(block)}

    def _is_wanted(self, block: Block) -> bool:
        return self._floor is None or block.weights_version is None or block.weights_version >= self._floor

    def _check_files(self) -> None:
        """Remove what the journal does not know; refuse a folder that lacks what it does know."""
        known = {b.payload for row in self._rows.values() for n, b in row.blocks.items() if n not in row.left}
        for path in self._folder.glob("p-*/*"):
            if path not in known:
                path.unlink()
        for path in sorted(known):
            if not path.exists():
                raise TruncatedError(
                    f"expected block {path}, got no file: the spool was changed by someone else",
                    kind=ErrorKind.TRUNCATED,
                )

    def recover(self) -> Recovered:
        """What the folder held when it was opened, for ``Ledger.restore``."""
        producers, places, blocks = {}, {}, []
        for name, row in self._rows.items():
            totals = row.before
            for sequence, block in sorted(row.blocks.items()):
                totals = totals.plus(block)
                if sequence not in row.left:
                    blocks.append(block)
                if self._is_wanted(block):
                    places.update({key: Place(name, sequence, block.weights_version) for key in block.keys})
            producers[name] = ProducerState(
                sent=self._sent(name), settled=self._settled(name), totals=totals, end=_end_of(row.end)
            )
        state = LedgerState(
            producers=producers, groups=self._groups, places=places, floor=self._floor, sealed=self._sealed
        )
        return Recovered(state=state, blocks=tuple(blocks))

    @property
    def owners(self) -> Mapping[str, str]:
        """Producer -> the name that whoever wrote for it last made up, where it made one up."""
        return {name: row.owner for name, row in self._rows.items() if row.owner is not None}

    # -- what is ---------------------------------------------------------------------------------------------------

    def _entries(self) -> list[dict[str, Any]]:
        """A journal that says what was read, and no more."""
        found: list[dict[str, Any]] = []
        for name, row in self._rows.items():
            found.append(_attached(name, first=row.base, before=row.before))
            if row.owner is not None:
                found.append(_owned(name, row.owner))
            for sequence, block in sorted(row.blocks.items()):
                found.append(_kept(block))
                if sequence in row.left:
                    found.append({"what": "left", "producer": name, "sequence": sequence})
            if row.end != "open":
                found.append({"what": "ended", "producer": name, "end": row.end, "withdrawn": []})
        for group, at in self._groups.items():
            found.append({"what": "joined", "group": group})
            found += [_acknowledged(group, producer=name, through=through) for name, through in at.items()]
        if self._floor is not None:
            found.append({"what": "retired", "below": self._floor})
        return [*found, {"what": "sealed"}] if self._sealed else found

    def keep(self, block: Block) -> Block:
        """See ``Store``."""
        path = self._path(block.producer, block.sequence)
        entry = _kept(block)
        try:
            path.parent.mkdir(exist_ok=True)
            self._journal.reserve(len(str(entry)) * 2)
            target = PublishedPath(path)
            try:
                target.file.write(self._to_bytes(block.payload))
                target.publish()
            except BaseException:
                target.discard()
                raise
        except OSError as error:
            raise no_room(path, error) from error
        try:
            self._journal.append(entry)
        except BaseException:
            path.unlink()
            raise
        return block if self._in_memory else replace(block, payload=path)

    def attached(self, producer: str, *, first: int, before: Totals, owner: str | None = None) -> None:
        """See ``Store``."""
        if producer not in self._rows:
            self._journal.append(_attached(producer, first=first, before=before))
            self._rows[producer] = _Row(base=first, before=before)
        row = self._rows[producer]
        if owner != row.owner:
            self._journal.append(_owned(producer, owner))
            row.owner = owner

    def joined(self, group: str) -> None:
        """See ``Store``."""
        if group not in self._groups:
            self._journal.append({"what": "joined", "group": group})
            self._groups[group] = {}

    def acknowledged(self, group: str, *, producer: str, through: int) -> None:
        """See ``Store``."""
        at = self._groups.setdefault(group, {})
        if through > at.get(producer, 0):
            self._journal.append(_acknowledged(group, producer=producer, through=through))
            at[producer] = through

    def ended(self, producer: str, *, end: str, withdrawn: Sequence[Block]) -> None:
        """See ``Store``."""
        row = self._rows.get(producer)
        if row is not None and row.end == "open":
            sequences = [block.sequence for block in withdrawn]
            self._journal.append({"what": "ended", "producer": producer, "end": end, "withdrawn": sequences})
            row.end = end
            self._remove(withdrawn)

    def sealed(self) -> None:
        """See ``Store``."""
        self._journal.append({"what": "sealed"})

    def retired(self, below: int) -> None:
        """See ``Store``."""
        self._journal.append({"what": "retired", "below": below})

    def left(self, blocks: Sequence[Block]) -> None:
        """See ``Store``."""
        for block in blocks:
            self._journal.append({"what": "left", "producer": block.producer, "sequence": block.sequence})
        self._remove(blocks)

    def _remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._path(block.producer, block.sequence).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder; what it holds stays. Again is no error."""
        self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _end_of(text: str) -> Any:
    if text not in ("open", "closed", "aborted"):
        raise FormatError(f"expected an end that is known, got {text!r}", kind=ErrorKind.CORRUPT_BATCH)
    return text


def _attached(producer: str, *, first: int, before: Totals) -> dict[str, Any]:
    return {"what": "attached", "producer": producer, "first": first, "before": asdict(before)}


def _owned(producer: str, owner: str | None) -> dict[str, Any]:
    return {"what": "owned", "producer": producer, "owner": owner}


def _acknowledged(group: str, *, producer: str, through: int) -> dict[str, Any]:
    return {"what": "acknowledged", "group": group, "producer": producer, "through": through}


def _kept(block: Block) -> dict[str, Any]:
    return {
        "what": "kept",
        "producer": block.producer,
        "sequence": block.sequence,
        "keys": [list(key) for key in block.keys],
        "tokens": block.tokens,
        "nbytes": block.nbytes,
        "digest": f"{block.digest:016x}",
        "weights_version": block.weights_version,
    }
