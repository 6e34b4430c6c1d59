"""Audit a trainer's own batch: which routes are illegal, filler, of another token, of another layer or another sample.

Owns the verdicts and the files that a batch may stand in. A batch alone shows illegal rows and filler that cannot be a
legal route; the records that its routes came from show everything else. Knows layouts (``batch.layouts``) and records;
knows no trainer. torch is loaded for torch's files alone.

Axes: S tokens of a sequence, R rows of it, D layers as the stack counts them, L captured layers, K top-k slots.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from routeplane.batch.layouts import (
    OWN_LAYOUT,
    NativeSequence,
    StackLayout,
    captured_rows,
    copy_rows,
    filler_rows,
    layer_axis,
    layout_of,
    read_sequences,
    told_by_value,
)
from routeplane.errors import DataError, ErrorKind, FormatError, MissingExtraError, Problem, RouteplaneError, refused
from routeplane.record.counts import Counts, rule
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import find_problems
from routeplane.stream import open_stream

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord

__all__ = ["OWN_LAYOUT", "AuditReport", "audit_batch", "load_batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport(Counts):
    """What an audit saw: samples, tokens, rows that replay would force, and how many of them hold the layout's filler.

    ``uncompared``: samples without a record to compare with. ``problems``: every finding, with sample, token and layer.
    ``advice``: what would tell more, where values cannot.

    >>> AuditReport(samples=1, rows=8, filler_rows=2).filler_share
    0.25
    """

    SCOPE: ClassVar[str] = "audit_"
    samples: int = 0
    tokens: int = 0
    rows: int = 0
    filler_rows: int = 0
    uncompared: int = 0
    problems: tuple[Problem, ...] = field(default=(), metadata=rule(scalar="problems"))
    advice: tuple[str, ...] = field(default=(), metadata=rule(scalar=None))

    @property
    def filler_share(self) -> float:
        """Share of the rows that hold the filler of the layout."""
        return self.filler_rows / self.rows if self.rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "rows": self.rows,
            "filler_rows": self.filler_rows,
            "filler_share": self.filler_share,
            "uncompared": self.uncompared,
            "problems": [
                {"kind": str(each.kind), "sample": each.sample, "token": each.token, "layer": each.layer}
                | {"message": each.message}
                for each in self.problems
            ],
            "advice": list(self.advice),
        }


def audit_batch(
    batch: Any,
    spec: RouteSpec,
    *,
    layout: str | StackLayout,
    decoder_layers: int | None = None,
    captured: Any = None,
    against: Iterable[RouteRecord] = (),
) -> AuditReport:
    """Audit the routes of a batch in the layout of a stack.

    ``batch``, ``layout``, ``decoder_layers``, ``captured``: as in ``from_layout``. ``against``: the records that the
    routes came from; those of the batch's sample ids are compared token by token. Without them a legal row of another
    token, layer or sample cannot be told from a right one; without ``captured``, neither can filler that is a legal
    route, whose share the report states.

    Returns a report with every finding: DUPLICATE_ID and the like for an illegal row, ROUTES_MISSING for rows that are
    filler where a token was fed, DENSE_SLOT and UNCAPTURED_SLOT for a shifted layer axis, and against records
    TOKEN_MISMATCH, LAYERS or CHECKSUM. Raises UsageError for another container, DataError for another axis.

    >>> import numpy as np
    >>> from routeplane import RouteSpec
    >>> from routeplane.inspect import audit_batch
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> rows = np.array([[[3, 5]], [[0, 0]], [[1, 2]]])
    >>> sample = {"tokens": [5, 6, 7, 8], "loss_mask": [1, 1], "routed_experts": rows, "index": "s-0"}
    >>> print(audit_batch([sample], spec, layout="vllm").problems[0])
    expected rows of routes, got the filler in 1 of 3 @ sample s-0, token 1
    """
    kind = layout_of(layout)
    sequences = read_sequences(batch, kind)
    slots = layer_axis(sequences, spec, kind=kind, decoder_layers=decoder_layers)
    counts = captured_rows(sequences, kind, slots=slots, captured=captured)
    records = {record.sample_id: record for record in against}
    found = AuditReport()
    for each, count in zip(sequences, counts.tolist(), strict=True):
        found = found.merge(_audit(each, spec, kind, slots=slots, count=count, records=records))
    advice = []
    if found.filler_rows and not told_by_value(spec, kind) and captured is None:
        advice.append(
            f"{found.filler_share:.2%} of the rows hold {kind.filler}, which is a legal route too: give captured "
            "lengths to tell filler from routes"
        )
    if not records:
        advice.append("without records to compare with, legal rows of another token, layer or sample cannot be told")
    return replace(found, advice=tuple(advice))


def _audit(
    each: NativeSequence,
    spec: RouteSpec,
    kind: StackLayout,
    *,
    slots: slice | list[int],
    count: int,
    records: dict[str, RouteRecord],
) -> AuditReport:
    fed = min(each.fed, len(each.rows))
    try:
        rows_RLK = np.empty((max(count, fed), *spec.row_shape), dtype=np.int16)
        copy_rows(each.rows[: len(rows_RLK)], slots, out=rows_RLK)
    except DataError as error:
        problem = Problem(kind=error.kind, message=error.message, sample=each.name)
        return AuditReport(samples=1, tokens=len(each.token_ids), problems=(problem,))
    filler_R = filler_rows(rows_RLK, kind.filler)
    absent_R = np.arange(len(rows_RLK)) >= count
    if told_by_value(spec, kind):
        absent_R = absent_R | filler_R
    zeros_R = filler_rows(rows_RLK, "zeros")
    if spec.top_k > 1:  # zeros are never a route then, whatever a layout's own filler is
        absent_R = absent_R | zeros_R
    problems = _filler_problems(absent_R[:fed], each.name, given=count < fed)
    problems += _axis_problems(each, rows_RLK, absent_R, spec, kind)
    if not problems or problems[0].kind == ErrorKind.ROUTES_MISSING:
        legal_RLK = np.where(absent_R[:, None, None], np.int16(MISSING), rows_RLK)
        problems += find_problems(legal_RLK, spec, sample=each.name)
    record = records.get(each.name)
    if record is not None:
        problems += _differences(each, rows_RLK, absent_R, record, records, spec, blank_R=filler_R | zeros_R)
    return AuditReport(
        samples=1,
        tokens=len(each.token_ids),
        rows=len(rows_RLK),
        filler_rows=int(filler_R.sum()),
        uncompared=int(bool(records) and record is None),
        problems=tuple(problems),
    )


def _filler_problems(absent_R: NDArray[np.bool_], name: str, *, given: bool) -> list[Problem]:
    """One finding for each run of filler where tokens were fed."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], absent_R, [False]]).astype(np.int8)))
    why = " by the captured lengths" if given else ""
    return [
        Problem(
            kind=ErrorKind.ROUTES_MISSING,
            message=f"expected rows of routes, got the filler{why} in {stop - start} of {len(absent_R)}",
            sample=name,
            token=int(start),
        )
        for start, stop in edges.reshape(-1, 2).tolist()
    ]


