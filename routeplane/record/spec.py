"""The geometry that gives a row its meaning: how many experts, how many slots, which layers.

Owns the one reading of "legal id" (``[0, E)`` per layer) and the one spelling of "not captured" (MISSING).
Knows nothing of records, Arrow or any model library; ``geometry`` reads foreign configurations for it.

Axes: L captured layers, K top-k slots, E experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from routeplane.errors import ErrorKind, SpecError
from routeplane.record.counts import html_table
from routeplane.record.geometry import Geometry, geometry_from_hf_config, geometry_from_model
from routeplane.record.parse import settle

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MAX_EXPERTS", "MAX_TOP_K", "MISSING", "NARROW_MISSING", "RouteSpec"]

#: Every id of a row that was not captured. Padding is the same row.
MISSING = -1
#: MISSING in the ``narrow`` encoding: K bytes 0xFF, which distinctness makes illegal as a route for K >= 2.
NARROW_MISSING = 0xFF
#: Largest router width: ids are int16 (format v1).
MAX_EXPERTS = 32_767
#: Largest top-k accepted. The widest router known selects 22; 256 leaves a margin and bounds what a header may ask for.
MAX_TOP_K = 256
#: Largest number of captured layers accepted, for the same reason.
MAX_LAYERS = 4_096

# A rule of the format, so it asks no Unicode database: that of the next Python knows other characters.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteSpec:
    """What the ids of a route mean. Immutable; every method returns a new value.

    ``num_experts``: the router's width E (zero-computation experts in, fused shared experts out), or one width per
    captured layer. ``top_k``: K, one integer. ``layer_ids``: the global decoder-layer index behind each slot of axis
    L, strictly increasing; of looped layers, that in the unrolled model. ``model``: a name for people and for the
    digest. ``id_space``: always ``"logical"``; a load balancer's physical ids are refused. ``decoder_layers``: the
    depth of the decoder, MoE layers and others, where it is known: an axis of another length is then refused (format
    1.1).

    Raises SpecError where a value is illegal.

    >>> spec = RouteSpec(num_experts=64, top_k=6, layer_ids=range(1, 27), model="mine")
    >>> spec.row_shape, spec.select([1, 2]).layer_ids
    ((26, 6), (1, 2))
    """

    num_experts: int | tuple[int, ...]
    top_k: int
    layer_ids: tuple[int, ...]
    model: str = ""
    id_space: str = "logical"
    decoder_layers: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layer_ids, Iterable):
            raise _invalid("layer_ids as a sequence", repr(self.layer_ids))
        layer_ids = tuple(_whole(layer, "layer_ids") for layer in self.layer_ids)
        widths: int | tuple[int, ...]
        if isinstance(self.num_experts, tuple | list):
            widths = tuple(_whole(width, "num_experts") for width in self.num_experts)
            if len(widths) != len(layer_ids):
                raise _invalid(f"one num_experts per layer, {len(layer_ids)} in all", f"{len(widths)}")
            # one spelling for one meaning, so that digests of equal geometries are equal
            widths = widths[0] if len(set(widths)) == 1 else widths
        else:
            widths = _whole(self.num_experts, "num_experts")
        depth = None if self.decoder_layers is None else _whole(self.decoder_layers, "decoder_layers")
        top_k = _whole(self.top_k, "top_k")
        settle(self, layer_ids=layer_ids, top_k=top_k, num_experts=widths, decoder_layers=depth)
        self._check()

    def __repr__(self) -> str:
        """Show what makes the spec again, with layers that follow each other as a range."""
        ids = self.layer_ids
        dense = len(ids) > 4 and ids[-1] - ids[0] == len(ids) - 1
        layers = f"range({ids[0]}, {ids[-1] + 1})" if dense else str(ids)
        depth = "" if self.decoder_layers is None else f", decoder_layers={self.decoder_layers}"
        return (
            f"RouteSpec(num_experts={self.num_experts}, top_k={self.top_k}, layer_ids={layers}, model={self.model!r}"
            f"{depth})"
        )

    def _repr_html_(self) -> str:
        facts = {
            "experts": ", ".join(map(str, sorted(set(self.experts_per_layer)))),
            "top-k": self.top_k,
            "captured layers": self.num_layers,
            "layer ids": ", ".join(map(str, self.layer_ids)),
            "depth of the decoder": "unknown" if self.decoder_layers is None else self.decoder_layers,
        }
        return html_table(f"RouteSpec {self.model}", facts)

    def _check(self) -> None:
        if not 1 <= len(self.layer_ids) <= MAX_LAYERS:
            raise _invalid(f"1 to {MAX_LAYERS} layer_ids", f"{len(self.layer_ids)}")
        if (
            self.layer_ids[0] < 0
            or self.layer_ids[-1] >= 2**31
            or any(a >= b for a, b in zip(self.layer_ids, self.layer_ids[1:], strict=False))
        ):
            raise _invalid("layer_ids in [0, 2^31) and strictly increasing", f"{list(self.layer_ids)}")
        if self.decoder_layers is not None and not self.layer_ids[-1] < self.decoder_layers <= 2**31:
            raise _invalid(f"decoder_layers above the last layer id {self.layer_ids[-1]}", f"{self.decoder_layers}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise _invalid(f"top_k in [1, {MAX_TOP_K}]", f"{self.top_k}")
        for layer, width in zip(self.layer_ids, self.experts_per_layer, strict=True):
            if not self.top_k <= width <= MAX_EXPERTS:
                raise _invalid(f"num_experts in [top_k={self.top_k}, {MAX_EXPERTS}]", f"{width} at layer {layer}")
        if not isinstance(self.model, str) or _UNPRINTABLE.search(self.model):
            raise _invalid("model as a string without control characters", repr(self.model))
        if self.id_space != "logical":
            raise _invalid("id_space 'logical' (map a load balancer's physical ids back first)", repr(self.id_space))

    @classmethod
    def from_hf_config(cls, config: object) -> RouteSpec:
        """Read the geometry of a Hugging Face configuration (an object with ``to_dict`` or a mapping).

        Refuses, with SpecError, dense models, architectures never seen, and keys it cannot understand. The depth of the
        decoder is not taken: it is part of the digest, and format 1.0 cannot hold it. Where axes of another length are
        to be refused, ``dataclasses.replace(spec, decoder_layers=config.num_hidden_layers)`` says so.
        """
        return cls._from_geometry(geometry_from_hf_config(config))

    @classmethod
    def from_model(cls, model: object) -> RouteSpec:
        """Find the routers of a model, a ``torch.nn.Module``, and count their layers, experts and top-k.

        Serves architectures that ``from_hf_config`` does not know. Weights are not read, so meta tensors will do; a
        pipeline stage gives its own layers only. Raises SpecError for a model without routers (DENSE_MODEL) or with
        one that could not be understood (UNSUPPORTED_GEOMETRY), UsageError for anything that is not a model.
        """
        return cls._from_geometry(geometry_from_model(model))

    @classmethod
    def _from_geometry(cls, geometry: Geometry) -> RouteSpec:
        return cls(
            num_experts=geometry.num_experts,
            top_k=geometry.top_k,
            layer_ids=geometry.layer_ids,
            model=geometry.model,
        )

    @property
    def num_layers(self) -> int:
        """L, the number of captured layers."""
        return len(self.layer_ids)

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        """E per captured layer, always of length L."""
        if isinstance(self.num_experts, tuple):
            return self.num_experts
        return (self.num_experts,) * len(self.layer_ids)

    @property
    def narrow_allowed(self) -> bool:
        """Whether the one-byte encoding is unambiguous for this geometry (format v1)."""
        return max(self.experts_per_layer) <= (255 if self.top_k == 1 else 256)

    @property
    def row_shape(self) -> tuple[int, int]:
        """``(L, K)``."""
        return len(self.layer_ids), self.top_k

    @property
    def digest(self) -> int:
        """xxh3-64 of the canonical JSON; the first eight bytes under every record checksum."""
        return _digest_of(self)

    def slot(self, layer_id: int) -> int:
        """Position on axis L of a decoder layer. Raises SpecError for a layer that is not captured."""
        try:
            return self.layer_ids.index(layer_id)
        except ValueError:
            raise SpecError(
                f"expected one of the captured layers {list(self.layer_ids)}, got {layer_id}", kind=ErrorKind.LAYERS
            ) from None

    def select(self, layer_ids: Iterable[int]) -> RouteSpec:
        """The spec of a subset of layers, in axis order."""
        wanted = sorted(set(layer_ids))
        slots = [self.slot(layer) for layer in wanted]
        return replace(self, layer_ids=tuple(wanted), num_experts=tuple(self.experts_per_layer[slot] for slot in slots))

    def missing_rows(self, count: int) -> NDArray[np.int16]:
        """A fresh int16 array ``[count, L, K]`` of MISSING rows, owned by the caller."""
        return np.full((count, *self.row_shape), MISSING, dtype=np.int16)

    def differences(self, other: RouteSpec) -> list[str]:
        """Geometry keys in which two specs differ, as ``key: ours against theirs``. ``model`` is a name, not
        geometry."""
        if other is self:
            return []  # nearly always: records of one stream share its spec
        depths = self.decoder_layers, other.decoder_layers
        depth = (
            [f"decoder_layers: {depths[0]} against {depths[1]}"]
            if None not in depths and depths[0] != depths[1]
            else []
        )
        return depth + [
            f"{key}: {getattr(self, key)} against {getattr(other, key)}"
            for key in ("num_experts", "top_k", "layer_ids", "id_space")
            if getattr(self, key) != getattr(other, key)
        ]

    def require_same_geometry(self, other: RouteSpec, *, where: str) -> None:
        """Raise SpecError naming every difference between the expected geometry (self) and the one that came."""
        found = self.differences(other)
        if found:
            raise SpecError(
                f"{where}: expected the geometry of {self.model or 'this spec'}, got {other.model or 'another'}; "
                + "; ".join(found),
                kind=ErrorKind.SPEC_MISMATCH,
            )

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no blanks, ASCII. Equal specs give equal text."""
        document: dict[str, Any] = {
            "id_space": self.id_space,
            "layer_ids": list(self.layer_ids),
            "model": self.model,
            "num_experts": list(self.num_experts) if isinstance(self.num_experts, tuple) else self.num_experts,
            "top_k": self.top_k,
        }
        if self.decoder_layers is not None:
            document["decoder_layers"] = self.decoder_layers
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RouteSpec:
        """Parse what ``to_json`` wrote. Unknown or absent keys are refused."""
        try:
            document: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid("a JSON object", f"text that does not parse ({error})") from None
        expected = {"id_space", "layer_ids", "model", "num_experts", "top_k"}
        if not isinstance(document, dict) or set(document) - {"decoder_layers"} != expected:
            raise _invalid(
                f"the keys {sorted(expected)}", f"{sorted(document) if isinstance(document, dict) else document!r}"
            )
        if not isinstance(document["layer_ids"], list):
            raise _invalid("layer_ids as a list", repr(document["layer_ids"]))
        if "decoder_layers" in document and document["decoder_layers"] is None:
            raise _invalid("decoder_layers as a whole number, or absent", "null")
        widths = document["num_experts"]
        return cls(
            num_experts=tuple(widths) if isinstance(widths, list) else widths,
            top_k=document["top_k"],
            layer_ids=tuple(document["layer_ids"]),
            model=document["model"],
            id_space=document["id_space"],
            **({"decoder_layers": document["decoder_layers"]} if "decoder_layers" in document else {}),
        )


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _invalid(f"{name} as whole numbers", repr(value))
    return int(value)


@lru_cache(maxsize=64)
def _digest_of(spec: RouteSpec) -> int:
    # asked for by every record
    return xxhash.xxh3_64_intdigest(spec.to_json().encode())


def _invalid(expected: str, got: str) -> SpecError:
    return SpecError(f"a RouteSpec needs {expected}, got {got}", kind=ErrorKind.SPEC_INVALID)
