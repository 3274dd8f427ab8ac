"""A gate in MXNet's engine: what uses an array that is behind it runs when the test opens it, and never before.

So MXNet's threads run it. Otherwise, the thread that issues an operator may run it too, where all inputs are ready.
"""

import threading
from typing import Dict

import mxnet as mx

_opened: Dict[str, threading.Event] = {}


class Gate:
    def __init__(self) -> None:
        self._name = str(len(_opened))
        _opened[self._name] = threading.Event()

    def behind(self, array):
        """Returns a copy of the array. It is not ready until `open` is called."""
        return mx.nd.Custom(array, op_type="gluon_syncbn_test_gate", gate=self._name)

    def open(self) -> None:
        _opened[self._name].set()


class _Wait(mx.operator.CustomOp):
    def __init__(self, opened):
        super().__init__()
        self._opened = opened

    def forward(self, is_train, req, in_data, out_data, aux):
        assert self._opened.wait(60), "no one opens the gate"
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("gluon_syncbn_test_gate")
class _Property(mx.operator.CustomOpProp):
    def __init__(self, gate):
        super().__init__(need_top_grad=False)
        self._opened = _opened[gate]

    def create_operator(self, ctx, shapes, dtypes):
        return _Wait(self._opened)
