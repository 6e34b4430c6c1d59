"""The archive: how small, how fast to read at random, and how little of it a pipeline stage reads.

Routes are drawn from a model whose entropy is known: each sample and layer has a Zipf law over its own order of the
experts, and a row is a Plackett-Luce draw without replacement from it (Gumbel top-k), in the order drawn. Its entropy
is the mean of -log2 of its probability. Three skews; 48 layers, 8 of 128 experts.

Without ``full`` an archive of some 100 MB, else of 10 GB. Reads are warm, one range of 512 tokens at a random place.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec
from zarrs import ZarrsCodecPipeline

from benchmarks.measure import Result
from routeplane.archive import Archive, open_archive, save_archive
from routeplane.batch import microbatches
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS, TOP_K, EXPERTS = 48, 8, 128
SPEC = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=tuple(range(LAYERS)))
#: Exponents of the Zipf law that give 6.7, 6.0 and 5.3 bits per id: a byte is 1.20, 1.33 and 1.50 times as much.
SKEWS = {"balanced": 0.55, "uneven": 0.9, "skewed": 1.17}
SAMPLE, SHARD, CHUNK = 4_096, 32_768, 512
STAGE = tuple(range(12, 24))

# ----------------------------------------------------------------------------------------------------------------------
# The payload
# ----------------------------------------------------------------------------------------------------------------------


def draw(tokens: int, *, skew: float, seed: int) -> tuple[NDArray[np.int16], float]:
    """Rows ``[tokens, L, K]`` of one sample, and the bits that one id costs at best."""
    rng = np.random.default_rng(seed)
    law_E = np.arange(1, EXPERTS + 1, dtype=np.float32) ** -skew
    law_E /= law_E.sum()
    rows_SLK, bits = np.empty((tokens, LAYERS, TOP_K), dtype=np.int16), 0.0
    for layer in range(LAYERS):
        keys_SE = np.log(law_E) + rng.gumbel(size=(tokens, EXPERTS)).astype(np.float32)
        best_SK = np.argpartition(-keys_SE, TOP_K, axis=1)[:, :TOP_K]
        order_SK = np.argsort(-np.take_along_axis(keys_SE, best_SK, axis=1), axis=1)
        ranks_SK = np.take_along_axis(best_SK, order_SK, axis=1)
        law_SK = law_E[ranks_SK]
        left_SK = 1 - np.cumsum(law_SK, axis=1) + law_SK
        bits += float(-np.log2(law_SK / left_SK).mean()) / LAYERS
        rows_SLK[:, layer] = rng.permutation(EXPERTS)[ranks_SK]
    return rows_SLK, bits


def record(index: int, rows_SLK: NDArray[np.int16]) -> RouteRecord:
    """One sample whose rows are all there."""
    tokens = len(rows_SLK)
    return RouteRecord(
        sample_id=f"sample-{index}",
        token_ids=np.random.default_rng(index).integers(0, 150_000, tokens, dtype=np.int32),
        routes=rows_SLK,
        spans=(Span(start=0, stop=tokens, kind="generation", role=None, call="c", weights_version=1),),
        captures=(Capture(start=0, stop=tokens, call="c", weights_version=1, state="captured"),),
        spec=SPEC,
    )


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ----------------------------------------------------------------------------------------------------------------------
# Other layouts in zarr
# ----------------------------------------------------------------------------------------------------------------------


def zarr_array(where: Path, rows: NDArray[np.uint8], *, chunk: tuple[int, int, int], compressor: Any) -> Any:
    """The same rows in another layout, written and read through zarrs."""
    sharding = ShardingCodec(
        chunk_shape=chunk,
        codecs=[BytesCodec(), compressor, Crc32cCodec()],
        index_codecs=[BytesCodec(), Crc32cCodec()],
    )
    made: Any = zarr.create_array(
        zarr.storage.LocalStore(where),
        shape=rows.shape,
        dtype="uint8",
        chunks=(SHARD, LAYERS, TOP_K),
        serializer=sharding,
        compressors=None,
        fill_value=255,
    )
    pipeline = ZarrsCodecPipeline.from_array_metadata_and_store(made.metadata, made.store)
    object.__setattr__(made.async_array, "codec_pipeline", pipeline)
    for start in range(0, len(rows), SHARD):
        made[start : start + SHARD] = rows[start : start + SHARD]
    return made


BITSHUFFLE = BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle", typesize=1)
LAYOUTS: dict[str, tuple[tuple[int, int, int], Any]] = {
    "zarr, 512 tokens x all layers, zstd": ((CHUNK, LAYERS, TOP_K), ZstdCodec(level=1)),
    "zarr, 512 tokens x 1 layer, zstd": ((CHUNK, 1, TOP_K), ZstdCodec(level=1)),
    "zarr, 512 tokens x 1 layer, bitshuffle": ((CHUNK, 1, TOP_K), BITSHUFFLE),
}

# ----------------------------------------------------------------------------------------------------------------------
# What is measured
# ----------------------------------------------------------------------------------------------------------------------


def sizes(folder: Path) -> list[Result]:
    """Bytes of the archive's routes against the entropy, and against bitshuffled zarr."""
    results, ours_all, theirs_all = [], 0, 0
    shares: dict[str, float] = {}
    for name, skew in SKEWS.items():
        drawn = [draw(SAMPLE, skew=skew, seed=seed) for seed in range(4)]
        rows = np.concatenate([each for each, _ in drawn])
        bound = rows.size * sum(bits for _, bits in drawn) / len(drawn) / 8
        save_archive((record(index, each) for index, (each, _) in enumerate(drawn)), folder / name, spec=SPEC, run="r")
        ours = size_of(folder / name / open_archive(folder / name).group("r") / "routes")
        zarr_array(folder / f"{name}-b", rows.astype(np.uint8), chunk=(CHUNK, LAYERS, TOP_K), compressor=BITSHUFFLE)
        theirs = size_of(folder / f"{name}-b")
        ours_all, theirs_all = ours_all + ours, theirs_all + theirs
        shares[name] = round(ours / theirs, 4)
        results.append(
            Result(
                name=f"archive/size_{name}",
                value=round(ours / bound, 4),
                unit=f"bytes of routes over their entropy ({bound * 8 / rows.size:.2f} bits per id)",
                bar=1.10,
                higher_is_better=False,
                peers={"uint8": round(rows.size / bound, 4), "zarr bitshuffle+zstd": round(theirs / bound, 4)},
            )
        )
    results.append(
        Result(
            name="archive/size_against_bitshuffle",
            value=round(ours_all / theirs_all, 4),
            unit="bytes of routes over those of zarr bitshuffle+zstd, three skews together",
            bar=0.93,
            higher_is_better=False,
            peers=shares,
        )
    )
    return results


