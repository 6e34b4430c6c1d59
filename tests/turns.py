"""Short hand-made calls whose rows name sample, token and layer; shared by the tests of assembling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.record.calls import ModelCall
from routeplane.testing.builders import watermark, watermarked_spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

SPEC = watermarked_spec(layers=(1, 4), top_k=2)


def watermarks(count: int, *, first: int = 0, sample: int = 0, spec: RouteSpec = SPEC) -> NDArray[np.int16]:
    """Fresh rows of tokens ``[first, first + count)`` on all layers of the spec."""
    token_S11 = np.arange(first, first + count)[:, None, None]
    return watermark(sample, token_S11, layer=np.asarray(spec.layer_ids)[:, None], k=np.arange(spec.top_k)).copy()


def turn(index: int, prompt: int, generated: int, **fields: Any) -> ModelCall:
    """Call ``call-<index>`` over tokens 0, 1, 2, ...; by default it brings the true rows of all tokens it fed."""
    total = prompt + generated
    made: dict[str, Any] = {
        "prompt_ids": np.arange(prompt),
        "generation_ids": np.arange(prompt, total),
        "weights_version": index,
        "call_id": f"call-{index}",
    }
    if "routes" not in fields:
        made["routes"] = watermarks(total - (1 if generated and fields.get("rows") != "all" else 0))
    return ModelCall(**{**made, **fields})
