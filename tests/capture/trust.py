"""The capture campaign: what was tried on the readers, and what held: ``python -m tests.capture.trust``.

Prints one row a line, ``name | tried | held | bar``, and exits with 1 where a bar does not hold. ``--scale 0.1`` runs a
tenth of the mutated bodies.
"""

# ruff: noqa: T201  it prints a table
from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from routeplane.capture.wire import encode
from routeplane.errors import RouteplaneError
from tests.capture import top_1
from tests.capture.payloads import SPEC, engine_rows
from tests.capture.reading import chunk_calls, gym_calls, payload_rows, response_calls, sglang_call
from tests.capture.test_servers import ANSWERS, CHOICE, GENERATED, PROMPT, READERS, cases_of, outcome, sglang_text
from tests.trust.edits import mutate

__all__ = ["Row", "campaign"]

#: What the issue asks for.
MUTATED_JSON, MUTATED_TEXTS = 15_000, 12_500
#: models of each family and number of experts
TOP_1_SEEDS = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    tried: int
    held: int
    bar: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.name} | {self.tried} | {self.held} | {self.bar}{'' if self.holds else ' | MISSED'}"


# ----------------------------------------------------------------------------------------------------------------------
# Mutations
# ----------------------------------------------------------------------------------------------------------------------


def mutated_json(count: int, *, seed: int = 0) -> tuple[int, list[str]]:
    """Read mutated answers of every server; how many raised no untyped error, and those that did."""
    rng = random.Random(seed)
    info = {"id": "r", "finish_reason": {"type": "stop"}, "routed_experts": sglang_text(), "weight_version": "3"}
    item = {"prompt_token_ids": PROMPT, "generation_token_ids": GENERATED, "routed_experts": engine_rows(5).tolist()}
    chunk = {
        "id": "c",
        "choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": encode(engine_rows(4), form="npy")}],
    }
    readers: list[Any] = [
        *(
            (answer, lambda given: response_calls(given, SPEC, weights_version=1, prompt_ids=PROMPT))
            for answer in ANSWERS.values()
        ),
        (
            {"output_ids": GENERATED, "meta_info": info},
            lambda given: sglang_call(given, SPEC, weights_version=None, prompt_ids=PROMPT),
        ),
        ({"output": [item]}, lambda given: gym_calls(given, SPEC, weights_version=1)),
        (
            [chunk, chunk],
            lambda given: chunk_calls(
                given if isinstance(given, list) else [given], SPEC, weights_version=1, prompt_ids=PROMPT
            ),
        ),
    ]
    held, broken = 0, list[str]()
    for index in range(count):
        document, read = readers[index % len(readers)]
        given = mutate(document, rng)
        held += _typed(lambda given=given, read=read: read(given), given, broken)
    return held, broken


def mutated_texts(count: int, *, seed: int = 0) -> tuple[int, list[str]]:
    """Read mutated payloads of every form with text."""
    rng = random.Random(seed)
    rows = engine_rows(6)
    texts: list[Any] = [
        (encode(rows, form="npy"), None),
        (encode(rows, form="nrlre1"), None),
        (sglang_text(rows), "sglang"),
        (json.dumps(encode(rows, form="pair")), "pair"),
        (json.dumps(encode(rows, form="base85")), "base85"),
        (json.dumps(encode(rows, form="prime")), "prime"),
    ]
    alphabet = 'A1x:+/=9 \n\0é{}[],"'
    held, broken = 0, list[str]()
    for index in range(count):
        text, form = texts[index % len(texts)]
        start = rng.randrange(len(text) + 1)
        edited = text[:start] + "".join(rng.choices(alphabet, k=rng.randrange(6))) + text[start + rng.randrange(6) :]
        held += _typed(
            lambda edited=edited, form=form: payload_rows(_parsed(edited, form), SPEC, form=form), edited, broken
        )
    return held, broken


def _parsed(text: str, form: str | None) -> Any:
    """What a body's parser makes of text that stands for an object."""
    if form not in ("pair", "base85", "prime"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _typed(read: Any, given: object, broken: list[str]) -> bool:
    try:
        read()
    except RouteplaneError:
        return True
    except Exception as error:  # noqa: BLE001  what the campaign looks for
        broken.append(f"{type(error).__name__}: {error} <- {str(given)[:200]}")
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------------------------------------


def geometry() -> Row:
    """Architectures of the installed Transformers with experts: right or refused with the reason."""
    from tests.record import test_geometry_counted as geometries

    wrong = 0
    for model_type in geometries.TYPES:
        try:
            geometries.test_every_architecture_is_right_or_refused_with_the_reason(model_type)
        except AssertionError:
            wrong += 1
    tried = len(geometries.TYPES)
    return Row(
        name="geometry of Transformers' models", tried=tried, held=tried - wrong, bar="0 wrong", holds=wrong == 0
    )


def campaign(*, scale: float) -> list[Row]:
    """Every row."""
    matrix = [outcome(name, *case) for name in READERS for case in cases_of(name)]
    silent = matrix.count("silent")
    rows = [
        Row(
            name="rows of other tokens", tried=len(matrix), held=len(matrix) - silent, bar="0 silent", holds=silent == 0
        )
    ]
    for name, count, run in (
        ("mutated JSON bodies", MUTATED_JSON, mutated_json),
        ("mutated payload texts", MUTATED_TEXTS, mutated_texts),
    ):
        tried = int(count * scale)
        held, broken = run(tried)
        print("\n".join(broken[:5]), file=sys.stderr, end="\n" if broken else "")
        rows.append(Row(name=name, tried=tried, held=held, bar="no untyped error", holds=held == tried))
    alarms = top_1.measure(seeds=max(1, int(TOP_1_SEEDS * scale)))
    looks, false = alarms["looks"].total(), alarms["false alarms"].total()
    print("\n".join(top_1.table(alarms)))
    bar = "<= 0.1% false alarms"
    rows.append(Row(name="honest top-1 layers", tried=looks, held=looks - false, bar=bar, holds=false <= looks / 1000))
    rows.append(geometry())
    return rows


def main() -> int:
    """Print the table; 1 where a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    scale = parser.parse_args().scale
    warnings.simplefilter("ignore")
    rows = campaign(scale=scale)
    print("name | tried | held | bar")
    print("\n".join(map(str, rows)))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
