"""NeMo Gym's servers, started by its own helper; a script for the Python of Gym's environment, which may be another.

Reads one line of JSON from stdin, Gym's configuration. Writes one line of JSON to stdout once all servers answer, their
URLs by name; whatever Gym and its servers print goes to stderr. Ends them when stdin does, so that servers never
outlive the process that started this. Imports nothing of routeplane, which need not be installed there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

import ray
from nemo_gym.cli.env import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict
from omegaconf import DictConfig

__all__ = ["main"]

#: How often servers are looked at: one that ended ends all.
_POLL_SECONDS = 2.0


def main() -> None:
    """Start, say where, wait for the end of stdin, stop."""
    config: dict[str, Any] = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    address = config.get("ray_head_node_address")
    # Gym would join whatever cluster it finds, and its servers join the one that is named here
    ray.init(address=address or "local", **({} if address else {"include_dashboard": False}))
    config["ray_head_node_address"] = address or ray.get_runtime_context().gcs_address
    config.setdefault("head_server", {"host": "127.0.0.1", "port": _free_port()})
    helper = RunHelper()
    try:
        helper.start(
            GlobalConfigDictParserConfig(
                initial_global_config_dict=DictConfig(config), skip_load_from_cli=True, skip_load_from_dotenv=True
            )
        )
        answers.write(json.dumps(_urls()) + "\n")
        answers.flush()
        _watch(helper)
    finally:
        helper.shutdown()
        ray.shutdown()


def _watch(helper: Any) -> None:
    """Until stdin ends. Raises RuntimeError where a server ended before."""
    ended = threading.Event()

    def read() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    while not ended.wait(_POLL_SECONDS):
        helper.poll()


def _urls() -> dict[str, str]:
    """The servers of the configuration as Gym completed it: hosts and ports are chosen there."""
    found = {}
    for name, kinds in get_global_config_dict().items():
        if not isinstance(kinds, DictConfig):
            continue
        for servers in kinds.values():
            for server in servers.values() if isinstance(servers, DictConfig) else ():
                if isinstance(server, DictConfig) and "entrypoint" in server:
                    found[str(name)] = f"http://{server.host}:{server.port}"
    return found


def _free_port() -> int:
    """A port for the head server, which cannot be handed a socket: another process may take it in between."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
