"""The same statistics, counted by Ray's workers and added up here.

``collect`` runs on each block of a Ray Data set; what comes back to the driver is tables of counts, never rows.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from routeplane.columns import read_records
from routeplane.errors import DataError
from routeplane.inspect.collect import collect
from routeplane.inspect.dataset import dataset
from routeplane.inspect.sources import SourceSet, is_wanted, parse_sample
from routeplane.inspect.statistics import RouteStatistics
from routeplane.schema import parse_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from routeplane.record import RouteRecord
    from routeplane.spec import RouteSpec

__all__ = ["collect_on_ray"]


def collect_on_ray(
    sources: SourceSet, *, layer_ids: Sequence[int] | None = None, samples: Sequence[str] | None = None
) -> RouteStatistics:
    """Statistics of ``sources`` as ``collect`` gives them, reduced over Ray Data: the same numbers.

    Needs a Ray cluster that is up (``ray.init``), and workers that see the files. Raises what ``collect`` and the
    readers raise, inside Ray's own error where a worker raised it.
    """
    spec = sources.spec if layer_ids is None else sources.spec.select(layer_ids)
    records = dataset(sources.paths, layer_ids=layer_ids)
    counted = records.map_batches(
        partial(_count, spec, None if samples is None else tuple(samples)),
        batch_format="pyarrow",
        batch_size=None,
        zero_copy_batch=True,
    )
    # pickle: our own value, between our own processes of one cluster
    parts = (pickle.loads(row["statistics"]) for row in counted.iter_rows())
    return reduce(RouteStatistics.merge, parts, collect((), spec))


def _count(spec: RouteSpec, samples: tuple[str, ...] | None, table: pa.Table) -> pa.Table:
    """One block's statistics, as the one row of a table; runs in a worker."""
    found = collect(_records(table, samples), spec)
    return pa.table({"statistics": [pickle.dumps(found)]})


def _records(table: pa.Table, samples: tuple[str, ...] | None) -> Iterator[RouteRecord]:
    wanted = None if samples is None else [parse_sample(sample) for sample in samples]
    for batch in table.to_batches():
        batch.validate(full=True)
        for record in read_records(batch, parse_schema(batch.schema)):
            if isinstance(record, DataError):
                raise record
            if wanted is None or is_wanted(record.key, wanted):
                yield record