def _axis_problems(
    each: NativeSequence, rows_RLK: NDArray[np.int16], absent_R: NDArray[np.bool_], spec: RouteSpec, kind: StackLayout
) -> list[Problem]:
    """Dense layers that hold routes, and routed layers that hold none: the axis is shifted."""
    there = np.flatnonzero(~absent_R)
    if kind.axis != "decoder" or len(there) == 0:
        return []
    found = []
    pattern = np.arange(spec.top_k) if kind.filler == "arange" else 0
    for layer in sorted(set(range(each.rows.shape[1])) - set(spec.layer_ids)):
        odd = np.flatnonzero((each.rows[there, layer] != pattern).any(axis=1))
        if len(odd):
            message = "expected a dense layer without routes, got ids"
            token = int(there[odd[0]])
            found.append(
                Problem(kind=ErrorKind.DENSE_SLOT, message=message, sample=each.name, token=token, layer=layer)
            )
    if spec.top_k > 1 and kind.filler == "zeros":
        empty_L = (rows_RLK[there] == 0).all(axis=(0, 2))
        found += [
            Problem(
                kind=ErrorKind.UNCAPTURED_SLOT,
                message="expected routes of a routed layer, got zeros in every row",
                sample=each.name,
                token=int(there[0]),
                layer=spec.layer_ids[slot],
            )
            for slot in np.flatnonzero(empty_L).tolist()
        ]
    return found


