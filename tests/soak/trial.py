"""A case on its way: one step after the other, each checked against the specification."""

import faulthandler
import functools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from replicas import TOLERANCE, WAYS, on_devices

import gluon_syncbn

from .case import Case
from .nets import build, convert
from .specification import Specification, Values

TIMEOUT = 60.0  # seconds that a replica waits for the others where nothing is meant to fail
NET_TOLERANCE = {"float32": 1e-3, "float64": 1e-8}  # of nets, whose layers hand on each other's rounding
RATE, BATCH = 2**-10, 4  # of the trainer, which keeps both in float32
START = 0.5  # of a gradient to which others are added
CHILD = 90  # seconds that the child of a fork may take
CHILD_ENDS = 5  # its exit code


class Wrong(Exception):
    """What the layer does is not what it promises."""


class Crew:
    """Threads that live on, one for each replica: MXNet frees nothing of what a thread has used when that ends."""

    def __init__(self, size: int) -> None:
        self._lanes = [ThreadPoolExecutor(1) for _ in range(size)]
        self.run([time.monotonic] * size)  # which starts them

    def run(self, tasks: Sequence[Callable[[], Any]]) -> None:
        """Each task in its own thread; once all have ended, raises what one of them raised."""
        futures = [lane.submit(task) for lane, task in zip(self._lanes, tasks)]
        for error in [future.exception() for future in futures]:
            if error is not None:
                raise error


class Call(NamedTuple):
    """A batch on its devices."""

    shards: Values
    heads: Values
    xs: List[nd.NDArray]
    dys: List[nd.NDArray]


class Expected(NamedTuple):
    name: str
    got: Callable[[], np.ndarray]
    want: np.ndarray
    least: float = 0.0  # that counts as the largest value: sums may cancel


