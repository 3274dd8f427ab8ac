"""Symbols in `Module`, BucketingModule and SequentialModule, against one context; other executors only predict."""

import contextlib
import functools
import gc
import json
import time
import warnings

import mxnet as mx
import numpy as np
import pytest
from gate import Gate
from internals import core
from mxnet import gluon, nd
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn.mxnet_side.nodes import json_of
from gluon_syncbn.symbol import SyncBatchNorm

PLAIN = mx.sym.BatchNorm
CLASSES = 3


def body(norm, data="data", **settings):
    y = mx.sym.Convolution(mx.sym.var(data), num_filter=4, kernel=(3, 3), no_bias=True, name="conv0")
    y = norm(y, name="bn0", eps=1e-4, momentum=0.7, fix_gamma=False, **settings)
    y = mx.sym.Convolution(mx.sym.relu(y), num_filter=5, kernel=(2, 2), no_bias=True, name="conv1")
    return norm(y, name="bn1", fix_gamma=True, **settings)


def classifier(norm, **settings):
    y = mx.sym.FullyConnected(mx.sym.relu(body(norm, **settings)), num_hidden=CLASSES, name="fc")
    return mx.sym.SoftmaxOutput(y, name="softmax")


def samples(seed, count, size=12, dtype="float64"):
    """Images of other distributions along the batch, and classes, in batches."""
    rng = np.random.RandomState(seed)
    scale = np.linspace(1, 5, count)[:, None, None, None]
    images = nd.array(rng.randn(count, 3, 7, 7) * scale + scale, dtype=dtype)
    classes = nd.array(rng.randint(0, CLASSES, count), dtype=dtype)
    return mx.io.NDArrayIter(images, classes, size, label_name="softmax_label")


def batch_of(seed, size=12, dtype="float64"):
    source = samples(seed, size, size, dtype)
    batch = next(source)
    shapes = dict(provide_data=source.provide_data, provide_label=source.provide_label)
    return mx.io.DataBatch(batch.data, batch.label, 0, bucket_key=size, **shapes)


def parameters_of(symbol):
    """Values for a net, the same for the same names, and gammas that are not 1."""
    rng = np.random.RandomState(0)
    names = [set(symbol.list_arguments()) - {"data", "softmax_label"}, set(symbol.list_auxiliary_states())]
    shapes = dict(zip(symbol.list_arguments(), symbol.infer_shape(data=(2, 3, 7, 7))[0]))
    shapes.update(zip(symbol.list_auxiliary_states(), symbol.infer_shape(data=(2, 3, 7, 7))[2]))
    values = {}
    for name in sorted(names[0] | names[1]):
        positive = name.endswith(("gamma", "var"))
        value = rng.rand(*shapes[name]) + 0.5 if positive else rng.randn(*shapes[name]) * 0.5
        values[name] = nd.array(np.ones_like(value) if name == "bn1_gamma" else value, dtype="float64")
    return [{name: values[name] for name in part} for part in names]


def bound(symbol, contexts, *, labels=True, buckets=None, given=None, **binding):
    """``buckets`` makes the graph of each batch size."""
    names = ["softmax_label"] if labels else None
    if buckets:
        module = mx.mod.BucketingModule(lambda _: (buckets(), ["data"], names), 12, context=contexts)
    else:
        module = mx.mod.Module(symbol, context=contexts, label_names=names, **given or {})
    data = batch_of(0)
    module.bind(data.provide_data, data.provide_label if labels else None, **binding)
    arguments, states = parameters_of(symbol)
    module.init_params(arg_params=arguments, aux_params=states)
    return module


def ready(symbol, contexts, kvstore="local", **given):
    module = bound(symbol, contexts, **given)
    module.init_optimizer(kvstore, "sgd", dict(learning_rate=0.05, momentum=0.9))
    return module


def settle(norm):
    """An executor does not tell MXNet's engine that plain BatchNorm writes its running statistics, in the backward."""
    if norm is PLAIN:
        mx.nd.waitall()


