"""Watermarks tell places apart, and watermarked records are what they say."""

from __future__ import annotations

import numpy as np
import pytest

from routeplane.record.spec import MISSING
from routeplane.testing.builders import (
    WATERMARK_EXPERTS,
    watermark,
    watermarked_columns,
    watermarked_record,
    watermarked_spec,
)


@pytest.mark.parametrize(
    ("samples", "tokens", "layers", "top_k"),
    [(7, 64, 64, 1), (64, 509, 4, 2), (8, 128, 61, 8)],
    ids=["one_slot", "many_tokens", "many_layers"],
)
def test_no_two_places_share_a_row(samples: int, tokens: int, layers: int, top_k: int) -> None:
    """Within the stated bounds every sample, token and layer has a legal row of its own."""
    sample_N = np.arange(samples)[:, None, None, None]
    token_N = np.arange(tokens)[:, None, None]
    rows_NK = watermark(sample_N, token_N, layer=np.arange(layers)[:, None], k=np.arange(top_k)).reshape(-1, top_k)
    words = rows_NK.astype(np.int64)[:, :2] @ np.asarray([1, WATERMARK_EXPERTS])[: min(top_k, 2)]
    ordered_NK = np.sort(rows_NK, axis=1)

    assert samples * tokens * layers == len(np.unique(words))
    assert (ordered_NK[:, 1:] != ordered_NK[:, :-1]).all()
    assert rows_NK.min() >= 0
    assert rows_NK.max() < WATERMARK_EXPERTS


def test_a_record_holds_its_watermarks() -> None:
    """Rows, tokens, spans and log-probabilities are those of the sample; the last token was not fed."""
    spec = watermarked_spec(layers=(3, 7), top_k=2)
    record = watermarked_record(5, num_tokens=6, prompt_tokens=4, spec=spec)

    assert watermark(5, 2, layer=7, k=np.arange(2)).tolist() == record.routes[2, 1].tolist()
    assert MISSING == record.routes[5].max()
    assert [5_001, 5_002, 5_003, 5_004, 5_005, 5_006] == record.token_ids.tolist()
    assert [("prompt", 0, 4), ("generation", 4, 6)] == [(span.kind, span.start, span.stop) for span in record.spans]
    assert record.logprobs is not None
    np.testing.assert_array_equal([np.nan] * 4 + [-6 - 4 / 1024, -6 - 5 / 1024], record.logprobs)


def test_columns_of_each_form_name_their_token() -> None:
    """Numbers, arrays over the routes' axes, lists and unknown entries go through a record and its cuts."""
    spec = watermarked_spec(layers=(3, 7), top_k=2)
    columns = watermarked_columns(5, num_tokens=6, spec=spec)
    record = watermarked_record(5, num_tokens=6, spec=spec, columns=columns)
    part = record.slice(1, 4)

    assert [5_002.0, 5_003.0, 5_004.0] == part.columns["scalar"].tolist()
    assert [None, 5_003, 5_004] == part.columns["nullable"].tolist()
    assert [[5_002], [5_003, 5_003], []] == part.columns["ragged"].tolist()
    assert record.routes[1:4].tolist() == part.columns["fixed"].tolist()


def test_missing_places_are_declared() -> None:
    """A lost token, a token lost in one layer, and the final token each have their state."""
    spec = watermarked_spec(layers=(3, 7), top_k=2)
    record = watermarked_record(0, num_tokens=5, spec=spec, missing=[0, (2, 7)])

    assert [("lost", 0, 1), ("captured", 1, 2), ("partial", 2, 3), ("captured", 3, 4), ("not_fed", 4, 5)] == [
        (capture.state, capture.start, capture.stop) for capture in record.captures
    ]


@pytest.mark.parametrize(("prompt", "kinds"), [(0, ["generation"]), (1, ["prompt"])], ids=["no_prompt", "no_answer"])
def test_one_token_is_enough(prompt: int, kinds: list[str]) -> None:
    """A record of one token, sampled or given, fed or not, can be made."""
    spec = watermarked_spec()
    for fed, state in ((False, "not_fed"), (True, "captured")):
        record = watermarked_record(0, num_tokens=1, prompt_tokens=prompt, spec=spec, last_token_fed=fed)

        assert kinds == [span.kind for span in record.spans]
        assert [state] == [capture.state for capture in record.captures]
