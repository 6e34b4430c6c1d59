"""Places of both kinds for every test that asks for one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.archive.object_store import BUCKET, options, running_store
from tests.archive.places import Place


@pytest.fixture(scope="session")
def object_store() -> Iterator[int]:
    """The port of an object store that lives as long as the tests."""
    with running_store() as port:
        yield port


@pytest.fixture(params=["local file system", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A new, empty place."""
    if request.param == "local file system":
        return Place(where=str(tmp_path / "archive"))
    port = request.getfixturevalue("object_store")
    return Place(where=f"s3://{BUCKET}/{uuid.uuid4().hex}", options=options(port))
