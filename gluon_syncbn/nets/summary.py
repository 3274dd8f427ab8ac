"""Shows which layers of a network are synchronised, which are not, and why."""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

from mxnet.context import Context
from mxnet.gluon import Block, SymbolBlock, nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from ..layer import SyncBatchNorm
from ..mxnet_side import blocks
from ..mxnet_side.op import NAME
from ..system import arguments
from ..training.replicas import stores_of
from .graphs import Opened

SYNCHRONISED = "synchronised"
_FROZEN = "plain, because it is frozen: use_global_stats"
_OF_ONE_SAMPLE = (nn.GroupNorm, nn.InstanceNorm, nn.LayerNorm)
_HEADER = ("Layer (type)", "Channels", "Mode", "Slots", "Contexts", "Fused", "Statistics")


class Row(NamedTuple):
    layer: str
    channels: Optional[int] = None  # not known yet, or a node of a graph
    mode: Optional[str] = None
    slots: Optional[int] = None
    contexts: Sequence[Context] = ()
    fused: str = ""
    statistics: str = ""

    @property
    def synchronised(self) -> bool:
        return self.statistics.startswith(SYNCHRONISED)


class Summary(List[Row]):
    """The rows of a net's normalisation layers, and as ``str`` their table."""

    stores: List[str]

    def __str__(self) -> str:
        texts = [_HEADER, *([str(cell or "-") for cell in row] for row in self)]
        widths = [max(map(len, column)) for column in zip(*texts)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in texts]
        long = max(map(len, lines))
        stores = [f"Processes: {store}" for store in self.stores]
        return "\n".join(["-" * long, lines[0], "=" * long, *lines[1:], "=" * long, repr(self), *stores, "-" * long])

    def __repr__(self) -> str:  # short, because an interactive shell shows it below the printed table
        of_batches = [row for row in self if row.statistics != _NO_BATCH]
        synchronised = sum(row.synchronised for row in of_batches)
        return f"Layers of batch normalisation: {len(of_batches)}, synchronised: {synchronised}"


def summary(net: Block, *, show: bool = True) -> Summary:
    """Returns every normalisation layer of a network, and whether its statistics are synchronised, with the reason.

    A layer that uses its own statistics, for example on a single context, is *plain*. *Fused* are the operations that a
    layer computes as well: its activation, or the operators that ``convert(fuse=True)`` absorbed, once its graph is
    recorded. A layer in an attribute of an object that is not a block has a row once it has run. So has a BatchNorm
    operator that a ``hybrid_forward`` calls, once a graph is recorded. The last lines count the layers of batch
    normalisation, and tell how statistics and gradients travel between processes.

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer.
    show : bool
        Whether to print the table.

    Returns
    -------
    list of Row
        A row for each layer: the texts ``layer``, ``fused`` and ``statistics``, the list ``contexts``, and
        ``synchronised``. Where they are known, also the numbers ``channels`` and ``slots``, and the text ``mode``, else
        None. ``str`` of the list is the table.

    Raises
    ------
    ValueError
        If an argument is not as described above.
    """
    within = list(blocks.iterate(arguments.block("net", net)))
    rows = Summary(row for block in within for row in _rows(block))
    means = {name for block in within if isinstance(block, SymbolBlock) for name in block.params}
    means.update(block.running_mean.name for block in within if blocks.is_batch_norm(block))
    graphs = [one for one in within if getattr(one, "_cached_graph", ()) and not isinstance(one, SymbolBlock)]
    nodes = [node for block in graphs for node in blocks.recorded(block) if node.operator != NAME]
    called = dict.fromkeys(f"{node.name} ({node.operator})" for node in nodes if node.inputs[3] not in means)
    why = "plain, because a hybrid_forward calls the operator; call a layer there"
    rows += [Row(layer, statistics=why) for layer in called]
    rows.stores = [repr(store) for store in stores_of(net.collect_params().values())]
    if arguments.flag("show", show):
        print(rows)
    return rows


def assert_synchronised(net: Block) -> None:
    """Checks that all layers of batch normalisation are synchronised, but for frozen ones.

    Call it behind ``initialize``, because a layer on one context is not synchronised.

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer.

    Raises
    ------
    ValueError
        If ``net`` is not a Gluon block.
    AssertionError
        If a layer is not synchronised, or there is none. The text names the layers, with the reasons of `summary`.
    """
    rows = [row for row in summary(net, show=False) if row.statistics not in (_NO_BATCH, _FROZEN)]
    left = [f"{row.layer}: {row.statistics}" for row in rows if not row.synchronised]
    if not rows:
        raise AssertionError(f"'{net.name}' has no layer of batch normalisation that takes statistics of its batch")
    if left:
        raise AssertionError(
            f"{len(left)} of {len(rows)} layers of batch normalisation are not synchronised: "
            + arguments.some(left, "; ")
        )


_NO_BATCH = "plain, because it normalises each sample by itself"


def _rows(block: Any) -> Iterator[Row]:
    if isinstance(block, SymbolBlock):
        there = f"it is in the recorded graph {block.name}".rstrip() + "; convert(net) changes it"
        for node in block._left if isinstance(block, Opened) else blocks.recorded(block):
            ours, statistics = node.operator == NAME, f"plain, because {node.reason or there}"
            if ours and not node.reason:
                statistics = f"{_FROZEN if node.frozen else SYNCHRONISED}, in a recorded graph"
            yield Row(f"{node.name} ({'SyncBatchNorm' if ours else node.operator})", statistics=statistics)
    elif blocks.is_batch_norm(block) or isinstance(block, _OF_ONE_SAMPLE):
        known = block.gamma._data is not None or block.gamma._deferred_init
        contexts = list(block.gamma.list_ctx()) if known else []
        channels = (block.gamma.shape or [0])[0] or None
        row = Row(f"{block.name} ({type(block).__name__})", channels, contexts=contexts, statistics=_NO_BATCH)
        if isinstance(block, SyncBatchNorm):
            settings = block._replicas.settings
            mode = settings.mode
            if settings.group_size:
                mode += f", groups of {settings.group_size}"
            if settings.groups:
                mode += f", {len(settings.groups)} named groups"
            fused = block._replicas.taken_in or settings.behind
            statistics = _statistics(block, contexts)
            row = row._replace(mode=mode, slots=settings.virtual_devices, fused=fused, statistics=statistics)
        elif blocks.is_batch_norm(block):
            whose = "contrib's" if type(block) is ContribSyncBatchNorm else "BatchNorm"
            reason = blocks.difference(block) or f"it is {whose}; convert(net) changes it"
            row = row._replace(statistics=f"plain, because {reason}")
        yield row


def _statistics(layer: SyncBatchNorm, contexts: List[Context]) -> str:
    replicas, settings = layer._replicas, layer._replicas.settings
    if settings.use_global_stats:
        return _FROZEN
    if settings.mode == "local":
        return "plain, because mode 'local' shares nothing"
    if settings.group_size == 1 or {len(ranks) for ranks in settings.groups or ()} == {1}:
        return "plain, because each group has one device"
    if not contexts:
        return "not known before it is initialised"
    if replicas.problem_on(contexts):
        return f"an error in training: {replicas.problem_on(contexts)}"
    if not replicas.reaches_other_processes() and len(contexts) * settings.virtual_devices == 1:
        return "plain, because it has one replica"
    return SYNCHRONISED