def values_of(module, norm=PLAIN):
    settle(norm)
    return {name: value.asnumpy() for part in module.get_params() for name, value in part.items()}


def assert_same(got, want, tolerance=1e-9):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance * max(1, np.abs(value).max()), err_msg=name)


def train(module, seeds, dtype="float64", norm=PLAIN):
    for seed in seeds:
        module.forward_backward(batch_of(seed, dtype=dtype))
        module.update()
    return values_of(module, norm)


def fitted(symbol, contexts, kvstore="local", work_load_list=None):
    """After three epochs of `fit`, with a validation behind each: parameters, running statistics and both metrics."""
    module = mx.mod.Module(symbol, context=contexts, work_load_list=work_load_list)
    arguments, states = parameters_of(symbol)
    scores = []
    module.fit(
        samples(1, 48),
        eval_data=samples(2, 24),
        eval_metric="ce",
        num_epoch=3,
        kvstore=kvstore,
        optimizer_params=dict(learning_rate=0.05, momentum=0.9),
        arg_params=arguments,
        aux_params=states,
        eval_end_callback=lambda given: scores.append(given.eval_metric.get()[1]),
    )
    before = values_of(module)
    predicted = module.predict(samples(4, 20)).asnumpy()  # the last batch is padded
    assert_same(values_of(module), before, 0)
    return {**before, "scores": np.array(scores), "predicted": predicted}


# ---- fit -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_device():
    """What one context has with plain BatchNorm."""
    return fitted(classifier(PLAIN), [mx.cpu(0)])


