"""Says in what a training computes something else than it was asked for."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Sequence

from mxnet import gluon

from ..exchange import named
from ..exchange.store import ProcessStore
from ..system import environment
from ..system.arguments import some
from ..system.logs import log
from ..training.replicas import EAGER, IN_GRAPH, NEVER, followers_of, stores_of
from ..training.session import session
from . import blocks

_MEANS = ("running_mean", "moving_mean")
_BY_MPI = "gluon.Trainer(..., kvstore='mpi')"
#: Of each launcher: the variable with the number of its processes, another one that must be set, and what to write.
_LAUNCHERS = (
    ("PMI_SIZE", "", _BY_MPI),
    ("OMPI_COMM_WORLD_SIZE", "", _BY_MPI),
    ("HOROVOD_SIZE", "", "gluon_syncbn.configure(kvstore='mpi') and mpiexec in place of horovodrun"),
    ("SLURM_NTASKS", "SLURM_STEP_ID", _BY_MPI),
    ("DMLC_NUM_WORKER", "DMLC_ROLE", "gluon.Trainer(..., kvstore='dist_sync', update_on_kvstore=False)"),
)


def tell_who_meets(trainer: gluon.Trainer) -> None:
    """Says with whom the layers of a Trainer meet; warns if a launcher has started processes that do not meet."""
    meeting = [replicas for replicas in followers_of(trainer._params) if replicas.settings.mode != "local"]
    exchanges: List[Any] = [replicas.exchange or session.exchange for replicas in meeting]
    of_processes = [one for one in exchanges if one is not None and one.spans_processes]
    if not meeting or any(one.num_workers > 1 for one in of_processes):
        return  # the store tells what the processes have agreed on
    replicas = len(meeting[0].contexts)
    log.info("the statistics of %d layers meet within this process: %d replicas", len(meeting), replicas)
    # The user has chosen a KVStore of all layers, of these, or of the Trainer in spite of one of all processes.
    chosen = session.chosen or any(exchanges) or (session.stores and vars(trainer).get("_has_chosen_store", True))
    chosen = chosen or any(store.layers for store in session.stores)
    text = left_alone() if of_processes or not chosen else ""  # of one process: its launcher is not that of MPI
    if text and session.first(text):
        log.warning(text)


def left_alone() -> str:
    """Returns what to say where no layer meets those of other processes. Empty if no launcher has started others."""
    for variable, other, advice in _LAUNCHERS:
        size = environment.read(variable)
        if size.isdigit() and int(size) > 1 and (not other or environment.read(other)):
            return (
                f"This is one of {size} processes ({variable}), but its layers meet no replica of the others. For "
                f"statistics and gradients of all processes, write {advice}, or choose "
                "it where the script has an option for it. mode='local' is for statistics of each device."
            )
    return ""


def surprises(trainer: gluon.Trainer) -> Iterator[str]:
    """Says in what a net computes something else than it was asked for, which is rarely intended."""
    parameters = trainer._params
    replicas, layers = followers_of(parameters), _layers(parameters)
    apart = [one.name for one in replicas if one.reaches_other_processes() and one.settings.mode != "local"]
    several = any(store.num_workers > 1 for store in stores_of(parameters))
    by_horovod = any(cls.__module__.startswith("horovod.") for cls in type(trainer).__mro__)
    adds = by_horovod or isinstance(trainer._kvstore, ProcessStore) or named.is_of_workers(trainer._kvstore)
    if apart and several and not adds:
        yield (
            f"{some(apart, ', ')}: these layers share their statistics with other processes, and the gradients of this "
            f"Trainer stay in this one, with kvstore={trainer._kvstore_params['kvstore']!r}. Write "
            "gluon.Trainer(..., kvstore=kv) with the KVStore of the layers, or a horovod.mxnet.DistributedTrainer, "
            "unless the script adds gradients itself"
        )
    on_several = several or any(len(one._data or ()) > 1 for one in parameters)
    # After `install(convert=True)`, all of the net may be plain.
    if any(one.meets() for one in replicas) or (session.hooks["constructing"] and on_several):
        # Layers whose gamma is not trained are frozen and do not count. Operators in a graph of the net count.
        synchronised = [stem for stem, (mean, *_) in layers.items() if followers_of([mean])]
        trained = [stem for stem, (_, gamma, _) in layers.items() if gamma is not None and gamma.grad_req != "null"]
        plain = [stem for stem in trained if stem not in synchronised] + _called(parameters)
        if plain:
            yield (
                f"{len(synchronised)} of {len(synchronised) + len(plain)} layers of batch normalisation are "
                f"synchronised, and these are not: {some(plain, ', ')}. gluon_syncbn.convert(net) synchronises all "
                "layers. Where a block calls an operator, call a layer instead. gluon_syncbn.summary(net) lists all"
            )
    # Nothing is fused without a graph. Some layers may stay outside of graphs on purpose.
    fusing = [one for one in replicas if one.settings.fuses and not one.settings.use_global_stats]
    eager = [one.name for one in fusing if one.ran == EAGER]
    if eager and not any(one.ran == IN_GRAPH for one in replicas):
        yield (
            f"{some(eager, ', ')}: fuse=True fuses nothing here, because no graph contains these layers. Call "
            "net.hybridize() before the first step"
        )
    bypassed = []
    for mean, *affine in layers.values():
        ours, trains = followers_of([mean]), [one for one in affine if one is not None and one.grad_req != "null"]
        fresh = any(all(array._fresh_grad for array in one._data or ()) for one in trains)  # got gradients in this step
        if fresh and any(one.meets() for one in ours) and all(one.ran == NEVER for one in ours):
            bypassed.append(ours[0].name)
    if bypassed:
        yield (
            f"{some(bypassed, ', ')}: the parameters of these synchronised layers got gradients, but the layers were "
            "not computed. Something else normalises in their places: call the layers, and if the graph of the net was "
            "loaded or is out of date, call net.hybridize() again"
        )


def _layers(parameters: Sequence[gluon.Parameter]) -> Dict[str, List[Any]]:
    """Returns the running mean, gamma and beta of each layer, as their names tell; None for one that is not there."""
    by_name = {parameter.name: parameter for parameter in parameters}
    means = {name[: -len(mean)]: by_name[name] for name in by_name for mean in _MEANS if name.endswith(mean)}
    return {stem[:-1]: [mean, by_name.get(f"{stem}gamma"), by_name.get(f"{stem}beta")] for stem, mean in means.items()}


def _called(parameters: Sequence[gluon.Parameter]) -> List[str]:
    """Returns the BatchNorm operators in graphs of the net whose running statistics no name tells."""
    found: Dict[str, None] = {}
    for block in blocks.with_graphs_of({id(parameter) for parameter in parameters}):
        given = {parameter.name: parameter for is_input, parameter in block._cached_op_args if not is_input}
        for node in blocks.recorded(block):
            if node.operator in blocks.OPERATORS and not node.frozen:
                gamma, mean = given.get(node.inputs[1]), given.get(node.inputs[3])
                trains = gamma is None or gamma.grad_req != "null"
                if trains and (mean is None or not mean.name.endswith(_MEANS)):
                    found[node.name] = None
    return list(found)