class Trial:
    """``interrupt`` sends this process a SIGINT whose handler only takes note."""

    def __init__(self, case: Case, crew: Crew, interrupt: Callable[[], None]) -> None:
        self.case, self.rng, self.crew, self._interrupt = case, case.rng, crew, interrupt
        self.threads = case.threads
        self.counted: Counter = Counter()
        # MXNet's LeakyReLU, which predicts, multiplies in float32 (`xelu` in src/operator/mshadow_op.h).
        dtype = "float32" if case.settings["activation"] == "leaky" else case.dtype
        self._tolerance = (TOLERANCE if case.net == "layer" else NET_TOLERANCE)[dtype]
        gluon_syncbn.configure(kvstore=None, timeout=TIMEOUT, seed=case.seed)
        with mx.util.np_shape(False):  # with which MXNet's Conv2D looks for the shape of its weight
            self.net = build(case)
        self.net.cast(case.dtype)
        self.net.initialize(ctx=case.contexts)
        if WAYS[case.way] is not None:
            self.net.hybridize(**WAYS[case.way])
        self._trace()
        self.parameters = list(self.net.collect_params().values())
        for p in self.trained():
            p.grad_req = case.grad_req
            value = self.rng.rand(*p.shape) + 0.5 if p.name.endswith("gamma") else 0.5 * self.rng.randn(*p.shape)
            p.set_data(nd.array(value, dtype=p.dtype))
        self.trainer = None
        if case.trainer is not None:
            settings = {"learning_rate": RATE, "wd": 0}
            self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", settings, **case.trainer)
        self.specification = Specification(self.net, case.contexts, case.way == "eager", case.seed)

    def trained(self) -> List[gluon.Parameter]:
        return [p for p in self.parameters if p.grad_req != "null"]

    def _trace(self) -> None:
        """Makes the graph, and the parameters that wait for the first batch. Threads may not do so at once."""
        shard = next(x for x in self.case.shards(len(self.case.contexts)) if x.size)
        self.net(nd.array(shard, ctx=self.case.contexts[0], dtype=self.case.dtype)).wait_to_read()

    # ---- what happens in a step --------------------------------------------------------------------------------

    def calls(self, places: Sequence[mx.Context], count: int = 1) -> List[Call]:
        calls = []
        for _ in range(count):
            shards = self.case.shards(len(places))
            heads = self.case.heads(shards)
            xs, dys = on_devices(shards, places, self.case.dtype), on_devices(heads, places, self.case.dtype)
            for x in xs:
                x.attach_grad(self.case.grad_req)
                x.grad[:] = START
            calls.append(Call(shards, heads, xs, dys))
        return calls

    def issue(
        self,
        calls: Sequence[Call],
        scope: Callable[[], Any] = autograd.record,
        meanwhile: Optional[Callable[[], None]] = None,
        fails: bool = False,
    ) -> List[List[nd.NDArray]]:
        """The outputs of each call, of which none has been read. ``meanwhile`` runs after the first replica. Where the
        step fails, it has one scope, as the next one would forget the failure."""
        case, replicas = self.case, len(calls[0].xs)
        ys: List[List[Any]] = [[None] * replicas for _ in calls]

        def work(turns: Sequence[Any], inner: Callable[[], Any]) -> None:
            for k, i in turns:
                with inner(), mx.util.np_shape(case.empty):  # which is each thread's own
                    ys[k][i] = self.net(calls[k].xs[i])
                if meanwhile is not None and (k, i) == turns[0]:
                    meanwhile()

        if self.threads:
            with scope():
                turns = [[(k, i) for k in range(len(calls))] for i in range(replicas)]
                self.crew.run([functools.partial(work, turns[i], scope) for i in range(replicas)])
            return ys
        turns = self._turns(range(len(calls)), replicas)
        inner = scope if not fails and self.rng.rand() < 0.2 else nullcontext
        with scope() if inner is nullcontext else nullcontext():
            work(turns, inner)
        if self.case.way == "static_shape":
            mx.nd.waitall()  # reading running statistics does not wait until such a graph has written them
        return ys

    def _turns(self, calls: Sequence[int], replicas: int) -> List[Tuple[int, int]]:
        """(call, replica) in the order in which they are issued, the calls of each replica in the order given."""
        turns = [(k, i) for k in calls for i in self.rng.permutation(replicas)]
        if self.rng.rand() < 0.3:
            turns.sort(key=lambda turn: turn[1])  # all calls of a replica, then those of the next
        return turns

    def backward(self, calls: Sequence[Call], ys: Sequence[Sequence[nd.NDArray]]) -> None:
        replicas = len(ys[0])
        one_by_one = len(calls) == 1 and self.rng.rand() < 0.2
        # In one backward, MXNet bundles the end of a replica's call with the beginning of its next. Where one replica
        # has them in another order than its peer, each bundle would wait for the other.
        turns = self._turns(self.rng.permutation(len(calls)), replicas)
        outputs, heads = [ys[k][i] for k, i in turns], [calls[k].dys[i] for k, i in turns]
        if one_by_one:
            for y, dy in zip(outputs, heads):
                y.backward(dy)
        else:
            autograd.backward(outputs, heads)

    def _in_flight(self) -> int:
        """Calls before anything is read."""
        once = self.case.dropout or self.case.way == "static_shape"
        return 1 if once else self.rng.choice([1, 1, 1, 2, 3])

    # ---- steps -------------------------------------------------------------------------------------------------

    def choices(self) -> Dict[Callable[[], None], float]:
        """The kinds of step that this case can have, and how often."""
        case = self.case
        kinds: Dict[Callable[[], None], float] = {
            self.train: 100,
            self.run_forward: 10,
            self.predict: 10,
            self.change_store: 3,
            self.change_seed: 2,
            self.fork: 1,
        }
        if len(case.contexts) > 1:
            kinds[self.train_on_some] = 6
        if not case.empty:
            kinds.update({self.save_and_load: 2, self.revert_and_convert: 2})
        if not self.threads:
            kinds.update({self.change_store_in_mid_step: 3, self.interrupt: 1})
        return kinds

    def train(
        self,
        places: Optional[Sequence[mx.Context]] = None,
        meanwhile: Optional[Callable[[], None]] = None,
        unread: Optional[Callable[[], None]] = None,
    ) -> None:
        """On these replicas; ``unread`` runs when everything is issued and nothing has been read."""
        case, specification = self.case, self.specification
        trainer = self.trainer if places is None and self.rng.rand() < 0.8 else None
        places = case.contexts if places is None else places
        calls = self.calls(places, self._in_flight())
        ys = self.issue(calls, meanwhile=meanwhile)
        self.backward(calls, ys)
        predicted = self._predicted() if self.rng.rand() < 0.2 else []
        first = trainer is not None and bool(trainer._params_to_init)
        if trainer is not None:
            trainer.step(BATCH)

        forwards = [specification.forward(call.shards, places) for call in calls]
        if case.grad_req == "write":
            specification.forget_gradients(places)
        expected = []
        for call, outputs, (want, back) in zip(calls, ys, forwards):
            before = START if case.grad_req == "add" else 0
            expected += self._arrays("output", outputs, want)
            expected += self._arrays("dx", [x.grad for x in call.xs], [before + dx for dx in back(call.heads)])
        expected += [Expected("prediction", y.asnumpy, specification.predict(x, place)) for x, place, y in predicted]
        if trainer is not None:
            adds = trainer._kvstore is not None
            if first and adds:
                specification.spread_running()
            specification.descend(RATE / BATCH, everywhere=adds and not trainer._update_on_kvstore)
        if unread is not None:
            unread()
        self.check(expected + self._gradients() + self._running() + self._weights())
        if trainer is not None:
            specification.read_weights()

    def train_on_some(self) -> None:
        contexts = self.case.contexts
        group = self.case.pooling.get("group_size", 1)
        slots = self.case.pooling.get("virtual_devices", 1)
        least = 2 if self.case.mode == "shuffle" and slots == 1 else 1  # replicas
        sizes = [n for n in range(1, len(contexts)) if n % group == 0 and n >= least]
        some = sorted(self.rng.permutation(len(contexts))[: self.rng.choice(sizes or [len(contexts)])])
        with gluon_syncbn.only_on([contexts[i] for i in some]):
            self.train([contexts[i] for i in some])
        shares = self.case.mode == "sync" and "group_size" not in self.case.pooling
        zeroes = self.case.grad_req == "write" and self.trainer is not None
        self.specification.leave_out([contexts[i] for i in some], shares, zeroes)
        self.check(self._gradients() + self._running())

    def run_forward(self) -> None:
        """Training without a backward: the running statistics move on."""
        recorded = self.rng.rand() < 0.3
        places = self.case.contexts
        calls = self.calls(places, self._in_flight())
        ys = self.issue(calls, autograd.record if recorded else autograd.train_mode)
        wants = [self.specification.forward(call.shards, places)[0] for call in calls]
        expected = [e for outputs, want in zip(ys, wants) for e in self._arrays("output", outputs, want)]
        self.check(expected + self._running())

    def predict(self) -> None:
        self.check([Expected("prediction", y.asnumpy, self.specification.predict(*at)) for *at, y in self._predicted()])

    def _predicted(self) -> List[Any]:
        at = []
        for i in self.rng.permutation(len(self.case.contexts))[: self.rng.randint(1, 4)]:
            place, shard = self.case.contexts[i], next(x for x in self.case.shards(2) if x.size)
            at.append((shard, place, self.net(nd.array(shard, ctx=place, dtype=self.case.dtype))))
        return at

    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "net.params")
            self.net.save_parameters(path)
            self.net.load_parameters(path, ctx=self.case.contexts)
        self.specification.average_running()
        self.check(self._running() + self._weights())

    def revert_and_convert(self) -> None:
        gluon_syncbn.revert(self.net)
        self.predict()
        convert(self.net, self.case)
        self._trace()
        self.train()

    def change_store(self) -> None:
        gluon_syncbn.configure(kvstore=[None, "device", "local"][self.rng.randint(3)])

    def change_store_in_mid_step(self) -> None:
        self.train(meanwhile=self.change_store)

    def change_seed(self) -> None:
        self.start_over(self.rng.randint(2**31))

    def start_over(self, seed: int) -> None:
        gluon_syncbn.configure(seed=seed)
        self.specification.start_over(seed)

    def interrupt(self) -> None:
        """Ctrl-C while a replica waits, which looks for it after a while."""

        def wait_and_interrupt() -> None:
            time.sleep(0.15)
            self._interrupt()

        self.counted["interrupts"] += 1
        self.train(meanwhile=wait_and_interrupt)

    def fork(self) -> None:
        """While a step is in flight. The child trains, and ends with a step in flight of its own."""
        self.counted["forks"] += 1
        self.train(unread=self._fork)

    def _fork(self) -> None:
        child = os.fork()
        if child == 0:
            self._be_the_child()
        wait_for(child, CHILD_ENDS)

    def _be_the_child(self) -> NoReturn:
        try:
            faulthandler.dump_traceback_later(CHILD - 10, exit=True)
            self.threads = False  # those of the crew are not here
            self.trainer = None  # its store may be one of the parent's threads
            self.train()
            calls = self.calls(self.case.contexts)
            self.backward(calls, self.issue(calls))
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        sys.exit(CHILD_ENDS)

    # ---- checks ------------------------------------------------------------------------------------------------

    def unchanged(self) -> None:
        """No parameter is another than it was."""
        self.check(self._running() + self._weights())

    def check(self, expected: Sequence[Expected]) -> None:
        """In any order: whoever reads first finds the step still on its way."""
        for i in self.rng.permutation(len(expected)):
            name, read, want, least = expected[i]
            got = read().astype("float64")
            if got.shape != want.shape:
                raise Wrong(f"{name} has shape {got.shape}, expected {want.shape}")
            error, scale = np.abs(got - want).max(initial=0), max(np.abs(want).max(initial=0), least)
            if not error <= self._tolerance * scale:
                raise Wrong(f"{name}: off by {error:.2e} where the largest is {scale:.2e}\n got {got}\nwant {want}")

    def _arrays(self, name: str, got: Sequence[nd.NDArray], want: Values) -> List[Expected]:
        return [Expected(f"{name} of replica {i}", g.asnumpy, w) for i, (g, w) in enumerate(zip(got, want))]

    def _gradients(self) -> List[Expected]:
        return [
            Expected(
                f"gradient of {p.name} on {context}",
                lambda p=p, context=context: p.grad(context).asnumpy(),
                self.specification.gradients.get((p.name, context), np.zeros(p.shape)),
                least=1.0,
            )
            for p in self.trained()
            for context in self.case.contexts
        ]

    def _running(self) -> List[Expected]:
        return self._data(self.specification.running)

    def _weights(self) -> List[Expected]:
        weights = self.specification.weights
        return self._data({(name, context): w for name, w in weights.items() for context in self.case.contexts})

    def _data(self, wanted: Any) -> List[Expected]:
        of = {p.name: p for p in self.parameters}
        return [
            Expected(f"{name} on {context}", lambda n=name, c=context: of[n].data(c).asnumpy(), want)
            for (name, context), want in wanted.items()
        ]


def wait_for(child: int, code: int) -> None:
    """Wrong where the child of a fork does not end in time with this exit code."""
    deadline = time.monotonic() + CHILD
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == code:
                return
            raise Wrong(f"the child of a fork ended with status {status}, expected exit code {code}")
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Wrong(f"the child of a fork had not ended after {CHILD} s")