@pytest.mark.parametrize(
    "count, kvstore, work_load_list, on_kvstore",
    [(1, None, None, 1), (2, "local", None, 1), (3, "device", None, 1), (2, "local", [1, 3], 1), (2, "local", None, 0)],
)
def test_fit(count, kvstore, work_load_list, on_kvstore, contexts, one_device, monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", str(on_kvstore))
    assert_same(fitted(classifier(SyncBatchNorm), contexts[:count], kvstore, work_load_list), one_device)


# ---- one step ------------------------------------------------------------------------------------------------


def stepped(norm, contexts, heads, grad_req="write", **given):
    """Of a step with a random head gradient: output, gradients of data and parameters, running statistics."""
    module = bound(body(norm), contexts, labels=False, inputs_need_grad=True, grad_req=grad_req, given=given)
    for _ in range(2):
        module.forward(batch_of(1), is_train=True)
        module.backward([heads])
    group = module._exec_group
    found = {
        name: sum(gradient.asnumpy() for gradient in gradients)
        for name, gradients in zip(group.param_names, group.grad_arrays)
        if gradients[0] is not None
    }
    found.update(y=module.get_outputs()[0].asnumpy(), dx=module.get_input_grads()[0].asnumpy())
    found.update({name: value.asnumpy() for name, value in module.get_params()[1].items()})
    return found


def elsewhere(y, **given):
    with mx.AttrScope(ctx_group="norms"):
        return SyncBatchNorm(y, **given)


STEPS = {
    "write": (SyncBatchNorm, 1, {}),
    "add": (SyncBatchNorm, 1, dict(grad_req="add")),
    "fixed": (SyncBatchNorm, 1, dict(fixed_param_names=["bn0_gamma", "bn0_beta", "conv0_weight"])),
    "groups of one": (functools.partial(SyncBatchNorm, groups=[[1], [0], [2]]), 3, {}),
    "one group": (functools.partial(SyncBatchNorm, groups=[[2, 0, 1]]), 1, {}),
    "a part elsewhere": (
        elsewhere,
        1,
        {},
    ),  # of a layer that `group2ctxs` puts on other contexts, those are the replicas
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step(name, contexts, rng):
    norm, alike, given = STEPS[name]  # to plain BatchNorm on so many contexts
    heads = nd.array(rng.randn(12, 5, 4, 4), dtype="float64")
    shares = dict(work_load_list=[3, 1, 2])
    places = {"group2ctxs": {"rest": contexts[:3], "norms": contexts[3:6]}} if norm is elsewhere else {}
    with mx.AttrScope(ctx_group="rest"):
        got = stepped(norm, contexts[:3], heads, **given, **shares, **places)
    assert_same(got, stepped(PLAIN, contexts[:alike], heads, **given, **(shares if alike == 3 else {})))


def test_a_net_of_gluon_in_a_module(contexts):
    """Its own layers are elsewhere, and stay."""
    nets = []

    def symbol_of(norm):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Conv2D(4, 3, in_channels=3, prefix="conv_"), norm(in_channels=4, prefix="bn_"))
            net.add(nn.Dense(CLASSES, in_units=100, prefix="fc_"))
        net.initialize(ctx=contexts[2:4])
        net.cast("float64")
        nets.append(net)
        return mx.sym.SoftmaxOutput(net(mx.sym.var("data")), name="softmax")

    symbols = symbol_of(gluon_syncbn.SyncBatchNorm), symbol_of(nn.BatchNorm)
    got, want = (train(ready(symbol, contexts[:n]), range(3)) for symbol, n in zip(symbols, (2, 1)))
    assert_same(got, want)

    symbol = symbol_of(gluon_syncbn.SyncBatchNorm)
    nets.clear()
    gc.collect()
    with pytest.raises(mx.MXNetError, match=r"the SyncBatchNorm of 'net_bn.*' no longer exists.*keep the net"):
        ready(symbol, contexts[:2])


# ---- shapes, validation, files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes, buckets", [((12, 6, 12, 20, 6), False), ((6, 24), False), ((12, 6, 12, 20, 6), True)])
def test_other_batch_sizes(sizes, buckets, contexts):
    """With a reshape that is asked for, and by the batch; with two forwards that nothing else puts in order. Buckets
    have graphs of their own, on the same parameters.
    """

    def trained(norm, places):
        module = ready(classifier(norm), places, buckets=buckets and functools.partial(classifier, norm))
        for seed, size in enumerate(sizes):
            batch = batch_of(seed, size)
            if seed % 2 and not buckets:
                module.reshape(batch.provide_data, batch.provide_label)
            module.forward_backward(batch)
            settle(norm)
            module.forward_backward(batch_of(seed + 10, 30 - size))
            settle(norm)
            module.update()
        return values_of(module, norm)

    assert_same(trained(SyncBatchNorm, contexts[:2]), trained(PLAIN, contexts[:1]))


@pytest.mark.parametrize("mode", ["sync", "local"])
@pytest.mark.parametrize("mirrors", ["all nodes", "this node"])
def test_memory_mirroring(contexts, monkeypatch, mirrors, mode):
    """The forward that an executor computes again for its backward leaves the running statistics alone."""
    if mirrors == "all nodes":
        monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    attributes = {"attr": {"force_mirroring": "True"}} if mirrors == "this node" else {}

    def trained(norm, places, **given):
        module = ready(classifier(norm, **given), places)
        for seeds in ([1, 2], [3]):
            got = train(module, seeds)
            module.forward(batch_of(0), is_train=True)
            if norm is PLAIN:  # it moves its running statistics in a backward
                module.backward()
            got.update({f"{i}": value.asnumpy() for i, value in enumerate(module.get_outputs())})
        return got

    want = trained(PLAIN, contexts[:1])
    for count in (1, 2) if mode == "sync" else (1,):
        assert_same(trained(SyncBatchNorm, contexts[:count], mode=mode, **attributes), want)


@pytest.mark.parametrize("count, kvstore", [(1, "local"), (2, "local"), (2, None)])
def test_a_gamma_that_does_not_count_is_1(contexts, tmp_path, count, kvstore):
    """After weight decay, and where a file has brought another one, which a KVStore keeps."""
    module = bound(classifier(SyncBatchNorm), contexts[:count])
    arguments, states = parameters_of(classifier(SyncBatchNorm))
    arguments["bn1_gamma"][:] = 8
    module.set_params(arguments, states)
    module.init_optimizer(kvstore, "sgd", dict(learning_rate=0.5, momentum=0.9, wd=0.1))
    got = train(module, range(3))
    assert np.abs(got["bn0_gamma"] - arguments["bn0_gamma"].asnumpy()).max() > 0.01
    module.save_checkpoint(str(tmp_path / "net"), 2)
    for stored in (got["bn1_gamma"], nd.load(str(tmp_path / "net-0002.params"))["arg:bn1_gamma"].asnumpy()):
        np.testing.assert_array_equal(stored, 1)


# MXNet leaves the file of the optimizer's states to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint(contexts, tmp_path):
    """Its file is for any MXNet; a Module of it goes on as if nothing had been saved."""
    symbol = classifier(SyncBatchNorm, ndev=2, key="k")
    module = ready(symbol, contexts[:2])
    train(module, [1])
    with gluon_syncbn.only_on(contexts[:1]):  # the layers of a Module have no parameters of Gluon
        pass
    train(module, [2])
    module.save_checkpoint(str(tmp_path / "net"), 2, save_optimizer_states=True)
    want = train(module, [3, 4])

    nodes = json.loads((tmp_path / "net-symbol.json").read_text())["nodes"]
    assert [node["op"] for node in nodes if "Norm" in node["op"] or node["op"] == "Custom"] == ["BatchNorm"] * 2
    again = mx.mod.Module.load(str(tmp_path / "net"), 2, load_optimizer_states=True, context=contexts[:2])
    assert again.symbol.list_outputs() == symbol.list_outputs()
    data = batch_of(0)
    again.bind(data.provide_data, data.provide_label)
    again.init_optimizer("local", "sgd", dict(learning_rate=0.05, momentum=0.9))
    assert_same(train(again, [3, 4]), want, 1e-12)


@pytest.mark.parametrize("settings", [dict(mode="local"), dict(groups=((0, 2), (1,)))], ids=str)
def test_a_file_keeps_the_settings(settings, contexts, tmp_path, rng):
    norm = functools.partial(SyncBatchNorm, virtual_devices=2, running_variance="unbiased", timeout=17.0, **settings)

    def loaded(y, **given):
        norm(y, **given).save(str(tmp_path / "norm.json"))
        return mx.sym.load(str(tmp_path / "norm.json"))

    heads = nd.array(rng.randn(12, 5, 4, 4), dtype="float64")
    assert_same(stepped(loaded, contexts[:3], heads), stepped(norm, contexts[:3], heads), 1e-12)
    for symbol in (made(mx.sym.var("data"), name="bn0") for made in (norm, loaded)):
        ((_, replicas),) = bound(symbol, contexts[:3], labels=False)._exec_group.layers
        assert replicas.settings.unbiased and (replicas.settings.timeout, replicas.settings.virtual_devices) == (17, 2)
        assert replicas.settings.groups == settings.get("groups")


def test_parameters_are_read_behind_the_forward(contexts):
    """Nothing else puts a copy of the running statistics behind a forward that is on its way."""
    y = mx.sym.Convolution(mx.sym.var("data"), num_filter=64, kernel=(5, 5), name="conv")
    module = mx.mod.Module(SyncBatchNorm(y, name="bn"), context=contexts[:2], label_names=None)
    module.bind([("data", (8, 16, 64, 64))])
    module.init_params()
    images = nd.random.normal(shape=(8, 16, 64, 64))
    for _ in range(3):
        mx.nd.waitall()
        module.forward(mx.io.DataBatch([images]), is_train=True)
        module._params_dirty = True  # as `update` says
        got = module.get_params()[1]["bn_moving_var"].asnumpy()
        np.testing.assert_array_equal(got, module._exec_group.aux_arrays[1][0].asnumpy())
    assert got.max() > 0


class Rest(mx.operator.CustomOp):
    """Lets a shard wait that begins with 2."""

    def forward(self, is_train, req, in_data, out_data, aux):
        if in_data[0][0, 0].asscalar() == 2:
            time.sleep(0.5)
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("rest")
class RestProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Rest()


@pytest.mark.parametrize("buckets", [False, True], ids=["reshape", "buckets"])
def test_forwards_of_other_batch_sizes_come_in_their_order(buckets, contexts):
    """The executors of a context share memory, or have been made one after the other, and MXNet's engine sees that."""

    def symbol_of(_):
        y = SyncBatchNorm(mx.sym.Custom(mx.sym.var("data"), op_type="rest"), name="bn", momentum=0.5)
        return y, ["data"], None

    def running(wait):
        if buckets:
            module = mx.mod.BucketingModule(symbol_of, default_bucket_key=40, context=contexts[:2])
        else:
            module = mx.mod.Module(symbol_of(40)[0], context=contexts[:2], label_names=None)
        module.bind([("data", (40, 3))])
        module.init_params()
        for size in (40, 4, 40):
            rows = nd.arange(size).reshape((size, 1)) * nd.array([[1, size, 3]])
            shapes = [("data", rows.shape)]
            module.forward(mx.io.DataBatch([rows], bucket_key=size, provide_data=shapes), is_train=True)
            if wait:
                mx.nd.waitall()
        mx.nd.waitall()
        return [value.asnumpy() for value in module.get_params()[1].values()]

    np.testing.assert_array_equal(running(wait=False), running(wait=True))


# ---- several modules ------------------------------------------------------------------------------------------


def sequence(norm, contexts):
    """Two modules, one behind the other; what goes between is float32."""
    rest = mx.sym.FullyConnected(norm(mx.sym.var("data"), name="bn2", fix_gamma=False), num_hidden=CLASSES, name="fc")
    chain = mx.mod.SequentialModule()
    chain.add(mx.mod.Module(body(norm), label_names=None, context=contexts))
    chain.add(
        mx.mod.Module(mx.sym.SoftmaxOutput(rest, name="softmax"), context=contexts), take_labels=True, auto_wiring=True
    )
    batch = batch_of(0, dtype="float32")
    chain.bind(batch.provide_data, batch.provide_label)
    rng = np.random.RandomState(0)
    arguments, states = parameters_of(body(norm))
    arguments.update(fc_weight=nd.array(rng.randn(CLASSES, 80)), fc_bias=nd.zeros(3))
    arguments.update({f"bn2_{name}": nd.array(rng.rand(5)) for name in ("gamma", "beta")})
    states.update({f"bn2_moving_{name}": nd.array(rng.rand(5)) for name in ("mean", "var")})
    chain.init_params(arg_params=arguments, aux_params=states)
    chain.init_optimizer("local", "sgd", dict(learning_rate=0.05, momentum=0.9))
    return chain


def test_a_sequence(contexts):
    got, want = (sequence(norm, contexts[:n]) for norm, n in ((SyncBatchNorm, 2), (PLAIN, 1)))
    assert_same(train(got, range(3), "float32"), train(want, range(3), "float32"), 1e-4)


# ---- other executors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["alone", "in a net", "in a file"])
def test_other_executors_predict(where, contexts, tmp_path):
    """A training step says what to do. A file has plain BatchNorm."""
    symbol = SyncBatchNorm(mx.sym.var("data"), name="alone", ndev=2, key="k")
    if where == "in a net":  # whose contexts are known
        net = gluon_syncbn.SyncBatchNorm(in_channels=3, prefix="alone_")
        net.initialize(ctx=contexts[0])
        symbol = net(mx.sym.var("data"))
    symbol.save(str(tmp_path / "alone.json"))
    if where == "in a file":
        symbol = mx.sym.load(str(tmp_path / "alone.json"))
    executor = symbol.simple_bind(contexts[0], data=(2, 3, 4))
    assert executor.forward()[0].asnumpy().shape == (2, 3, 4)
    said = r"'alone' on cpu\(0\): an executor .* in a Module or a SymbolBlock"
    with contextlib.nullcontext() if where == "in a file" else pytest.raises(mx.MXNetError, match=said):
        executor.forward(is_train=True)[0].asnumpy()
    gluon_syncbn.reset()


def test_a_replica_that_does_not_come(contexts):
    """The other one waits until its time limit, and says what keeps the missing one."""

    module = mx.mod.Module(
        SyncBatchNorm(mx.sym.var("data"), name="bn", timeout=2), context=contexts[:2], label_names=None
    )
    module.bind([("data", (4, 3))])
    module.init_params()
    gate, (one, other) = Gate(), module._exec_group.execs
    other.arg_dict["bn_gamma"][:] = gate.behind(nd.ones(3, ctx=contexts[1]))
    module.forward(mx.io.DataBatch([nd.ones((4, 3))]), is_train=True)
    try:
        with pytest.raises(mx.MXNetError, match=r"missing cpu\(1\) after 2 s\. Every replica has issued its call"):
            one.outputs[0].asnumpy()
    finally:
        gate.open()
    gluon_syncbn.reset()


def test_layers_live_as_long_as_their_executors(contexts):
    module = ready(classifier(SyncBatchNorm), contexts[:2])
    gc.collect()
    before = core.layers()
    train(module, [1])
    symbol = classifier(SyncBatchNorm)
    for _ in range(3):
        other = bound(symbol, contexts[:2])
        other.forward(batch_of(0), is_train=True)
        del other
    gc.collect()
    assert core.layers() == before + 2  # those of the symbol
    del symbol
    for _ in range(3):
        classifier(SyncBatchNorm)
    gc.collect()
    assert core.layers() == before + 2  # those of the last one


# ---- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, places, said",
    [
        ({}, (0, 0), r"ctx: .* are on cpu\(0\), cpu\(0\), expected each context once"),
        (dict(groups=[[0, 1]]), (0, 1, 2), "expected each of the 3 replicas in one group: no group has rank 2"),
        (dict(mode="shuffle"), (0,), "virtual_devices: 1 was given, expected at least 2 with mode 'shuffle'"),
    ],
)
def test_contexts_that_do_not_fit(settings, places, said, contexts):
    with pytest.raises(ValueError, match=said):
        bound(classifier(SyncBatchNorm, **settings), [contexts[place] for place in places])
    predicts = bound(classifier(SyncBatchNorm, **settings), [contexts[place] for place in places], for_training=False)
    predicts.forward(batch_of(1))
    want = bound(classifier(PLAIN), contexts[:1], for_training=False)
    want.forward(batch_of(1))
    np.testing.assert_allclose(predicts.get_outputs()[0].asnumpy(), want.get_outputs()[0].asnumpy(), atol=1e-9)


