"""Programs of strangers, without a layer of ours: they do what they do without the import. One process runs all."""

import json
import sys

import pytest
from environments import ended
from places import SUPPORT

PROGRAMS = '''
import gluon_syncbn_first, dataclasses, json, os, sys, threading, traceback
import mxnet as mx
import pytest
from gate import Gate
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
import gluon_syncbn

def a_net_that_is_a_dataclass():
    """Its class has an ``__eq__``, and so no hash."""
    @dataclasses.dataclass
    class Net(nn.HybridBlock):
        width: int
        def __post_init__(self):
            super().__init__()
            self.norm, self.dense = nn.BatchNorm(in_channels=self.width), nn.Dense(2, in_units=self.width)
        def hybrid_forward(self, F, x):
            return self.dense(self.norm(x))
    net, twin = Net(3), Net(3)
    assert net == twin
    for one in (net, twin):
        one.initialize()
        trainer = gluon.Trainer(one.collect_params(), "sgd")
        for hybrid in (False, True):
            one.hybridize(hybrid)
            with autograd.record():
                loss = one(nd.random.normal(shape=(4, 3))).sum()
            loss.backward()
            trainer.step(4)
    net.dense(nd.ones((1, 3))).wait_to_read()
    gluon_syncbn.summary(net)
    gluon_syncbn.freeze(net)
    assert net._cached_op is None and twin._cached_op is not None, "freeze drops the graph of one of two equal nets"

def a_trainer_whose_store_keeps_the_optimizer():
    @mx.kvstore.KVStoreBase.register
    class Keeps(mx.kvstore.KVStoreBase):
        saved, type, rank, num_workers = None, "keeps", 0, 1
        is_capable = staticmethod(lambda capability: True)
        def broadcast(self, key, value, out, priority=0):
            pass
        def pushpull(self, key, value, out=None, priority=0):
            pass
        def set_optimizer(self, optimizer):
            pass
        def save_optimizer_states(self, fname, dump_optimizer=False):
            self.saved = fname
    net, store = nn.Dense(1, in_units=1), Keeps()
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
    with autograd.record():
        loss = net(nd.ones((2, 1))).sum()
    loss.backward()
    trainer.step(2)
    trainer.save_states("states")
    assert store.saved == "states"

@mx.operator.register("scaled")
class Scaled(mx.operator.CustomOpProp):
    def __init__(self, call):
        super().__init__(need_top_grad=True)
        self.factor = float(call)
    def create_operator(self, context, shapes, types):
        factor = self.factor
        class Operator(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0] * factor)
            def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
                self.assign(in_grad[0], req[0], out_grad[0] * factor)
        return Operator()

def an_operator_with_an_argument_call():
    class Net(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return F.Custom(x, op_type="scaled", call=3)
    x = nd.ones(2)
    x.attach_grad()
    net = Net()
    for hybrid in (False, True):
        net.hybridize(hybrid)
        with autograd.record():
            y = net(x)
        y.backward()
        assert y.asnumpy().tolist() == x.grad.asnumpy().tolist() == [3, 3]
    with autograd.record():
        y = net(x)
    try:
        autograd.grad([y], [x], create_graph=True)
    except mx.MXNetError as error:
        assert "SyncBatchNorm" not in str(error), error

def backends_one_after_the_other():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 1, in_channels=3), nn.BatchNorm(in_channels=2), nn.Activation("relu"))
    net.initialize()
    x = nd.random.normal(shape=(1, 3, 4, 4))
    want = net(x).asnumpy()
    net.optimize_for(x, backend="MKLDNN")
    first = net._cached_op
    net.optimize_for(x, backend="MKLDNN", clear=False)
    assert net._cached_op is not first, "the second one did nothing"
    assert abs(net(x).asnumpy() - want).max() < 1e-5

def an_exception_that_leaves_the_scope():
    """It waits for no weight, and takes no operator's error."""
    net = nn.Dense(2, in_units=2)
    net.initialize()
    gluon.Trainer(net.collect_params(), "sgd")
    gate = Gate()
    net.weight.data()[:] = gate.behind(nd.ones((2, 2)))
    timer = threading.Timer(20, gate.open)
    timer.start()
    with pytest.raises(ValueError), autograd.record():
        raise ValueError
    assert timer.is_alive(), "it waited for a weight"
    timer.cancel()
    gate.open()
    for save in (net.save_parameters, net.collect_params().save, lambda file: nd.save(file, net.weight.data())):
        nd.linalg.potrf(-nd.ones((2, 2)), out=net.weight.data())
        with pytest.raises(mx.MXNetError, match="potrf"):  # else what it has left is in the file
            save(os.devnull)

results = {}
for name, program in [one for one in globals().items() if getattr(one[1], "__code__", None)]:
    try:
        program()
        results[name] = ""
    except BaseException:
        results[name] = traceback.format_exc()
print(json.dumps(results))
'''
NAMES = [line[4:-3] for line in PROGRAMS.splitlines() if line.startswith("def ")]


@pytest.fixture(scope="module")
def results():
    run = ended([sys.executable, "-W", "ignore", "-c", PROGRAMS], SUPPORT, code=0)
    assert "Exception ignored" not in run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_program_runs_as_ever(results, name):
    assert not results[name], results[name]
