"""What deltas cost: a rollout stored after each of its turns has hardly more bytes than stored once."""

from __future__ import annotations

from benchmarks.bench_format import TOKENS, TURNS, shares


def test_thirty_turns_to_32k_tokens() -> None:
    """Tokens, columns and rows stand once; what repeats is the row of each turn's last token, spans and captures."""
    assert (30, 32_768) == (TURNS, TOKENS)
    routes, everything = shares()
    assert 1.0 < routes <= 1.02
    assert 1.0 < everything <= 1.1
