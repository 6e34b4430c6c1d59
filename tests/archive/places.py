"""The kinds of place that an archive lies in, and damage that is done to either: a local folder and an object store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from obstore.store import from_url

from routeplane.archive import open_archive, save_archive
from tests.archive.archives import SPEC

__all__ = ["Place"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an archive lies, with what reaches it."""

    where: str
    options: dict[str, Any] | None = None
    save: Any = field(init=False)
    open: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "save", partial(save_archive, store=self.where, spec=SPEC, options=self.options))
        object.__setattr__(self, "open", partial(open_archive, self.where, options=self.options))

    def names(self, pattern: str = "") -> list[str]:
        """Every file that holds ``pattern`` in its key, sorted."""
        return sorted(name for name in self._names() if pattern in name)

    def _names(self) -> Iterator[str]:
        if self.options is None:
            yield from (str(path.relative_to(self.where)) for path in Path(self.where).rglob("*") if path.is_file())
        else:
            yield from (item["path"] for batch in obstore.list(self._store()) for item in batch)

    def _store(self) -> Any:
        return from_url(self.where, **(self.options or {}))

    def get(self, name: str) -> bytes:
        """The bytes of a file."""
        if self.options is None:
            return (Path(self.where) / name).read_bytes()
        return bytes(obstore.get(self._store(), name).bytes())

    def put(self, name: str, data: bytes) -> None:
        """Overwrite a file."""
        if self.options is None:
            (Path(self.where) / name).write_bytes(data)
        else:
            obstore.put(self._store(), name, data)

    def lose(self, name: str) -> None:
        """Delete a file."""
        if self.options is None:
            (Path(self.where) / name).unlink()
        else:
            obstore.delete(self._store(), name)
