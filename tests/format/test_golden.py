"""The golden streams of format 1.0 and 1.1: what they hold is what ``expected.json`` says, in every later version.

Run as a script (``python tests/format/test_golden.py``) it makes the files again; that is for a new file or a new
version of the format, never for a test that fails.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest

from routeplane.errors import UsageError
from routeplane.record.aligned import AlignedColumn
from routeplane.record.prefixes import as_delta
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.schema import FORMAT_VERSION, FORMATS
from routeplane.record.spans import Capture, CaptureState, Sampling, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import WeightsMeaning
from routeplane.stream import new_stream, open_stream
from routeplane.stream.ipc import IpcReader
from tests.format import reference
from tests.format.documents import SCHEMAS, dump, load, record_json, spec_json, spec_of

GOLDENS = {"1.0": SCHEMAS / "golden", "1.1": SCHEMAS / "golden-1.1"}

# ----------------------------------------------------------------------------------------------------------------------
# What the files hold
# ----------------------------------------------------------------------------------------------------------------------

#: A wide stride for the ids of a row, prime to every width below.
STRIDE = 11
#: What ``weights_of`` makes.
PROBABILITIES = WeightsMeaning(score="softmax", renormalised=False, scaling="none", multiplied="after", dtype="float32")


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One golden stream. ``max_bytes=1`` makes a batch of every record."""

    name: str
    spec: RouteSpec
    records: tuple[RouteRecord, ...]
    encoding: Literal["plain", "narrow"]
    max_bytes: int = 2**20


