"""Coverage-guided inputs for the decoders of ``tests.trust``: ``python -m tests.trust.fuzz --minutes 1``.

Needs atheris. One process fuzzes all decoders: the first byte of an input names the decoder, the second its good input.
The corpus begins with the good inputs, and what adds coverage stays in ``--corpus``. Anything but the same content or
an error of ours ends the run with the input in a file; such an input becomes a case of ``test_campaign``.
"""

# ruff: noqa: T201  it tells what it runs
from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path

import atheris

from routeplane.errors import RouteplaneError

with atheris.instrument_imports(include=["routeplane.record", "routeplane.stream", "routeplane.archive"]):
    from tests.trust.decoders import CONTROL, PAYLOAD, Home, Input
    from tests.trust.measure import as_written

#: Servers answer in threads of their own, which coverage does not follow.
_LEFT_OUT = ("stream over TCP", "Flight: requests", "Flight: answers")


def targets(home: Path, stack: ExitStack) -> list[list[Input]]:
    """The good inputs of every decoder."""
    found = []
    for index, (name, (decoder, _)) in enumerate({**PAYLOAD, **CONTROL}.items()):
        if name not in _LEFT_OUT:
            folder = home / str(index)
            folder.mkdir()
            found.append(list(decoder(Home(folder, stack))))
    return found


def main() -> None:
    """Fuzz for some minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--corpus", type=Path, required=True)
    options = parser.parse_args()
    options.corpus.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="routeplane-fuzz-") as home, ExitStack() as stack:
        found = targets(Path(home), stack)
        for decoder, inputs in enumerate(found):
            for index, given in enumerate(inputs):
                (options.corpus / f"good-{decoder}-{index}").write_bytes(bytes([decoder, index]) + as_written(given))

        def one(data: bytes) -> None:
            if len(data) < 2:
                return
            inputs = found[data[0] % len(found)]
            given = inputs[data[1] % len(inputs)]
            try:
                same = given.read(data[2:])
            except (RouteplaneError, FileNotFoundError):
                return
            if not same:
                raise AssertionError("other content, in silence")

        print(f"fuzzing {len(found)} decoders for {options.minutes:g} minutes", flush=True)
        seconds = max(1, int(60 * options.minutes))
        limits = [f"-max_total_time={seconds}", "-max_len=65536", "-timeout=20", "-rss_limit_mb=4096"]
        atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={options.corpus}/found-", str(options.corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