def _differences(
    each: NativeSequence,
    rows_RLK: NDArray[np.int16],
    absent_R: NDArray[np.bool_],
    record: RouteRecord,
    records: dict[str, RouteRecord],
    spec: RouteSpec,
    *,
    blank_R: NDArray[np.bool_],
) -> list[Problem]:
    """Where the rows are not those of the record: of another token, layer or sample, where these say so."""
    shared = min(len(each.token_ids), record.num_tokens)
    apart = np.flatnonzero(each.token_ids[:shared] != record.token_ids[:shared])
    if len(apart):
        message = f"expected the tokens of record {record.key}, got others"
        return [Problem(kind=ErrorKind.TOKEN_MISMATCH, message=message, sample=each.name, token=int(apart[0]))]
    ours_RLK = record.select(spec.layer_ids).routes if record.spec != spec else record.routes
    size = min(len(rows_RLK), len(ours_RLK))
    compared_R = ~absent_R[:size] & (ours_RLK[:size, :, 0] != MISSING).all(axis=1)
    wrong_RL = (rows_RLK[:size] != ours_RLK[:size]).any(axis=2) & compared_R[:, None]
    if not wrong_RL.any():
        return []
    token = int(np.flatnonzero(wrong_RL.any(axis=1))[0])
    other = _of_other_sample(rows_RLK, wrong_RL, each.name, records, spec)
    if other is not None:
        message = f"expected routes of record {record.key}, got those of sample {other}"
        return [Problem(kind=ErrorKind.TOKEN_MISMATCH, message=message, sample=each.name, token=token)]
    step = _of_other_token(rows_RLK[:size], ours_RLK, wrong_RL)
    if step is not None:
        message = f"expected the row of this token, got that of token {token + step}, and so from here on"
        return [Problem(kind=ErrorKind.TOKEN_MISMATCH, message=message, sample=each.name, token=token)]
    wrong_R = wrong_RL.any(axis=1)
    if blank_R[:size][wrong_R].all():
        message = f"expected routes of record {record.key}, got filler or zeros in {int(wrong_R.sum())} rows"
        return [Problem(kind=ErrorKind.ROUTES_MISSING, message=message, sample=each.name, token=token)]
    return [
        _of_other_layer(rows_RLK[:size], ours_RLK, wrong_RL[:, slot], slot, spec, each.name)
        for slot in np.flatnonzero(wrong_RL.any(axis=0)).tolist()
    ]


def _of_other_sample(
    rows_RLK: NDArray[np.int16],
    wrong_RL: NDArray[np.bool_],
    name: str,
    records: dict[str, RouteRecord],
    spec: RouteSpec,
) -> str | None:
    """The sample whose routes these are, if all wrong rows are its own."""
    wrong = np.flatnonzero(wrong_RL.any(axis=1))
    for other, record in records.items():
        theirs = record.routes if record.spec == spec else record.select(spec.layer_ids).routes
        inside = wrong[wrong < len(theirs)]
        # rows behind the end of the shorter one are filler of it
        if other != name and len(inside) > 1 and np.array_equal(rows_RLK[inside], theirs[inside]):
            return other
    return None


def _of_other_token(
    rows_RLK: NDArray[np.int16], ours_RLK: NDArray[np.int16], wrong_RL: NDArray[np.bool_]
) -> int | None:
    """-1 or 1 where every wrong row is its neighbour's."""
    wrong = np.flatnonzero(wrong_RL.any(axis=1))
    for step in (-1, 1):
        theirs = wrong + step
        inside = (theirs >= 0) & (theirs < len(ours_RLK))
        if inside.sum() > 1 and np.array_equal(rows_RLK[wrong[inside]], ours_RLK[theirs[inside]]):
            return step
    return None


