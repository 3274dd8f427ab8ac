"""Makes the parameters of a net the same on all devices of all processes, or those of a PyTorch module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Iterable, List, Mapping, Tuple, TypeVar

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter, ParameterDict

from ..layer import SyncBatchNorm
from ..mxnet_side import blocks
from ..system import arguments, kinds
from ..training.replicas import store_of
from .convert import NetT, forget_graphs

ModuleT = TypeVar("ModuleT")

_AFFINE = {"weight": "gamma", "bias": "beta"}  # of layers that normalise
_WITHOUT_AFFINE = {"gamma": 1, "beta": 0}


def broadcast_parameters(params: Any, kvstore: Any = None, root_rank: int = 0) -> None:
    """Gives every device of every process the parameters on the first context of rank ``root_rank``.

    Call it before the first step, in every process, with the same net. Then all start from the same weights and running
    statistics. Gluon's names may differ between processes. Within one process, all contexts get the parameters of the
    first. A net that a plain list hides, such as a teacher, is among the blocks of its net.

    ::

        # mpiexec -n 2 python train.py
        import gluon_syncbn
        from mxnet import gluon

        net = gluon.nn.Dense(2, in_units=3)
        net.initialize()
        gluon_syncbn.broadcast_parameters(net, gluon_syncbn.kvstore("mpi"))

    Parameters
    ----------
    params : gluon.Block, ParameterDict or dict
        A net, with all blocks that it holds, or the result of ``net.collect_params()``. Running statistics are
        included. The parameters must be initialised. If shapes are not known yet, predict with a batch first.
    kvstore : str or KVStore, optional
        A store of several processes, made by `gluon_syncbn.kvstore`, reaches the devices of all. Any other store
        reaches the devices of this process. By default the setting of `configure`, or the layers' own, or the only one.
    root_rank : int
        The rank of the process whose parameters are broadcast.

    Raises
    ------
    ValueError
        If an argument is not as described above.
    MXNetError
        If another process does not come in time, or has another net.
    """
    given = _listed(params)
    store = store_of(kvstore, given)
    root_rank = arguments.whole("root_rank", root_rank, 0, 0 if store is None else store.num_workers - 1)
    await_values("params", given)
    if store is not None:  # all raise an error if they differ
        ours = [(f"'{one.name}'", f"of shape {one.shape} and type {np.dtype(one.dtype).name}") for one in given]
        store.compare(store.tell_all("the parameters' shapes", ours), "the parameters: number")
    for number, parameter in enumerate(given):
        array = parameter.list_data()[0]
        value = array.asnumpy()
        if store is not None:
            part = value if store.rank == root_rank else value[:0]
            value = store.allgather(f"parameter {number}", part, equal=False)[root_rank]
        # MXNet's `set_data` drops what an optimizer in a KVStore keeps.
        if any((one.asnumpy() != value).any() for one in parameter.list_data()):
            parameter.set_data(kinds.like(mx.nd.array(value, dtype=value.dtype), array))


def await_values(argument: str, parameters: Iterable[Parameter]) -> None:
    """ValueError if some have none."""
    for parameter in parameters:
        if parameter._data is None:
            raise ValueError(
                f"{argument}: '{parameter.name}' without a value was given, expected initialised parameters: call "
                "initialize, and predict one batch if shapes are not known yet"
            )
    mx.nd.waitall()  # a static graph does not tell MXNet that it writes running statistics


def _listed(params: Any) -> List[Parameter]:
    if isinstance(params, Block):
        return list(dict.fromkeys(one for block in blocks.iterate(params) for one in block._reg_params.values()))
    values = list(params.values()) if isinstance(params, (dict, ParameterDict)) else []
    if not values or not all(isinstance(value, Parameter) for value in values):
        arguments.refuse("params", params, "a gluon.Block, or parameters as net.collect_params() gives them")
    return values


# ---- PyTorch -----------------------------------------------------------------------------------------------


def from_torch(net: NetT, module: Any) -> NetT:
    """Gives a net the parameters and running statistics of a PyTorch module.

    Layers are paired in the order in which they were registered. Only their shapes are compared, so compare a
    prediction. From a module, layers of batch normalisation also take ``eps``, ``1 - momentum`` and
    ``running_variance='unbiased'``, as PyTorch computes it.

    Parameters
    ----------
    net : gluon.Block
        A net on which ``initialize`` was called, changed in place. Channels are axis 1, as in PyTorch.
    module : torch.nn.Module or dict
        The module or its ``state_dict()``. Arrays of NumPy may stand for tensors.

    Returns
    -------
    gluon.Block
        ``net``.

    Raises
    ------
    ValueError
        If the two have different layers or shapes, a layer of batch normalisation has no counterpart, or the net is not
        initialised. Then nothing has been changed.
    """
    state = module if isinstance(module, Mapping) else _state_of(module)
    pairs = _pairs(net, module, state)
    for block, _, keys in pairs:
        if "gamma" in keys and block._kwargs.get("fix_gamma") and not (_array(state[keys["gamma"]]) == 1).all():
            raise ValueError(f"net: '{block.name}' with scale=False was given, expected scale=True for {keys['gamma']}")
    for block, theirs, keys in pairs:
        for name, parameter in block._reg_params.items():
            if name in keys:
                value = _array(state[keys[name]])
            else:  # the shape of ours may not be known yet
                value = np.full(tuple(state[keys["running_mean"]].shape), _WITHOUT_AFFINE[name])
            parameter.set_data(kinds.like(mx.nd.array(value, dtype=parameter.dtype), kinds.variable(name)))
        if theirs is not None:
            block._kwargs.update(eps=theirs.eps, momentum=1 - theirs.momentum)
            if isinstance(block, SyncBatchNorm):
                block._replicas.settings = replace(block._replicas.settings, unbiased=True)
    forget_graphs(net)
    return net


def to_torch(net: Block, module: ModuleT) -> ModuleT:
    """Gives a PyTorch module the parameters and running statistics of a net: the reverse of `from_torch`.

    Parameters
    ----------
    net : gluon.Block
        An initialised net.
    module : torch.nn.Module
        The module, changed in place.

    Returns
    -------
    torch.nn.Module
        ``module``.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    ValueError
        If the two have different layers or shapes, or the net is not initialised. Then nothing has been changed.
    """
    given: Any = module
    pairs = _pairs(net, given, _state_of(given))
    values: Dict[str, Any] = {}
    import torch

    for block, _, keys in pairs:
        await_values("net", map(block._reg_params.get, keys))
        for name, key in keys.items():
            first, *others = (array.asnumpy() for array in block._reg_params[name].list_data())
            alike = all(np.array_equal(first, other) for other in others)  # else plain running statistics of each
            value = first if alike else np.mean([first, *others], axis=0)
            ones = name == "gamma" and block._kwargs.get("fix_gamma")  # which count, whatever gamma holds
            values[key] = torch.from_numpy(np.ones_like(value) if ones else value)
    given.load_state_dict(values, strict=False)  # without PyTorch's counters of batches
    for block, theirs, _ in pairs:
        if theirs is not None:
            theirs.eps, theirs.momentum = block._kwargs["eps"], 1 - block._kwargs["momentum"]
    return module


def _state_of(module: Any) -> Mapping[str, Any]:
    if not hasattr(module, "load_state_dict"):
        arguments.refuse("module", module, "a torch.nn.Module")
    state: Mapping[str, Any] = module.state_dict()
    return state


def _pairs(net: Block, module: Any, state: Mapping[str, Any]) -> List[Tuple[Any, Any, Dict[str, str]]]:
    """Returns each block with PyTorch's layer of batch normalisation, None for other layers and without a module; and
    the keys of the module's state by the names of the block's parameters.
    """
    layers = [block for block in blocks.iterate(arguments.block("net", net)) if block._reg_params]
    owners: Dict[str, Dict[str, str]] = {}
    for key in state:
        owner, _, name = key.rpartition(".")
        if name != "num_batches_tracked":  # counts for momentum=None alone
            owners.setdefault(owner, {})[name] = key
    if len(layers) != len(owners):
        raise ValueError(f"module: {len(owners)} layers with parameters were given, expected the {len(layers)} of net")
    modules = {} if isinstance(module, Mapping) else dict(module.named_modules())
    pairs = []
    for block, (owner, names) in zip(layers, owners.items()):
        ours: Dict[str, Any] = block._reg_params
        normalises = blocks.is_batch_norm(block)
        theirs = modules.get(owner) if normalises else None
        known = hasattr(theirs, "running_mean")  # else it is another layer, whose parameters do not fit
        if theirs is not None and known and (theirs.momentum is None or theirs.running_mean is None):
            raise ValueError(
                f"module: {theirs!r} was given, but a cumulative mean, or none, has no counterpart: give the layer a "
                "momentum and running statistics"
            )
        keys = {_AFFINE.get(name, name) if "gamma" in ours else name: key for name, key in names.items()}
        layout = getattr(block, "_kwargs", {}).get("layout", "NC")
        optional = {name for name in _WITHOUT_AFFINE if normalises and not ours[name]._differentiable}
        fits = ours.keys() - optional <= keys.keys() <= ours.keys() and layout.startswith("NC")
        if not fits or not all(_alike(ours[name].shape, tuple(state[key].shape)) for name, key in keys.items()):
            given = ", ".join(f"{key} {tuple(state[key].shape)}" for key in names.values())
            expected = ", ".join(f"{name} {parameter.shape}" for name, parameter in ours.items())
            raise ValueError(
                f"module: {given} were given, expected {expected} of '{block.name}', with channels on axis 1"
            )
        if any(parameter._data is None and not parameter._deferred_init for parameter in ours.values()):
            raise ValueError(f"net: '{block.name}' without parameters was given, expected a net after initialize()")
        pairs.append((block, theirs, keys))
    return pairs


def _alike(ours: Any, theirs: Tuple[int, ...]) -> bool:
    """0 in a shape of Gluon's is not known yet."""
    return ours is None or (len(ours) == len(theirs) and all(a in (0, b) for a, b in zip(ours, theirs)))


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
