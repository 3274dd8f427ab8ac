"""A case on its way through MXNet, each step checked against `truth`."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import mxnet as mx
import numpy as np
from internals import replicas_of
from mxnet import autograd, nd
from mxnet.gluon import nn
from permutations import derangement
from replicas import WAYS, in_blocks, in_threads, on_devices, rounded

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd
from gluon_syncbn.mxnet_side import blocks
from gluon_syncbn.system import kinds

from . import events
from .case import Case
from .truth import Forward, Gradients, Near, Truth, exact

TIMEOUT = 30.0  # seconds that a replica waits for the others
#: Another order of the same operations has other roundings: the error may be this many times the bound.
TIMES = 4.0
START = exact(np.array(0.5))  # of a gradient to which others are added


class Plain(nn.HybridBlock):
    """Plain BatchNorm with what stands behind it, for `convert(fuse=True)`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self.norm = nn.BatchNorm(in_channels=case.channels, **case.settings)

    def hybrid_forward(self, F: Any, x: Any, addend: Any = None) -> Any:
        z = self.norm(x)
        z = z if addend is None else z + addend
        kind = self._case.activation
        if kind == "leaky":
            return F.LeakyReLU(z, act_type="leaky", slope=self._case.slope)
        if kind == "relu6":
            return F.clip(z, 0, 6)
        return z if kind is None else F.Activation(z, act_type="relu")


class Batch(NamedTuple):
    """One array for each replica."""

    shards: List[np.ndarray]
    addends: Optional[List[np.ndarray]]
    xs: List[nd.NDArray]
    others: Optional[List[nd.NDArray]]  # the addends; the data itself where that is added
    masks: List[Optional[np.ndarray]]
    marks: List[Optional[nd.NDArray]]  # the masks

    def inputs(self, i: int) -> List[nd.NDArray]:
        """Of the layer in replica i."""
        given = [self.xs[i], None if self.others is None else self.others[i], self.marks[i]]
        return [array for array in given if array is not None]