def broken(seed, dtype="float64"):
    batch = batch_of(seed, dtype=dtype)
    batch.data[0][0] = np.nan
    return batch


class OwnModule(mx.mod.Module):
    """A program's own: of MXNet's it uses the group of executors, and functions that update weights."""

    def forward(self, data_batch, is_train=None):
        self._exec_group.forward(data_batch, is_train)

    def backward(self, out_grads=None):
        self._exec_group.backward(out_grads)

    def update(self):
        self._params_dirty = True
        group = self._exec_group
        arrays = group.param_arrays, group.grad_arrays
        if self._update_on_kvstore:
            mx.model._update_params_on_kvstore(*arrays, self._kvstore, group.param_names)
        else:
            mx.model._update_params(*arrays, self._updater, 2, self._kvstore, group.param_names)


@pytest.fixture(params=[mx.mod.Module, OwnModule])
def kind(request, monkeypatch):
    """Modules of this class."""
    monkeypatch.setattr(mx.mod, "Module", request.param)


@pytest.mark.usefixtures("kind")
def test_a_failed_step_changes_nothing_and_the_next_one_trains(contexts):
    """The failure shows where a result is read; the steps around it are those of a run without it."""
    want = train(ready(classifier(SyncBatchNorm), contexts[:2]), [1, 2, 3])
    gluon_syncbn.configure(nonfinite="error")
    module = ready(classifier(SyncBatchNorm), contexts[:2])
    for seed in (1, None, 2, None, 3):
        module.forward_backward(broken(0) if seed is None else batch_of(seed))
        module.update()
        if seed is None:
            with pytest.raises(gluon_syncbn.StepError, match="the batch is not finite"):
                module.get_outputs()[0].asnumpy()
    assert_same(values_of(module), want, 1e-12)


