"""An S3-compatible object store on loopback: moto's server, one request after the other.

A program: ``python object_store.py`` prints its port. One request at a time, so that two conditional writes never meet
inside it: that only one of them wins is the store's promise, and S3's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["BUCKET", "options", "running_store"]

BUCKET = "archives"


def options(port: int) -> dict[str, Any]:
    """What ``open_archive`` needs to reach it."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
        "client_options": {"allow_http": True},
    }


@contextmanager
def running_store() -> Iterator[int]:
    """A store with an empty bucket, as its port; ends with the block."""
    command = [sys.executable, str(Path(__file__))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=30).close()
            yield port
        finally:
            process.kill()


def main() -> None:
    """Serve until killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
