"""What was tried on every decoder and carrier, and what held: ``python -m tests.trust``, the table of ``make trust``.

A row per decoder: inputs tried, how many were the same, refused, silent (other content), untyped (an error that is
none of ours), hung (more than a second of processor time), and the worst memory beyond twice the input. Decoders run
in a process of their own: an abort is a finding, not the end. Exits with 1 where a bar does not hold.

Arguments: ``--inputs`` of control data and as many of payloads; ``--only`` a part of a row's name; ``--capture`` the
campaign on answers of servers too.
"""

# ruff: noqa: T201  it prints a table
from __future__ import annotations

import argparse
import sys
import warnings

from tests.trust.measure import BOUNDS, Row, measured

INPUTS = 10_000


def main() -> int:
    """Print the table; 1 where a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capture", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"bounds of each input: {BOUNDS}")
    print(Row.HEAD)
    rows = []
    for row in measured(options.inputs, only=options.only, seed=options.seed):
        print(row, flush=True)
        rows.append(row)
    held = all(row.holds for row in rows)
    for kind in ("payload", "control"):
        found = [row for row in rows if row.kind == kind]
        tried, silent, untyped = (sum(getattr(row, name) for row in found) for name in ("tried", "silent", "untyped"))
        print(f"{kind}: {tried} inputs, {silent} silent, {untyped} untyped")
    for row in rows:
        for finding in row.findings:
            print(f"{row.name}: {finding}", file=sys.stderr)
    if options.capture:
        from tests.capture.trust import campaign

        outcomes = campaign(scale=min(1.0, options.inputs / INPUTS))
        print("name | tried | held | bar")
        print("\n".join(map(str, outcomes)))
        held = held and all(row.holds for row in outcomes)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