@pytest.mark.usefixtures("kind")
def test_an_update_that_waits_changes_nothing(contexts, monkeypatch):
    """Whoever reads a result takes the error away before the update has begun."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    want = train(ready(classifier(SyncBatchNorm), contexts[:2]), [1, 2])
    gluon_syncbn.configure(nonfinite="error")
    module = ready(classifier(SyncBatchNorm), contexts[:2])
    train(module, [1])
    module.forward_backward(broken(0))
    bias = module._exec_group.param_arrays[module._exec_group.param_names.index("fc_bias")]
    gate = Gate()
    read = [gate.behind(array) for array in bias]
    module.update()
    for outputs in module.get_outputs(merge_multi_context=False):
        for output in outputs:
            with pytest.raises(mx.MXNetError):
                output.asnumpy()
    gate.open()
    gluon_syncbn.reset()
    assert len(read) == 2
    assert_same(train(module, [2]), want, 1e-12)


def test_a_failure_that_nobody_has_read_is_raised_by_the_next_forward(contexts):
    want = train(ready(classifier(SyncBatchNorm), contexts[:2]), [1, 2])
    gluon_syncbn.configure(nonfinite="error")
    module = ready(classifier(SyncBatchNorm), contexts[:2])
    module.forward_backward(batch_of(1))
    module.update()
    mx.nd.waitall()
    module.forward_backward(broken(0))
    module.update()
    while not core.failure():
        time.sleep(0.01)
    with pytest.raises(gluon_syncbn.StepError, match="the batch is not finite"):
        module.forward(batch_of(2), is_train=True)
    assert_same(train(module, [2]), want, 1e-12)


def test_a_failure_in_the_first_of_two_modules_is_one_of_both(contexts):
    """The second one does not train on what the first one leaves."""
    want = train(sequence(SyncBatchNorm, contexts[:2]), [1, 2], "float32")
    chain = sequence(SyncBatchNorm, contexts[:2])
    train(chain, [1], "float32")
    gluon_syncbn.configure(nonfinite="error")
    with pytest.raises(mx.MXNetError, match="the batch is not finite"):
        chain.forward_backward(broken(0, "float32"))
        chain.update()
        chain.get_outputs()[0].asnumpy()
    assert_same(train(chain, [2], "float32"), want, 1e-6)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_an_exception_between_two_executors(what, contexts, monkeypatch):
    """The replica that was called does not wait for the other one, and the next step trains."""
    want = train(ready(classifier(SyncBatchNorm), contexts[:2]), [1, 2])
    module = ready(classifier(SyncBatchNorm), contexts[:2])
    train(module, [1])

    def fails(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module._exec_group.execs[1], what, fails)
        with pytest.raises(OSError):
            module.forward_backward(batch_of(0))
    got = train(module, [2])
    if what == "backward":  # the forward before it has moved the running statistics
        got, want = ({k: v for k, v in values.items() if "moving" not in k} for values in (got, want))
    assert_same(got, want, 1e-12)


# ---- contrib's symbol ------------------------------------------------------------------------------------------


def contribs(y, **given):
    return mx.sym.contrib.SyncBatchNorm(y, ndev=2, key=given["name"], **given)


@pytest.mark.parametrize("norm, convert", [(contribs, False), (PLAIN, True)], ids=["contrib's", "plain"])
def test_symbols_of_others(norm, convert, contexts, one_device):
    gluon_syncbn.install(convert=convert)
    try:
        symbol = classifier(norm)
        assert_same(fitted(symbol, contexts[:2]), one_device)
    finally:
        gluon_syncbn.uninstall()
    assert norm is PLAIN or "_contrib_SyncBatchNorm" in symbol.tojson()
    assert "gluon_syncbn" not in symbol.tojson()


@pytest.mark.parametrize("operator", ["SyncBatchNorm", "BatchNorm"])
def test_an_operator_stays_where_its_mean_is_used(operator, contexts):
    """A warning names it once, also where a ``Module`` binds one executor for each context."""
    gluon_syncbn.install(convert=True)
    try:
        data = mx.sym.var("data")
        if operator == "BatchNorm":
            norm, named = mx.sym.BatchNorm(data, output_mean_var=True, name="seen"), "seen (BatchNorm)"
        else:
            norm = mx.sym.contrib.SyncBatchNorm(data, output_mean_var=True, ndev=2, key="k", name="seen")
            named = "seen (_contrib_SyncBatchNorm)"
        other = mx.sym.BatchNorm(norm[0], name="other")
        for symbol, converted in ((norm, 0), (mx.sym.Group([other, norm[1]]), 1)):
            module = mx.mod.Module(symbol, label_names=None, context=contexts[:2])
            with pytest.warns(UserWarning, match="stays, because") as warned:
                module.bind([("data", (4, 3))])
            said = f"{named}: MXNet's own operator stays, because the graph uses its mean or variance"
            assert [str(warning.message) for warning in warned] == [said]
            graph = json_of(module._exec_group.execs[1]._symbol)
            assert [node["op"] for node in graph["nodes"]].count("Custom") == converted
            assert f'"op": "{named[6:-1]}"' in module.symbol.tojson() and "__gluon" not in module.symbol.tojson()
    finally:
        gluon_syncbn.uninstall()


def test_contribs_symbol_is_mxnets_again(contexts):
    gluon_syncbn.install()
    gluon_syncbn.uninstall()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = mx.mod.Module(contribs(mx.sym.var("data"), name="k"), label_names=None, context=contexts[0])
        module.bind([("data", (2, 3, 4))])
    assert "_contrib_SyncBatchNorm" in module._exec_group.symbol.tojson()


def test_a_symbol_block_of_a_file_is_plain(contexts, tmp_path):
    SyncBatchNorm(mx.sym.var("data"), name="bn0").save(str(tmp_path / "net.json"))
    block = gluon.SymbolBlock.imports(str(tmp_path / "net.json"), ["data"])
    assert [layer["op"] for layer in json_of(block._cached_graph[1])["nodes"] if layer["op"] != "null"] == ["BatchNorm"]


def test_a_monitor_of_many_layers(contexts, rng):
    """Each of its statistics needs temporary space, and waits for the replica whose output it is of."""
    y = mx.sym.var("data")
    for i in range(8):
        y = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.Convolution(y, num_filter=4, kernel=(1, 1)), name=f"bn{i}")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(y, num_hidden=3), name="softmax")
    batches = mx.io.NDArrayIter(rng.randn(8, 3, 4, 4), rng.randint(0, 3, 8), 4, label_name="softmax_label")
    monitor = mx.mon.Monitor(1, pattern="bn.*_output")
    seen = []
    monitor.toc_print = lambda: seen.append(len(monitor.toc()))
    mx.mod.Module(symbol, context=contexts[:2]).fit(batches, num_epoch=1, monitor=monitor)
    assert seen[0] == seen[1] > 16