def spent(ways: dict[str, Callable[[int], object]], *, places: list[int]) -> dict[str, NDArray[np.float64]]:
    """Milliseconds of each way at each place, one way after the other in changing order; a tenth is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffle = list(ways), Random(0).shuffle
    for index, place in enumerate(places):
        shuffle(order)
        for name in order:
            start = perf_counter()
            ways[name](place)
            if index >= len(places) // 10:
                found[name].append(1_000 * (perf_counter() - start))
    return {name: np.asarray(values) for name, values in found.items()}


def middle(values_N: NDArray[np.float64]) -> float:
    """The median, as it is written down."""
    return round(float(np.median(values_N)), 3)


def access(archive: Archive, others: dict[str, Any], *, length: int) -> list[Result]:
    """512 tokens at random: the record's range, and its rows alone against other layouts."""
    rng = np.random.default_rng(1)
    keys = list(archive)
    places = rng.integers(0, len(keys) * (length // CHUNK - 1), 300).tolist()

    def at(place: int) -> tuple[Any, int]:
        record, chunk = divmod(place, length // CHUNK - 1)
        return keys[record], chunk * CHUNK + place % CHUNK

    def ours(place: int, *, layers: tuple[int, ...] | None, rows: bool) -> object:
        key, start = at(place)
        read = archive.read_rows if rows else archive.read
        return read(key, tokens=(start, start + CHUNK), layer_ids=layers)

    def theirs(place: int, *, array: Any, layers: slice) -> object:
        # another layout holds the beginning of the archive
        start = place * 37 % (array.shape[0] - CHUNK)
        return array[start : start + CHUNK, layers].astype(np.int16)

    results = []
    for name, layers, stage in (("all", None, slice(0, LAYERS)), ("12", STAGE, slice(12, 24))):
        ways: dict[str, Callable[[int], object]] = {
            "record": partial(ours, layers=layers, rows=False),
            "rows": partial(ours, layers=layers, rows=True),
            **{other: partial(theirs, array=array, layers=stage) for other, array in others.items()},
        }
        found = spent(ways, places=places)
        peers = {other: middle(found[other]) for other in others}
        # within each round, since a busy neighbour slows all ways of a round alike
        shares = {other: middle(found["rows"] / found[other]) for other in others}
        results += [
            Result(
                name=f"archive/512_tokens_{name}_layers",
                value=middle(found["record"]),
                unit="ms, warm median, a checked record",
                bar=None,
                higher_is_better=False,
                peers={"rows alone": middle(found["rows"]), **peers},
            ),
            Result(
                name=f"archive/512_tokens_{name}_layers_against_zarr",
                value=max(shares.values()),
                unit="time of rows alone over that of the best layout in zarr, median over rounds",
                bar=1.2,
                higher_is_better=False,
                peers=shares,
            ),
        ]
    return results


def stage_share(archive: Archive) -> Result:
    """What the layers of one pipeline stage of four cost in batches, against what all layers cost.

    Tokens, spans and checks cost the same whatever the layers, so a batch of one layer is taken off both.
    """

    def read(layers: tuple[int, ...] | None) -> float:
        start = perf_counter()
        for _ in microbatches(archive.select(layer_ids=layers), tokens=4 * SAMPLE):
            pass
        return perf_counter() - start

    rounds = [(read((0,)), read(STAGE), read(None)) for _ in range(6)][1:]
    return Result(
        name="archive/pipeline_stage",
        value=round(median((stage - one) / (all_ - one) for one, stage, all_ in rounds), 3),
        unit=f"time that 11 more layers cost in batches over that 47 more cost ({11 / 47:.3f} by count)",
        bar=0.30,
        higher_is_better=False,
        peers={
            "batches of 12 layers over those of 48": round(median(stage / all_ for _, stage, all_ in rounds), 3),
            "batches of 1 layer over those of 48": round(median(one / all_ for one, _, all_ in rounds), 3),
        },
    )


def main(*, full: bool = False) -> Iterator[Result]:
    """Measure on 10 GB, or on 100 MB."""
    samples = 6_600 if full else 64
    blocks = [draw(SAMPLE, skew=SKEWS["uneven"], seed=seed)[0] for seed in range(8)]

    def records() -> Iterator[RouteRecord]:
        return (record(index, blocks[index % len(blocks)]) for index in range(samples))

    with TemporaryDirectory() as folder:
        yield from sizes(Path(folder))
        save_archive(records(), Path(folder) / "a", spec=SPEC)
        rows = np.concatenate(blocks).astype(np.uint8)
        others = {
            name: zarr_array(Path(folder) / f"z{index}", rows, chunk=chunk, compressor=compressor)
            for index, (name, (chunk, compressor)) in enumerate(LAYOUTS.items())
        }
        yield from access(open_archive(Path(folder) / "a"), others, length=SAMPLE)
        shutil.rmtree(Path(folder) / "a")
        save_archive((record(index, block) for index, block in enumerate(blocks)), Path(folder) / "a", spec=SPEC)
        yield stage_share(open_archive(Path(folder) / "a"))
