"""Makes a Trainer and the layers use the same store of processes, and tells at the first step who takes part."""

from __future__ import annotations

from typing import Any, Iterable, Optional

from mxnet.gluon import Parameter

from ..exchange.store import ProcessStore
from ..system import environment
from ..system.logs import log
from ..training.replicas import Replicas, followers_of, stores_of
from ..training.session import session

#: Of each launcher: the variable with the number of its processes, another one that must be set, and our store.
_LAUNCHERS = (
    ("PMI_SIZE", "", "mpi"),
    ("OMPI_COMM_WORLD_SIZE", "", "mpi"),
    ("HOROVOD_SIZE", "", "horovod"),
    ("SLURM_NTASKS", "SLURM_STEP_ID", "mpi"),
    ("DMLC_NUM_WORKER", "DMLC_ROLE", "dist_sync"),
)


def store_of_layers(params: Any) -> Optional[ProcessStore]:
    """Returns the store of the layers among the parameters of a new Trainer that names none."""
    given = list(params.values()) if hasattr(params, "values") else params
    stores = stores_of(p for p in given if isinstance(p, Parameter)) if isinstance(given, (list, tuple)) else []
    if len(stores) != 1:
        return None
    log.info("the Trainer uses the KVStore of the layers: %r", stores[0])
    return stores[0]


def give_to_layers(store: ProcessStore) -> None:
    """Lets the layers use the store of a Trainer, unless `configure` has chosen."""
    if session.exchange is None and not session.chosen:
        session.set_exchange(store)
        log.info("layers without a KVStore of their own use that of the Trainer: %r", store)


def tell(parameters: Iterable[Parameter]) -> None:
    """Says with whom the layers of a Trainer meet; warns if a launcher has started processes that do not meet."""
    meeting = [replicas for replicas in followers_of(parameters) if replicas.pooling.mode != "local"]
    if not meeting or any(_meets_others(replicas) for replicas in meeting):
        return  # the store tells what the processes have agreed on
    log.info("the statistics of %d layers meet within this process: %d replicas", len(meeting), meeting[0].count())
    for variable, other, store in _LAUNCHERS:
        size = environment.read(variable)
        if size.isdigit() and int(size) > 1 and (not other or environment.read(other)) and not session.warned:
            session.warned = True
            log.warning(
                "This is one of %s processes (%s), but its layers meet no replica of the others. For statistics and "
                "gradients of all processes, write kv = gluon_syncbn.kvstore(%r) and gluon.Trainer(..., kvstore=kv). "
                "mode='local' is for statistics of each device.",
                size,
                variable,
                store,
            )


def _meets_others(replicas: Replicas) -> bool:
    exchange = replicas.exchange or session.exchange
    return isinstance(exchange, ProcessStore) and exchange.num_workers > 1
