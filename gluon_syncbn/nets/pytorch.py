"""Copies parameters between a net and a PyTorch module with the same layers in the same order."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Tuple, TypeVar

import mxnet as mx
import numpy as np
from mxnet.gluon import Block

from ..layer import SyncBatchNorm
from ..mxnet_side import blocks
from ..system import arguments, kinds
from .convert import forget_graphs
from .parameters import check_values

NetT = TypeVar("NetT", bound=Block)
ModuleT = TypeVar("ModuleT")

_AFFINE = {"weight": "gamma", "bias": "beta"}  # of layers that normalise
_WITHOUT_AFFINE = {"gamma": 1, "beta": 0}


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
        ``net``, the same object.

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
            missing = np.full(parameter.shape, _WITHOUT_AFFINE.get(name))
            value = _array(state[keys[name]]) if name in keys else missing
            parameter.set_data(kinds.like(mx.nd.array(value, dtype=parameter.dtype), kinds.variable(name)))
        if theirs is not None:
            block._kwargs.update(eps=theirs.eps, momentum=1 - theirs.momentum)
            if isinstance(block, SyncBatchNorm):
                block._unbiased = True
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
        ``module``, the same object.

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
        check_values("net", map(block._reg_params.get, keys))
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


class _Pair(NamedTuple):
    block: Any
    theirs: Any  # PyTorch's layer of batch normalisation; None for other layers, and without a module
    keys: Dict[str, str]  # of the module's state, by the names of the block's parameters


def _pairs(net: Block, module: Any, state: Mapping[str, Any]) -> List[_Pair]:
    layers = [block for block in blocks.iterate(arguments.block("net", net)) if block._reg_params]
    owners: Dict[str, Dict[str, str]] = {}
    for key in state:
        owner, _, name = key.rpartition(".")
        if name != "num_batches_tracked":  # counts for momentum=None alone
            owners.setdefault(owner, {})[name] = key
    if len(layers) != len(owners):
        raise ValueError(f"module: {len(owners)} layers with parameters were given, expected the {len(layers)} of net")
    modules = {} if isinstance(module, Mapping) else dict(module.named_modules())
    return [_pair(block, modules.get(owner), names, state) for block, (owner, names) in zip(layers, owners.items())]


def _pair(block: Any, theirs: Any, names: Dict[str, str], state: Mapping[str, Any]) -> _Pair:
    ours: Dict[str, Any] = block._reg_params
    theirs = theirs if blocks.is_batch_norm(block) else None
    if theirs is not None and (theirs.momentum is None or theirs.running_mean is None):
        raise ValueError(f"module: {theirs!r} was given, but a cumulative mean, or none, has no counterpart")
    keys = {_AFFINE.get(name, name) if "gamma" in ours else name: key for name, key in names.items()}
    layout = getattr(block, "_kwargs", {}).get("layout", "NC")
    optional = set() if not blocks.is_batch_norm(block) else {n for n in _WITHOUT_AFFINE if not ours[n]._differentiable}
    fits = ours.keys() - optional <= keys.keys() <= ours.keys() and layout.startswith("NC")
    if not fits or not all(_alike(ours[name].shape, tuple(state[key].shape)) for name, key in keys.items()):
        given = ", ".join(f"{key} {tuple(state[key].shape)}" for key in names.values())
        expected = ", ".join(f"{name} {parameter.shape}" for name, parameter in ours.items())
        raise ValueError(f"module: {given} were given, expected {expected} of '{block.name}', with channels on axis 1")
    if any(parameter._data is None and not parameter._deferred_init for parameter in ours.values()):
        raise ValueError(f"net: '{block.name}' without parameters was given, expected a net after initialize()")
    return _Pair(block, theirs, keys)


def _alike(ours: Any, theirs: Tuple[int, ...]) -> bool:
    """0 in a shape of Gluon's is not known yet."""
    return ours is None or (len(ours) == len(theirs) and all(a in (0, b) for a, b in zip(ours, theirs)))


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
