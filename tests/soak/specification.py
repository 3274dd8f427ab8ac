"""What a net computes, in float64 NumPy: a walk over its Gluon blocks, with gluon_syncbn.reference for the layers."""

from collections import Counter
from typing import Any, Callable, Dict, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import nn
from permutations import derangement
from poolings import settings_of

from gluon_syncbn import SyncBatchNorm, reference

from .nets import Residual, Sum

Values = List[np.ndarray]  # one for each replica
Back = Callable[[Values], Values]  # from the gradients of the outputs to those of the inputs
BackOfLayer = Callable[[Values], reference.Gradients]


class Specification:
    """Holds what the net's parameters have to be. Replicas are given by their contexts, in their order."""

    def __init__(self, net: nn.HybridBlock, contexts: Sequence[mx.Context], eager: bool, seed: int) -> None:
        self.net, self.contexts, self.eager, self.seed = net, contexts, eager, seed
        self.parameters = {p.name: p for p in net.collect_params().values()}
        self.weights: Dict[str, np.ndarray] = {}
        self.running: Dict[Tuple[str, mx.Context], np.ndarray] = {}
        self.gradients: Dict[Tuple[str, mx.Context], np.ndarray] = {}  # of the backwards since it was emptied
        self._calls: Counter = Counter()  # of each layer and node
        self._uses: Counter = Counter()  # of each layer in this forward
        self.read_weights()
        self.read_running()

    # ---- parameters --------------------------------------------------------------------------------------------

    def trained(self) -> List[str]:
        return [name for name, p in self.parameters.items() if p.grad_req != "null"]

    def read_weights(self) -> None:
        """From the net's first context."""
        for name, p in self.parameters.items():
            if not name.endswith(("running_mean", "running_var")):
                self.weights[name] = p.data(self.contexts[0]).asnumpy().astype("float64")

    def read_running(self) -> None:
        for name, p in self.parameters.items():
            if name.endswith(("running_mean", "running_var")):
                for context in self.contexts:
                    self.running[name, context] = p.data(context).asnumpy().astype("float64")

    def average_running(self) -> None:
        """What `save_parameters` writes."""
        for name in {name for name, _ in self.running}:
            mean = np.mean([self.running[name, context] for context in self.contexts], axis=0)
            self.running.update({(name, context): mean for context in self.contexts})

    def spread_running(self) -> None:
        """From the first context, as `gluon.Trainer` does with all parameters before its first step."""
        self.running = {(name, context): self.running[name, self.contexts[0]] for name, context in self.running}

    def leave_out(self, used: Sequence[mx.Context], shares: bool, zeroes: bool) -> None:
        """After a step on some contexts; ``shares``: the others take their running statistics."""
        for name, context in self.running:
            if shares and context not in used:
                self.running[name, context] = self.running[name, used[0]]
        if zeroes:
            self.forget_gradients([context for context in self.contexts if context not in used])

    def forget_gradients(self, places: Sequence[mx.Context]) -> None:
        """Those on these contexts are about to be written anew."""
        self.gradients = {(name, place): g for (name, place), g in self.gradients.items() if place not in places}

    def descend(self, rate: float, everywhere: bool) -> None:
        """A step of SGD; ``everywhere``: each context is left with the gradient of all."""
        for name in self.trained():
            total = sum(self.gradients.get((name, context), 0) for context in self.contexts)
            self.weights[name] = self.weights[name] - rate * total
            if everywhere:
                self.gradients.update({(name, context): total for context in self.contexts})

    def start_over(self, seed: int) -> None:
        """`configure(seed=...)`."""
        self.seed = seed
        self._calls.clear()

    # ---- the walk ----------------------------------------------------------------------------------------------

    def forward(self, shards: Values, places: Sequence[mx.Context]) -> Tuple[Values, Back]:
        """Outputs, and what adds to `gradients`. Moves the running statistics on."""
        self._uses.clear()
        return self._walk(self.net, [x.astype("float64") for x in shards], places)

    def predict(self, x: np.ndarray, place: mx.Context) -> np.ndarray:
        return self._walk(self.net, [x.astype("float64")], [place], frozen=True)[0][0]

    def _walk(self, block: Any, xs: Values, places: Sequence[mx.Context], frozen: bool = False) -> Tuple[Values, Back]:
        if isinstance(block, nn.HybridSequential):
            backs = []
            for child in block:
                xs, back = self._walk(child, xs, places, frozen)
                backs.append(back)

            def through(dys: Values) -> Values:
                for back in reversed(backs):
                    dys = back(dys)
                return dys

            return xs, through
        if isinstance(block, Sum):
            (left, back_left), (right, back_right) = (
                self._walk(branch, xs, places, frozen) for branch in (block.left, block.right)
            )
            return _added(left, right), lambda dys: _added(back_left(dys), back_right(dys))
        if isinstance(block, Residual):
            zs, back_z = self._walk(block.linear, xs, places, frozen)
            epilogue = {"addends": xs, **block.activation._asdict()}
            ys, back_layer = self._layer(block.norm, zs, places, frozen, **epilogue)

            def back_both(dys: Values) -> Values:
                gradients = back_layer(dys)
                return _added(back_z(gradients.dxs), gradients.daddends)

            return ys, back_both
        if isinstance(block, nn.BatchNorm):
            ys, back_layer = self._layer(block, xs, places, frozen)
            return ys, lambda dys: back_layer(dys).dxs
        if isinstance(block, (nn.Conv2D, nn.Dense)):
            apply, differentiate = (
                (_convolved, _convolved_back) if isinstance(block, nn.Conv2D) else (_dense, _dense_back)
            )
            weight = self.weights[block.weight.name]

            def back(dys: Values) -> Values:
                dxs = []
                for x, dy, place in zip(xs, dys, places):
                    dx, dw = differentiate(x, weight, dy)
                    dxs.append(dx)
                    self._add(block.weight, place, dw)
                return dxs

            return [apply(x, weight) for x in xs], back
        if isinstance(block, nn.Activation):
            ys = [np.tanh(x) for x in xs]
            return ys, lambda dys: [dy * (1 - y**2) for y, dy in zip(ys, dys)]
        assert isinstance(block, nn.Dropout), block
        return xs, lambda dys: dys

    def _add(self, parameter: mx.gluon.Parameter, place: mx.Context, gradient: np.ndarray) -> None:
        key = parameter.name, place
        self.gradients[key] = self.gradients.get(key, 0) + gradient

    # ---- the layer ---------------------------------------------------------------------------------------------

    def _layer(
        self, layer: SyncBatchNorm, xs: Values, places: Sequence[mx.Context], frozen: bool, **epilogue: Any
    ) -> Tuple[Values, BackOfLayer]:
        """``epilogue``: what the layer takes in of the net, in place of its own activation."""
        gamma, beta = self.weights[layer.gamma.name], self.weights[layer.beta.name]
        if frozen:  # in one place, without a backward
            running = (self.running[p.name, places[0]] for p in (layer.running_mean, layer.running_var))
            settings = {**settings_of(layer), **epilogue}
            state = reference.forward(xs, gamma, beta, *running, use_global_stats=True, **settings)
            return state.outputs, lambda dys: self._layer_back(layer, xs, dys, places, state)
        pooling = layer._replicas.pooling._asdict()
        if pooling["mode"] == "shuffle":
            pooling["permutation"] = self._permutation(layer, xs, pooling["virtual_devices"])
        # As running statistics move from 0 and from 1, so they do from any value.
        from_0, from_1 = (
            reference.forward(xs, gamma, beta, start, start, **{**settings_of(layer), **pooling, **epilogue})
            for start in (np.zeros_like(gamma), np.ones_like(gamma))
        )
        moved = set()
        for i, place in enumerate(places):
            if place in moved and pooling["mode"] != "local":
                continue  # of the replicas that share a context, the first hands its statistics on
            moved.add(place)
            for parameter, zero, one in (
                (layer.running_mean, from_0.running_mean[i], from_1.running_mean[i]),
                (layer.running_var, from_0.running_var[i], from_1.running_var[i]),
            ):
                self.running[parameter.name, place] = zero + (one - zero) * self.running[parameter.name, place]
        return from_0.outputs, lambda dys: self._layer_back(layer, xs, dys, places, from_0)

    def _layer_back(
        self, layer: SyncBatchNorm, xs: Values, dys: Values, places: Sequence[mx.Context], state: reference.Forward
    ) -> reference.Gradients:
        gradients = reference.backward(xs, dys, self.weights[layer.gamma.name], state)
        for place, dgamma, dbeta in zip(places, gradients.dgammas, gradients.dbetas):
            self._add(layer.gamma, place, dgamma)
            self._add(layer.beta, place, dbeta)
        return gradients

    def _permutation(self, layer: SyncBatchNorm, xs: Values, slots: int) -> List[int]:
        number = layer._replicas.id
        use = self._uses[number]
        self._uses[number] += 1
        node = -1 if self.eager else use  # a graph has a node for each use
        call = self._calls[number, node]
        self._calls[number, node] += 1
        filled = sum(part.size > 0 for x in xs for part in np.array_split(x, slots))
        return derangement(self.seed, number, node, call, filled)


def _added(xs: Values, ys: Values) -> Values:
    return [x + y for x, y in zip(xs, ys)]


# 3x3 convolutions with a border of zeros: x [N, I, H, W], weight [O, I, 3, 3], y [N, O, H, W]


def _windows(x: np.ndarray) -> np.ndarray:
    """[N, I, H, W, 3, 3]"""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))


def _convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.einsum("nihwab,oiab->nohw", _windows(x), weight, optimize=True)


def _convolved_back(x: np.ndarray, weight: np.ndarray, dy: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    turned = weight.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]
    return _convolved(dy, turned), np.einsum("nihwab,nohw->oiab", _windows(x), dy, optimize=True)


# Dense layers along the last axis: x [..., I], weight [O, I], y [..., O]


def _dense(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x @ weight.T


def _dense_back(x: np.ndarray, weight: np.ndarray, dy: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    return dy @ weight, dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