class Trial:
    def __init__(self, case: Case, contexts: Sequence[mx.Context]) -> None:
        self.case, self.rng = case, case.rng
        self.contexts = {i: contexts[i] for i in case.contexts}
        self.places = [contexts[i] for i in case.contexts]
        gluon_syncbn.configure(kvstore=None)
        self.start_over(case.seed)
        self.net = self._build()
        self.layer = next(block for block in blocks.iterate(self.net) if isinstance(block, nn.BatchNorm))
        self.net.cast(case.dtype)
        self.net.initialize(ctx=self.places)
        self.net.hybridize(**WAYS[case.way])
        rng, channels = self.rng, case.channels
        values = {
            "gamma": rng.uniform(0.5, 2, channels) * rng.choice((-1, 1), channels),
            "beta": 0.7 * rng.randn(channels),
            "running_mean": rng.randn(channels),
            "running_var": rng.uniform(0.5, 2, channels),
        }
        for name, value in values.items():
            parameter = getattr(self.layer, name)
            parameter.set_data(self._put([value], parameter.dtype)[0])
            values[name] = parameter.data(self.places[0]).asnumpy().astype("float64")
            parameter.grad_req = case.reqs.get(name, "null")
            if parameter.grad_req == "add":
                for context in self.contexts.values():
                    fill(parameter.grad(context), START.value)
        self.truth = Truth(case, **values)
        if case.predicts:
            self.predict(0)  # which makes the graph

    def _build(self) -> nn.HybridBlock:
        case = self.case
        if case.fused:
            return gluon_syncbn.convert(Plain(case), fuse=True, **case.pooling)
        kind = SyncBatchNorm if case.addend is None else SyncBatchNormAdd
        epilogue = {"activation": case.activation, "slope": case.slope}
        layer = kind(in_channels=case.channels, **case.settings, **epilogue, **case.pooling)
        return gluon_syncbn.revert(layer) if case.reverted else layer

    def run(self) -> None:
        for number, kind in enumerate(self.case.steps):
            print(f"step {number}: {kind}")
            getattr(self, kind)() if hasattr(self, kind) else getattr(events, kind)(self)
        mx.nd.waitall()

    def start_over(self, seed: int) -> None:
        self.seed, self.calls = seed, 0
        gluon_syncbn.configure(timeout=TIMEOUT, seed=seed)

    # ---- steps -------------------------------------------------------------------------------------------------

    def train(self, backward: bool = True) -> None:
        truth, batch = self.truth, self.batch()
        with autograd.record() if backward else autograd.train_mode():
            ys = self.issue(batch)
        forward = truth.forward(batch.shards, batch.addends, batch.masks, self._permutation(batch))
        gradients = self._backward(batch, forward, ys) if backward else None
        if self.case.way == "static_shape":
            mx.nd.waitall()  # reading running statistics does not wait until such a graph has written them
        self._check_all("y", ys, self._stored(forward.ys))
        if gradients is not None:
            self._check_inputs(batch, gradients)
            self._check_parameters(gradients)
        self.check_running()

    def forward(self) -> None:
        """Training without a backward: the running statistics move on."""
        self.train(backward=False)

    def predict(self, replica: Optional[int] = None) -> None:
        batch = self.batch()
        full = [i for i, x in enumerate(batch.shards) if x.size]
        i = full[0] if replica == 0 else full[self.rng.randint(len(full))]
        y = self.net(*batch.inputs(i))
        addend = None if batch.addends is None else batch.addends[i]
        want = self.truth.predicted(batch.shards[i], addend, self.case.contexts[i]).stored(self.case.dtype)
        self._check("prediction", kinds.values(y), want)

    # ---- parts of a step ---------------------------------------------------------------------------------------

    def batch(self) -> Batch:
        case = self.case
        shards = case.shards()
        addends = {None: None, "x": shards, "own": case.like(shards)}[case.addend]
        xs = self._inputs(shards, "x")
        others = xs if case.addend == "x" else None if addends is None else self._inputs(addends, "addend")
        masks = case.masks(shards)
        marks = [None if m is None else self._put([m], m.dtype, [place])[0] for m, place in zip(masks, self.places)]
        for mark in marks:
            if mark is not None:
                mark.attach_grad()
                fill(mark.grad, 1)
        return Batch(shards, addends, xs, others, masks, marks)

    def _put(self, arrays: Sequence[np.ndarray], dtype: Any = None, places: Any = None) -> List[nd.NDArray]:
        arrays = on_devices(arrays, places or self.places, dtype or self.case.dtype)
        return [array.as_np_ndarray() for array in arrays] if self.case.of_np else arrays

    def _lay_out(self, arrays: Sequence[np.ndarray], name: str) -> List[nd.NDArray]:
        if name not in self.case.in_blocks:
            return self._put(arrays)
        return [in_blocks(array, place, self.case.dtype) for array, place in zip(arrays, self.places)]

    def _inputs(self, arrays: Sequence[np.ndarray], name: str) -> List[nd.NDArray]:
        inputs = self._lay_out(arrays, name)
        if self.case.stype:
            inputs = [array.tostype(self.case.stype) for array in inputs]
        for array in inputs:
            if self.case.reqs[name] != "null":
                array.attach_grad(self.case.reqs[name])
                fill(array.grad, START.value)
        return inputs

    def issue(self, batch: Batch) -> List[nd.NDArray]:
        ys: Dict[int, nd.NDArray] = {}
        order = self.rng.permutation(len(self.places))
        mode = autograd.record if autograd.is_recording() else autograd.train_mode

        def replica(k: int) -> None:
            with mode(), self.case.scope():  # which are each thread's own
                ys[order[k]] = self.net(*batch.inputs(order[k]))

        if self.case.threads:
            in_threads(replica, len(order))
        else:
            for k in range(len(order)):
                replica(k)
        return [ys[i] for i in range(len(ys))]

    def _permutation(self, batch: Batch) -> Sequence[int]:
        """The package's draw; what becomes of it is the truth's own."""
        if self.case.mode != "shuffle" or self.case.settings["use_global_stats"]:
            return []
        node = -1 if self.case.way == "eager" else 0
        call, self.calls = self.calls, self.calls + 1
        return derangement(
            self.seed, replicas_of(self.layer).id, node, call, self.case.filled(batch.shards, batch.masks)
        )

    def _backward(self, batch: Batch, forward: Forward, ys: Sequence[nd.NDArray]) -> Gradients:
        """No head where rounding decides about a gradient, and none so large that one overflows the type."""
        truth, dtype = self.truth, self.case.dtype
        sure = [~truth.undecided(z, TIMES) for z in forward.zs]
        heads = [head * kept for head, kept in zip(self.case.like(batch.shards), sure)]
        while True:
            heads = [rounded(head, dtype) for head in heads]
            gradients = truth.backward(forward, batch.shards, heads)
            largest = max(float(np.abs(g.value).max(initial=0)) for g in gradients.xs)
            if largest < np.finfo(heads[0].dtype).max / 8:
                break
            heads = [head / 16 for head in heads]
        dys, order = self._lay_out(heads, "heads"), self.rng.permutation(len(ys))
        if self.rng.rand() < 0.3:
            for i in order:
                ys[i].backward(dys[i])
        else:
            autograd.backward([ys[i] for i in order], [dys[i] for i in order])
        return gradients

    # ---- checks ------------------------------------------------------------------------------------------------

    def _stored(self, values: Sequence[Near]) -> List[Near]:
        return [value.stored(self.case.dtype) for value in values]

    def _check_inputs(self, batch: Batch, gradients: Gradients) -> None:
        dxs, addends = self._stored(gradients.xs), self._stored(gradients.addends)
        if self.case.addend == "x":
            dxs = self._stored([dx.plus(addend) for dx, addend in zip(dxs, addends)])
        for name, arrays, wants in (("x", batch.xs, dxs), ("addend", batch.others, addends)):
            req = self.case.reqs[name]
            if req == "null":
                continue
            wants = [self.truth.accumulated(req, START, want, self.case.dtype) for want in wants]
            self._check_all(f"gradient of {name}", [array.grad for array in arrays], wants)
        frozen = self.case.settings["use_global_stats"]  # in whose graphs nothing uses a mask
        assert frozen or not any(mark is not None and mark.grad.asnumpy().any() for mark in batch.marks)

    def _check_parameters(self, gradients: Gradients) -> None:
        for name, parts in (("gamma", gradients.gammas), ("beta", gradients.betas)):
            req = self.case.reqs[name]
            if req == "null":
                continue
            for (i, context), part in zip(self.contexts.items(), parts):
                before = self.truth.gradients.get((name, i), START)
                want = self.truth.accumulated(req, before, part.stored(self.truth.parameters), self.truth.parameters)
                self.truth.gradients[name, i] = want
                self._check(f"gradient of {name} on {context}", getattr(self.layer, name).grad(context).asnumpy(), want)

    def check_running(self) -> None:
        for i, context in self.contexts.items():
            for p, want in zip((self.layer.running_mean, self.layer.running_var), self.truth.running[i]):
                self._check(f"{p.name} on {context}", p.data(context).asnumpy(), want)

    def _check_all(self, name: str, arrays: Sequence[nd.NDArray], wants: Sequence[Near]) -> None:
        for i, (array, want) in enumerate(zip(arrays, wants)):
            self._check(f"{name} of replica {i}", kinds.values(array), want)

    def _check(self, name: str, got: np.ndarray, want: Near) -> None:
        # Where the bound is larger than the type, an overflow is within it.
        got = np.clip(got.reshape(want.value.shape), np.finfo(got.dtype).min, np.finfo(got.dtype).max)
        if not got.size:
            return
        allowed = TIMES * want.slack
        error = np.abs(got - want.value)
        strain = np.nan_to_num(error / np.maximum(allowed, 1e-300), nan=np.inf)
        where = np.unravel_index(np.argmax(strain), error.shape)
        assert strain[where] <= 1, (
            f"{name} at {where}: {got[where]} where {float(want.value[where])} was expected, "
            f"off by {float(error[where]):.2e}, allowed {allowed[where]:.2e}"
        )


def fill(array: nd.NDArray, value: float) -> None:
    """By a copy, which the emulator of GPUs can do. What is sparse begins as zero."""
    if array.stype == "default" and array.size:
        dtype = "bfloat16" if kinds.is_bfloat16(array.dtype) else array.dtype
        on_devices([np.full(array.shape, value)], [mx.cpu()], dtype)[0].copyto(array.as_nd_ndarray())


def run(case: Case, contexts: Sequence[mx.Context]) -> None:
    """Raises what is wrong with the case."""
    with case.scope():
        Trial(case, contexts).run()