def _of_other_layer(
    rows_RLK: NDArray[np.int16],
    ours_RLK: NDArray[np.int16],
    wrong_R: NDArray[np.bool_],
    slot: int,
    spec: RouteSpec,
    name: str,
) -> Problem:
    wrong = np.flatnonzero(wrong_R)
    token, layer = int(wrong[0]), spec.layer_ids[slot]
    for theirs in range(spec.num_layers):
        if theirs != slot and np.array_equal(rows_RLK[wrong, slot], ours_RLK[wrong, theirs]):
            message = f"expected routes of this layer, got those of layer {spec.layer_ids[theirs]}"
            return Problem(kind=ErrorKind.LAYERS, message=message, sample=name, token=token, layer=layer)
    message = f"expected the record's ids, got others in {len(wrong)} rows of this layer"
    return Problem(kind=ErrorKind.CHECKSUM, message=message, sample=name, token=token, layer=layer)


# ---- files -----------------------------------------------------------------------------------------------------------


def load_batch(path: str | os.PathLike[str]) -> Any:
    """Read a batch from a file: torch (``.pt``, ``.pth``), ``.npz``, ``.parquet`` (one sample a row), or our stream.

    torch's files are read as data alone: tensors, arrays and plain containers; slime's debug dump is the list of its
    samples. Returns the container for ``audit_batch``; of our stream, for ``layout=OWN_LAYOUT``. Raises UsageError for
    another suffix, FormatError (CORRUPT_BATCH) for a damaged file, MissingExtraError where torch is needed and not
    installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(folder + "/batch.npz", routed_experts=np.zeros((1, 2, 3, 2), np.int16))
    ...     load_batch(folder + "/batch.npz")["routed_experts"].shape
    (1, 2, 3, 2)
    """
    file = Path(path)
    if file.suffix in (".arrows", ".arrow"):
        with open_stream(str(file)) as reader:
            return own_samples(reader)
    loaders = {".pt": _load_torch, ".pth": _load_torch, ".npz": _load_numpy, ".parquet": _load_parquet}
    if file.suffix not in loaders:
        raise refused("a batch as .pt, .pth, .npz, .parquet or .arrows", f"{file.name}")
    file.open("rb").close()  # the system's own error for a missing or unreadable file
    try:
        return loaders[file.suffix](file)
    except RouteplaneError:
        raise
    except _DAMAGED as error:
        raise FormatError(
            f"expected a whole {file.suffix} file, got {type(error).__name__}: {error} @ {file}",
            kind=ErrorKind.CORRUPT_BATCH,
        ) from error


#: What readers of other libraries make of damaged files.
_DAMAGED = (
    pa.ArrowException,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def _load_numpy(file: Path) -> Any:
    with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _load_parquet(file: Path) -> Any:
    return pq.read_table(file).to_pylist()


def own_samples(records: Iterable[RouteRecord]) -> Sequence[dict[str, Any]]:
    """Records as a batch of OWN_LAYOUT."""
    found = []
    for record in records:
        mask = np.zeros(record.num_tokens, dtype=np.bool_)
        for span in record.spans:
            mask[span.start : span.stop] = span.kind == "generation"
        sample = {"sample_id": record.sample_id, "tokens": record.token_ids, "loss_mask": mask}
        found.append({**sample, "routed_experts": record.routes})
    return found


def _load_torch(file: Path) -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "reading a batch of torch needs torch: install the extra routeplane[torch]", kind=ErrorKind.MISSING_EXTRA
        ) from error
    # what a pickled numpy array names, and nothing that runs
    array = np.empty(0)
    plain: list[Any] = [
        array.__reduce__()[0],
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in "bBhHiIlLqQfd?"},
    ]
    with torch.serialization.safe_globals(plain):
        found = torch.load(file, map_location="cpu", weights_only=True)
    return found["samples"] if isinstance(found, dict) and "samples" in found else found
