"""The forms in which a response may carry routes, told apart by how they begin, and read into rows of a spec.

Owns which form a value is in. The forms themselves are ``wire`` (vLLM), ``envelopes`` and ``inline``; SGLang's has no
mark of its own, so it is read only where the caller names it. Knows no response.

Axes: R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from routeplane.capture.envelopes import decode_lists, decode_nrlre1, decode_prime, decode_sglang
from routeplane.capture.inline import INLINE_PREFIX, decode_inline
from routeplane.capture.wire import LayerAxis, decode_npy, rows_from_axis
from routeplane.errors import DataError, ErrorKind, refused

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["WireForm", "form_of", "read_routes"]

#: vLLM's base64 ``.npy``, NeMo RL's envelope, our own inline form, prime-rl's object, nested lists, SGLang's base64.
WireForm = Literal["npy", "nrlre1", "inline", "prime", "lists", "sglang"]

# base64 of the first six bytes of every .npy file
_NPY_PREFIX = "k05VTVBZ"


def form_of(value: object) -> WireForm:
    """The form of a value, by its type or first characters. Raises DataError (ENCODING) for any other."""
    if isinstance(value, Mapping):
        return "prime"
    if isinstance(value, list):
        return "lists"
    if isinstance(value, str):
        prefixes: tuple[tuple[str, WireForm], ...] = (
            (INLINE_PREFIX, "inline"),
            ("nrlre1:", "nrlre1"),
            (_NPY_PREFIX, "npy"),
        )
        for prefix, form in prefixes:
            if value.startswith(prefix):
                return form
    raise DataError(
        f"expected routes as text of vLLM (.npy), nrlre1 or rp1, as an object or as nested lists, got "
        f"{type(value).__name__} {str(value)[:40]!r}",
        kind=ErrorKind.ENCODING,
    )


def read_routes(
    value: object,
    spec: RouteSpec,
    *,
    token_ids: NDArray[Any],
    form: WireForm | None = None,
    axis: LayerAxis = "decoder",
    first_row: int | None = None,
    filler: int | None = None,
    call: str | None = None,
) -> tuple[NDArray[np.int16], int]:
    """The rows behind a value, read-only int16 ``[R, L, K]``, and the token of the first one.

    ``token_ids``: all of the call; only the inline form is bound to them. ``form``: None looks at the value. ``axis``:
    what the sender's layer axis counts (the inline form says itself). ``first_row``: None takes what the form says, 0
    where it says nothing; a form that says otherwise is refused (ROW_COUNT). ``filler``: the token whose row, where it
    is the last that came, a harness made up: it is left out by its place, whatever it holds. The rows may share the
    decoded bytes.

    Raises DataError, SpecError or CaptureError as the form's own reader and ``wire.rows_from_axis``.
    """
    if form is not None and form not in get_args(WireForm):
        raise refused(f"form of {get_args(WireForm)}", repr(form))
    form = form_of(value) if form is None else form
    given: Any = value
    start: int | None = None
    if form == "inline":
        rows_RLK, start = decode_inline(given, spec, token_ids=token_ids)
    else:
        depth = spec.num_layers if axis == "captured" else spec.layer_ids[-1] + 1
        if form == "prime":
            array, start = decode_prime(given)
        elif form == "sglang":
            array = decode_sglang(given, layers=depth, top_k=spec.top_k)
        elif form == "lists":
            array = decode_lists(given)
            array = array if len(array) else array.reshape(0, depth, spec.top_k)
        else:
            array = decode_nrlre1(given) if form == "nrlre1" else decode_npy(given)
        begin = start or first_row or 0
        if filler is not None and len(array) and begin + len(array) == filler + 1:
            array = array[:-1]
        rows_RLK = rows_from_axis(array, spec, axis=axis, first_row=begin, call=call)
    if start is not None and first_row is not None and start != first_row:
        raise DataError(
            f"expected rows from token {first_row} on, got rows from {start}" + (f" @ call {call}" if call else ""),
            kind=ErrorKind.ROW_COUNT,
        )
    return rows_RLK, start or first_row or 0