def rows(spec: RouteSpec, tokens: int, *, sample: int, missing: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
    """Rows ``[tokens, L, K]`` that differ by sample, token and layer; ``missing`` tokens have none."""
    routes_SLK = np.empty((tokens, *spec.row_shape), dtype=np.int16)
    for slot, (layer, width) in enumerate(zip(spec.layer_ids, spec.experts_per_layer, strict=True)):
        for token in range(tokens):
            first = 101 * sample + 7 * token + 3 * layer
            routes_SLK[token, slot] = [(first + STRIDE * k) % width for k in range(spec.top_k)]
    routes_SLK[list(missing)] = MISSING
    return routes_SLK


def one_call(spec: RouteSpec, tokens: int, *, sample: int, prompt: int = 2, **changes: Any) -> RouteRecord:
    """A record of one call, its last token not fed."""
    content: dict[str, Any] = {
        "sample_id": f"sample-{sample}",
        "token_ids": [1_000 * sample + token for token in range(tokens)],
        "routes": rows(spec, tokens, sample=sample, missing=(tokens - 1,)),
        "spans": (
            Span(start=0, stop=prompt, kind="prompt", role="user", call="c0", weights_version=None),
            Span(start=prompt, stop=tokens, kind="generation", role="assistant", call="c0", weights_version=7),
        ),
        "captures": (
            Capture(start=0, stop=tokens - 1, call="c0", weights_version=7, state="captured"),
            Capture(start=tokens - 1, stop=tokens, call="c0", weights_version=None, state="not_fed"),
        ),
        "spec": spec,
    }
    return RouteRecord(**{**content, **changes})


def two_turns(spec: RouteSpec) -> RouteRecord:
    """Two calls under two policies, with everything that may be null present."""
    return one_call(
        spec,
        9,
        sample=0,
        group="prompt-0",
        attempt=1,
        spans=(
            Span(start=0, stop=3, kind="prompt", role="user", call="c0", weights_version=None),
            Span(start=3, stop=5, kind="generation", role="assistant", call="c0", weights_version=7),
            Span(start=5, stop=7, kind="prompt", role="tool", call="c1", weights_version=None),
            Span(start=7, stop=9, kind="generation", role=None, call="c1", weights_version=-1),
        ),
        captures=(
            Capture(start=0, stop=4, call="c0", weights_version=7, state="captured"),
            Capture(start=4, stop=8, call="c1", weights_version=2**40, state="captured"),
            Capture(start=8, stop=9, call="c1", weights_version=None, state="not_fed"),
        ),
        logprobs=np.asarray([np.nan] * 3 + [-0.5, -1.25] + [np.nan] * 2 + [-0.0, -30.0], dtype=np.float32),
        attributes={"logprobs_mode": "raw", "engine": "none", "übung": "é", "empty": "", "media": '["sha256:00"]'},
    )


def every_state(spec: RouteSpec) -> RouteRecord:
    """One token in each capture state."""
    routes_SLK = rows(spec, 7, sample=1, missing=(3, 4, 5, 6))
    routes_SLK[2, 1] = MISSING
    states: list[CaptureState] = ["captured", "cached", "partial", "aborted", "lost", "not_captured", "not_fed"]
    captures = tuple(
        Capture(
            start=token,
            stop=token + 1,
            call="c0",
            weights_version=7 if state in ("captured", "partial") else None,
            state=state,
        )
        for token, state in enumerate(states)
    )
    return one_call(spec, 7, sample=1, routes=routes_SLK, captures=captures)


def shared_prompt(spec: RouteSpec) -> tuple[RouteRecord, RouteRecord]:
    """A record, and another one of its group whose first three rows stand in it."""
    holder = one_call(spec, 5, sample=2, prompt=3, group="prompt-2")
    prefix = Prefix(sample_id=holder.sample_id, stop=3, checksum=holder.checksum)
    delta = one_call(
        spec,
        6,
        sample=3,
        prompt=3,
        group="prompt-2",
        token_ids=[2000, 2001, 2002, 3003, 3004, 3005],
        routes=rows(spec, 6, sample=3, missing=(5,))[3:],
        routes_start=3,
        prefix=prefix,
    )
    return holder, delta


def smallest(spec: RouteSpec) -> RouteRecord:
    """One token that was sampled and never fed; everything that may be null is."""
    return RouteRecord(
        sample_id="s",
        attempt=2**31 - 1,
        segment=3,
        token_ids=np.asarray([2**31 - 1]),
        routes=spec.missing_rows(1),
        spans=(Span(start=0, stop=1, kind="generation", call="", weights_version=None),),
        captures=(Capture(start=0, stop=1, call="", weights_version=None, state="not_fed"),),
        spec=spec,
    )


def id_255_and_missing(spec: RouteSpec) -> RouteRecord:
    """Expert 255 in either slot, alone with its neighbour, and rows that are MISSING: what one byte must tell apart."""
    captures = (
        Capture(start=0, stop=1, call="c0", weights_version=7, state="captured"),
        Capture(start=1, stop=2, call="c0", weights_version=7, state="partial"),
        Capture(start=2, stop=3, call="c0", weights_version=None, state="not_fed"),
    )
    routes = [[[255, 0], [254, 255]], [[-1, -1], [7, 255]], [[-1, -1], [-1, -1]]]
    return one_call(spec, 3, sample=0, routes=routes, captures=captures)


def token_columns(tokens: int) -> dict[str, np.ndarray[Any, Any]]:
    """A token column of every type, named so that no order but that of the code points is right."""
    step = np.arange(tokens)
    floats = np.where(step == 1, np.nan, step / 4 - 0.5)
    return {
        "Z_bool": step % 2 == 0,
        "a_int8": (step - 2).astype(np.int8),
        "a_uint8": (255 - step).astype(np.uint8),
        "b_int16": (step - 300).astype(np.int16),
        "b_uint16": (65_535 - step).astype(np.uint16),
        "c_int32": (step - 2**31).astype(np.int32),
        "c_uint32": (2**32 - 1 - step).astype(np.uint32),
        "d_int64": step + np.iinfo(np.int64).min,
        "d_uint64": np.uint64(2**64 - 1) - step.astype(np.uint64),
        "f16": floats.astype(np.float16),
        "f32": floats.astype(np.float32),
        "f64": floats + 2.0**-40,
        "é": step.astype(np.int32),
    }


def golden_streams() -> list[Golden]:
    """All golden streams."""
    spec = RouteSpec(num_experts=64, top_k=4, layer_ids=(1, 2, 5), model='golden/"moe" é😀')
    records = (two_turns(spec), every_state(spec), *shared_prompt(spec), smallest(spec))
    small = RouteSpec(num_experts=16, top_k=2, layer_ids=(0,), model="golden/columns")
    columns = tuple(one_call(small, n, sample=n, columns=token_columns(n)) for n in (3, 5))
    full = RouteSpec(num_experts=256, top_k=2, layer_ids=(3, 60), model="golden/256")
    top1 = RouteSpec(num_experts=255, top_k=1, layer_ids=(0, 1), model="golden/top1")
    wide = RouteSpec(num_experts=32_767, top_k=2, layer_ids=(9,), model="golden/wide")
    pruned = RouteSpec(num_experts=(8, 6, 8), top_k=3, layer_ids=(1, 2, 3), model="golden/pruned")
    return [
        Golden(name="plain", spec=spec, records=records, encoding="plain", max_bytes=1),
        Golden(name="narrow", spec=spec, records=records, encoding="narrow"),
        Golden(name="columns", spec=small, records=columns, encoding="plain"),
        Golden(
            name="narrow-256",
            spec=full,
            records=(id_255_and_missing(full),),
            encoding="narrow",
        ),
        Golden(
            name="narrow-top1",
            spec=top1,
            records=(one_call(top1, 4, sample=0, routes=[[[0], [254]], [[254], [1]], [[127], [128]], [[-1], [-1]]]),),
            encoding="narrow",
        ),
        Golden(
            name="wide",
            spec=wide,
            records=(one_call(wide, 3, sample=0, routes=[[[32_766, 0]], [[256, 255]], [[-1, -1]]]),),
            encoding="plain",
        ),
        Golden(name="pruned", spec=pruned, records=(one_call(pruned, 4, sample=1),), encoding="narrow"),
        Golden(name="empty", spec=spec, records=(), encoding="plain"),
    ]


def kept_ids(tokens: int, *, prompt: int, token_ids: list[int]) -> dict[str, AlignedColumn]:
    """The ids that sampling kept: listed, capped, all of them, or unknown, token by token; none at the prompt."""
    lists: list[list[int]] = [[] for _ in range(tokens)]
    states = np.zeros(tokens, dtype=np.uint8)
    for place, token in enumerate(range(prompt, tokens)):
        states[token] = (1, 3, 2, 0)[place % 4]
        if states[token] in (1, 3):
            lists[token] = sorted({0, token_ids[token], token_ids[token] + 7 + place})
    return {
        "sampling_mask": AlignedColumn.of_lists(lists, dtype="int32", aligned="sampled", axis="kept"),
        "sampling_mask_state": AlignedColumn.of(states, aligned="sampled"),
    }


def weights_of(routes_SLK: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Routing weights float32: by slot, NaN where the row is MISSING."""
    weights_SLK = np.broadcast_to(1 / (4 << np.arange(routes_SLK.shape[2])), routes_SLK.shape).astype(np.float32)
    return np.where(routes_SLK == MISSING, np.float32(np.nan), weights_SLK)


def every_column(spec: RouteSpec, tokens: int, *, sample: int) -> RouteRecord:
    """A column of every kind: numbers, arrays, lists, with and without nulls, and the three names with rules."""
    ids = [1_000 * sample + token for token in range(tokens)]
    routes_SLK = rows(spec, tokens, sample=sample, missing=(tokens - 1,))
    known = np.arange(tokens) % 3 != 1
    halves = np.asarray([[token / 4, np.nan, -0.0] for token in range(tokens)], dtype=np.float16)
    columns = {
        "advantage": AlignedColumn.of(np.arange(tokens) / 8 - 1, aligned="sampled"),
        "halves": AlignedColumn.of(halves, aligned="fed", axes=("feature",)),
        "loss_mask": (np.arange(tokens) >= 2).astype(np.int8),
        "maybe": AlignedColumn.of(np.arange(tokens), aligned="fed", valid=known),
        "maybe_grid": AlignedColumn.of(
            np.arange(tokens * 6, dtype=np.int16).reshape(tokens, 2, 3), aligned="fed", axes=("y", "x"), valid=known
        ),
        "maybe_lists": AlignedColumn.of_lists(
            [[token] * (token % 3) if known[token] else None for token in range(tokens)],
            dtype="uint64",
            aligned="fed",
            nullable=True,
        ),
        "route_weights": AlignedColumn.of(weights_of(routes_SLK), aligned="fed", axes=("layers", "topk")),
        **kept_ids(tokens, prompt=2, token_ids=ids),
    }
    return one_call(
        spec,
        tokens,
        sample=sample,
        routes=routes_SLK,
        columns=columns,
        attributes={"weights_meaning": PROBABILITIES.to_text()},
    )


def observation_behind(spec: RouteSpec) -> RouteRecord:
    """A rollout that ends in what an environment said; two versions of the weights inside one call; its sampling."""
    sampling = Sampling(
        temperature=0.7,
        top_p=0.95,
        top_k=-1,
        min_p=0.0,
        frequency_penalty=-0.5,
        logit_bias="sha256:00",
        processors=("a", "b"),
        logprobs_mode="raw",
    )
    return one_call(
        spec,
        8,
        sample=5,
        routes=rows(spec, 8, sample=5, missing=(4, 5, 6, 7)),
        spans=(
            Span(start=0, stop=2, kind="prompt", role="user", call="c0", weights_version=None),
            Span(start=2, stop=4, kind="generation", role=None, call="c0", weights_version=7, sampling=sampling),
            Span(start=4, stop=5, kind="generation", role=None, call="c0", weights_version=8, sampling=Sampling()),
            Span(start=5, stop=8, kind="prompt", role="tool", call="seen", weights_version=None),
        ),
        captures=(
            Capture(start=0, stop=3, call="c0", weights_version=7, state="captured"),
            Capture(start=3, stop=4, call="c0", weights_version=8, state="captured"),
            Capture(start=4, stop=5, call="c0", weights_version=None, state="not_fed"),
            Capture(start=5, stop=8, call="seen", weights_version=None, state="not_fed"),
        ),
    )


def golden_streams_1_1() -> list[Golden]:
    """What 1.0 cannot say, and one stream that it can."""
    spec = RouteSpec(num_experts=64, top_k=4, layer_ids=(1, 2, 5), model="golden/1.1", decoder_layers=6)
    records = tuple(every_column(spec, tokens, sample=tokens) for tokens in (5, 7))
    turn = one_call(spec, 6, sample=1, prompt=3)
    longer = one_call(spec, 9, sample=1, prompt=3, segment=1, routes=rows(spec, 9, sample=1, missing=(8,)))
    lean = as_delta(replace(every_column(spec, 7, sample=3), segment=1, checksum=None), every_column(spec, 5, sample=3))
    plain = RouteSpec(num_experts=64, top_k=4, layer_ids=(1, 2, 5), model='golden/"moe" é😀')
    old = (two_turns(plain), every_state(plain), *shared_prompt(plain), smallest(plain))
    return [
        Golden(name="aligned-plain", spec=spec, records=records, encoding="plain", max_bytes=1),
        Golden(name="aligned-narrow", spec=spec, records=records, encoding="narrow"),
        Golden(
            name="lean", spec=spec, records=(turn, as_delta(longer, turn), observation_behind(spec)), encoding="narrow"
        ),
        Golden(name="lean-columns", spec=spec, records=(every_column(spec, 5, sample=3), lean), encoding="plain"),
        Golden(name="as-1.0", spec=plain, records=old, encoding="plain"),
    ]


SETS = {"1.0": golden_streams, "1.1": golden_streams_1_1}


def write_golden(folder: Path, version: str) -> None:
    """Make all files of the golden set of one version in ``folder``."""
    expected: dict[str, Any] = {}
    for golden in SETS[version]():
        path = folder / f"{golden.name}.arrows"
        with new_stream(
            path, golden.spec, encoding=golden.encoding, max_bytes=golden.max_bytes, format=version
        ) as sink:
            for record in golden.records:
                sink.write(record)
        expected[path.name] = decoded(path)
    dump(folder / "expected.json", {"format": version, "streams": expected})


def decoded(path: Path) -> dict[str, Any]:
    """A stream as JSON, with the trailer that the frames show."""
    with open_stream(path) as reader:
        assert isinstance(reader, IpcReader)
        return {
            "format": reader.header.version,
            "spec": spec_json(reader.spec),
            "encoding": reader.header.encoding,
            "trailer": trailer_of(path),
            "records": [record_json(record) for record in reader],
        }


def trailer_of(path: Path) -> dict[str, Any]:
    """The trailer as plain pyarrow shows it: metadata of the last batch."""
    metadata: Any = None
    with pa.ipc.open_stream(path) as reader, contextlib.suppress(StopIteration):
        while True:
            metadata = reader.read_next_batch_with_custom_metadata().custom_metadata
    trailer: dict[str, Any] = json.loads(metadata[b"routeplane.trailer"])
    return trailer


# ----------------------------------------------------------------------------------------------------------------------
# The tests
# ----------------------------------------------------------------------------------------------------------------------

ALL: dict[str, Any] = {
    version: load(folder / "expected.json") if (folder / "expected.json").exists() else {"streams": {}}
    for version, folder in GOLDENS.items()
}
EXPECTED = ALL["1.0"]
NAMES = [(version, name) for version, found in ALL.items() for name in sorted(found["streams"])]


def test_every_file_is_expected_and_every_expected_file_is_there() -> None:
    """The folder and ``expected.json`` name the same streams, those that the script makes."""
    assert tuple(GOLDENS) == FORMATS
    for version, folder in GOLDENS.items():
        names = sorted(ALL[version]["streams"])
        assert sorted(path.name for path in folder.glob("*.arrows")) == names
        assert sorted(f"{golden.name}.arrows" for golden in SETS[version]()) == names
        assert ALL[version]["format"] == version


@pytest.mark.parametrize(("version", "name"), NAMES)
def test_checked_in_streams_hold_what_is_expected(version: str, name: str) -> None:
    """Tokens, rows, spans, captures, checksums and trailer of a stream written long ago read as they were meant."""
    assert ALL[version]["streams"][name] == decoded(GOLDENS[version] / name)


@pytest.mark.parametrize(("version", "name"), NAMES)
def test_checksums_follow_from_the_specification(version: str, name: str) -> None:
    """An implementation that knows the spec page alone gets every checksum and the trailer of every golden stream."""
    stream = ALL[version]["streams"][name]
    spec, records = stream["spec"], stream["records"]

    for record in records:
        assert record["checksum"] == reference.xxh3(reference.record_bytes(spec, record)), record["sample_id"]
    checksums = [record["checksum"] for record in records]
    digest = reference.stream_digest(stream["format"], spec, encoding=stream["encoding"], checksums=checksums)
    tokens = sum(len(record["token_ids"]) for record in records)
    assert {"digest": digest, "records": len(records), "tokens": tokens} == {
        key: value for key, value in stream["trailer"].items() if key != "batches"
    }


@pytest.mark.parametrize("version", GOLDENS)
def test_new_streams_hold_the_same(version: str, tmp_path: Path) -> None:
    """What today's writer makes of the same records reads as the checked-in files do, trailer and checksums too."""
    write_golden(tmp_path, version)

    assert ALL[version] == load(tmp_path / "expected.json")
    for name in ALL[version]["streams"]:
        assert decoded(GOLDENS[version] / name) == decoded(tmp_path / name)


def test_a_record_of_1_0_has_the_same_checksum_in_1_1() -> None:
    """The same records in both versions are the same records; the streams are told apart."""
    old, new = ALL["1.0"]["streams"]["plain.arrows"], ALL["1.1"]["streams"]["as-1.0.arrows"]

    assert old["records"] == new["records"]
    assert old["trailer"]["digest"] != new["trailer"]["digest"]


def test_what_needs_1_1_is_refused_as_1_0(tmp_path: Path) -> None:
    """Each new thing, on its own, is named when a writer is asked for 1.0."""
    plain = RouteSpec(num_experts=64, top_k=4, layer_ids=(1, 2, 5), model="golden/1.1")
    turn, full = one_call(plain, 6, sample=1), every_column(plain, 5, sample=5)
    unfed = observation_behind(plain)
    quiet = tuple(replace(span, sampling=None) for span in unfed.spans)
    longer = one_call(plain, 9, sample=1, segment=1)
    needs = {
        "tokens that were not fed": replace(unfed, spans=quiet, checksum=None),
        "sampling parameters": replace(unfed.slice(0, 5), checksum=None),
        "begin at routes_start": as_delta(longer, turn),
        "which declares": full,
    }
    for words, record in needs.items():
        with pytest.raises(UsageError, match=words), new_stream(tmp_path / "x", plain, format="1.0") as sink:
            sink.write(record)
    deep = replace(plain, decoder_layers=6)
    with pytest.raises(UsageError, match="decoder_layers"):
        new_stream(tmp_path / "x", deep, format="1.0")
    with pytest.raises(UsageError, match="format"):
        new_stream(tmp_path / "x", plain, format="1.2")
    assert [] == list(tmp_path.iterdir())


def test_both_encodings_have_the_same_checksums() -> None:
    """The same records in plain and in narrow are the same records."""
    plain, narrow = EXPECTED["streams"]["plain.arrows"], EXPECTED["streams"]["narrow.arrows"]

    assert ("plain", "narrow") == (plain["encoding"], narrow["encoding"])
    assert plain["records"] == narrow["records"]
    assert plain["trailer"]["digest"] != narrow["trailer"]["digest"]


def test_the_set_covers_what_the_format_distinguishes() -> None:
    """Every state and kind, a prefix, nulls and their opposites, every column type, and the ids at the limits occur."""
    streams = EXPECTED["streams"].values()
    records = [record for stream in streams for record in stream["records"]]
    by_name = {name: EXPECTED["streams"][f"{name}.arrows"]["records"] for name in ("narrow-256", "narrow-top1", "wide")}
    ids = {name: {i for row in found[0]["routes"] for layer in row for i in layer} for name, found in by_name.items()}

    states = {capture["state"] for record in records for capture in record["captures"]}
    assert {"captured", "cached", "partial", "not_fed", "aborted", "lost", "not_captured"} == states
    assert {"prompt", "generation"} == {span["kind"] for record in records for span in record["spans"]}
    assert {True, False} == {record["prefix"] is None for record in records}
    assert {True, False} == {record["logprobs"] is None for record in records}
    assert {True, False} == {record["group"] is None for record in records}
    assert 12 == len({column["type"] for record in records for column in record["columns"].values()})
    assert {"narrow-256", "narrow-top1", "wide"} == {
        name for name, top in (("narrow-256", 255), ("narrow-top1", 254), ("wide", 32_766)) if {top, -1} <= ids[name]
    }
    assert any(isinstance(stream["spec"]["num_experts"], list) for stream in streams)
    assert any(not stream["records"] for stream in streams)


def test_specs_come_back_as_written() -> None:
    """A spec's JSON in the schema is its canonical JSON, characters beyond ASCII included."""
    for stream in (stream for found in ALL.values() for stream in found["streams"].values()):
        assert reference.canonical_spec(stream["spec"]) == spec_of(stream["spec"]).to_json()


if __name__ == "__main__":
    for one, place in GOLDENS.items():
        place.mkdir(exist_ok=True)
        if one == FORMAT_VERSION:  # files of an earlier version are what that version wrote
            write_golden(place, one)
            sys.stdout.write(f"wrote {len(SETS[one]())} streams and expected.json to {place}\n")
