"""The same statistics, counted by Ray's workers and added up here.

``collect`` runs on each block of a Ray Data set; what comes back to the driver is tables of counts, never rows.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING

import pyarrow as pa
import ray

from routeplane.errors import DataError, ErrorKind, TransportError
from routeplane.inspect.collect import collect
from routeplane.inspect.dataset import dataset
from routeplane.inspect.sources import SourceSet, is_wanted, parse_sample
from routeplane.inspect.statistics import RouteStatistics
from routeplane.record.codec import read_records
from routeplane.record.schema import parse_schema

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["collect_on_ray", "joined_cluster"]


@contextlib.contextmanager
def joined_cluster() -> Iterator[None]:
    """Be in a Ray cluster: the one this process is in, else the one that RAY_ADDRESS or a file of Ray's names.

    One that was joined here is left at the end. None is started: counting in processes of this machine alone is slower
    than ``collect``. Raises TransportError (CONNECTION) where there is none.
    """
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:  # none is there; an address that is none
        raise TransportError(
            f"expected a running Ray cluster (`ray start --head` starts one, RAY_ADDRESS names one), got: {error}",
            kind=ErrorKind.CONNECTION,
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def collect_on_ray(
    sources: SourceSet, *, layer_ids: Sequence[int] | None = None, samples: Sequence[str] | None = None
) -> RouteStatistics:
    """Statistics of ``sources`` as ``collect`` gives them, reduced over Ray Data: the same numbers.

    Needs a Ray cluster that is up (``ray.init``, or ``joined_cluster``), and workers that see the files. Sources must
    share their token columns too. Raises what ``collect`` and the readers raise.
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
