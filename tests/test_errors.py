"""The exception tree, the kinds and the findings: what a handler may rely on."""

from __future__ import annotations

import copy
import pickle

import pytest

from routeplane import errors
from routeplane.errors import DataError, ErrorKind, MissingExtraError, Problem, RouteplaneError

TREE: dict[str, tuple[type[BaseException], ...]] = {
    "RouteplaneError": (Exception,),
    "DataError": (RouteplaneError, ValueError),
    "ChecksumError": (errors.DataError,),
    "FormatError": (RouteplaneError, ValueError),
    "TruncatedError": (errors.FormatError, EOFError),
    "SpecError": (RouteplaneError, ValueError),
    "UsageError": (RouteplaneError, ValueError),
    "CaptureError": (RouteplaneError, RuntimeError),
    "ReplayError": (RouteplaneError, RuntimeError),
    "FleetError": (RouteplaneError, RuntimeError),
    "TransportError": (RouteplaneError, OSError),
    "StoreError": (RouteplaneError, OSError),
    "MissingExtraError": (RouteplaneError, ImportError),
}

#: Released kinds in their order: Admission.code is a position in it. Append here what ErrorKind appends; never edit.
RELEASED_KINDS = [
    "partial_row",
    "id_out_of_range",
    "duplicate_id",
    "shape",
    "dtype",
    "value_range",
    "spans",
    "coverage",
    "row_count",
    "token_mismatch",
    "checksum",
    "prefix",
    "duplicate_key",
    "token_column",
    "context_break",
    "routes_missing",
    "media",
    "layers",
    "constant_layer",
    "identical_rows",
    "entropy_collapse",
    "not_arrow",
    "not_routeplane",
    "version",
    "schema",
    "encoding",
    "compressed",
    "truncated",
    "trailer",
    "corrupt_batch",
    "dense_model",
    "unknown_architecture",
    "unsupported_geometry",
    "spec_mismatch",
    "spec_invalid",
    "argument",
    "closed",
    "too_long",
    "missing_extra",
    "child_failed",
    "capture_off",
    "dense_slot",
    "uncaptured_slot",
    "no_seam",
    "gate_not_consumed",
    "gate_fired",
    "unbound_recompute",
    "detached",
    "flipped_share",
    "no_port",
    "not_ready",
    "start_failed",
    "plan",
    "actor_lost",
    "actor_failed",
    "environment",
    "producer_taken",
    "group_taken",
    "vanished",
    "aborted",
    "expired",
    "connection",
    "too_large",
    "timed_out",
    "unauthenticated",
    "row_conflict",
    "manifest",
    "lost_file",
    "corrupt_chunk",
    "no_space",
    "writer",
    "rolled_back",
    "storage",
    "packing",
    "unused_experts",
]

CLASSES: list[type[RouteplaneError]] = [getattr(errors, name) for name in TREE]


def test_the_tree_has_its_shape() -> None:
    """Every class has the bases that handlers catch by, and there is no class besides."""
    defined = {
        name: value.__bases__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }

    assert TREE == defined
    assert set(TREE) <= set(errors.__all__)


def test_kinds_are_append_only() -> None:
    """Released kinds keep value and place."""
    assert RELEASED_KINDS == [str(kind) for kind in ErrorKind][: len(RELEASED_KINDS)]
    assert len(ErrorKind) == len(RELEASED_KINDS), "append the new kind to RELEASED_KINDS"


def test_a_kind_is_its_value() -> None:
    """A kind compares and formats as its string, so that logs and JSON need no conversion."""
    assert ErrorKind.PARTIAL_ROW in {"partial_row"}
    assert "partial_row" == f"{ErrorKind.PARTIAL_ROW}"


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles_whole(cls: type[RouteplaneError], protocol: int) -> None:
    """Class, message, kind and problems cross a process boundary."""
    problems = (
        Problem(kind=ErrorKind.DUPLICATE_ID, message="expected a, got b", sample="s", token=3, layer=7),
        Problem(kind=ErrorKind.CONSTANT_LAYER, message="c", severity="alarm"),
    )
    error = cls("expected x, got y", kind=ErrorKind.SHAPE, problems=iter(problems))
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert cls is type(again)
        assert "expected x, got y" == str(again) == again.message
        assert ErrorKind.SHAPE is again.kind
        assert problems == again.problems


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_a_kind(cls: type[RouteplaneError]) -> None:
    """No error can be raised without saying its kind, and the kind is by keyword."""
    with pytest.raises(TypeError):
        cls("message")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        cls("message", ErrorKind.SHAPE)  # type: ignore[call-arg]


def test_a_missing_extra_is_an_import_error() -> None:
    """``except ImportError`` around an optional import catches it, with its message."""
    with pytest.raises(ImportError, match=r"routeplane\[torch\]") as caught:
        raise MissingExtraError("install the extra routeplane[torch]", kind=ErrorKind.MISSING_EXTRA)

    assert "install the extra routeplane[torch]" == caught.value.msg


def test_a_problem_says_where() -> None:
    """The text of a finding ends in sample, token and layer, as far as they apply; zero is a place."""
    problem = Problem(kind=ErrorKind.DUPLICATE_ID, message="expected a, got b", sample="s", token=0, layer=0)

    assert "expected a, got b @ sample s, token 0, layer 0" == str(problem)
    assert "m @ layer 3" == str(Problem(kind=ErrorKind.LAYERS, message="m", layer=3))
    assert "m" == str(Problem(kind=ErrorKind.LAYERS, message="m"))


def test_an_error_from_problems_carries_all() -> None:
    """The first finding gives the kind, four are shown, all are attached."""
    problems = [Problem(kind=kind, message=f"m{index}") for index, kind in enumerate(list(ErrorKind)[:6])]
    error = DataError.from_problems(iter(problems), what="illegal routes")

    assert DataError is type(error)
    assert "illegal routes: m0; m1; m2; m3; and 2 more" == str(error)
    assert problems[0].kind == error.kind
    assert tuple(problems) == error.problems
    assert "w: m0" == str(DataError.from_problems(problems[:1], what="w"))
    assert "w: m0; m1; m2; m3" == str(DataError.from_problems(problems[:4], what="w"))
