"""Symbols in `Module`, BucketingModule and SequentialModule, against one context; other executors only predict."""

import functools
import gc
import json
import time

import mxnet as mx
import numpy as np
import pytest
from gate import Gate
from internals import core
from mxnet import nd
from mxnet.gluon import nn
from nets import body, drawn, filled, operators, symbols
from replicas import assert_near, ready

import gluon_syncbn
from gluon_syncbn.symbol import SyncBatchNorm

PLAIN = mx.sym.BatchNorm
CLASSES = 3
INPUTS = "data", "softmax_label"
SETTINGS = dict(learning_rate=0.05, momentum=0.9, wd=0.1)


def classifier(norm, **settings):
    y = mx.sym.FullyConnected(mx.sym.relu(symbols(norm, **settings)), num_hidden=CLASSES, name="fc")
    return mx.sym.SoftmaxOutput(y, name="softmax")


def samples(seed, count, size=12):
    """Images of other distributions along the batch, and classes, in batches."""
    rng = np.random.RandomState(seed)
    scale = np.linspace(1, 5, count)[:, None, None, None]
    images = nd.array(rng.randn(count, 3, 7, 7) * scale + scale, dtype="float64")
    classes = nd.array(rng.randint(0, CLASSES, count), dtype="float64")
    return mx.io.NDArrayIter(images, classes, size, label_name="softmax_label")


def batch_of(seed, size=12):
    source = samples(seed, size, size)
    batch = next(source)
    shapes = dict(provide_data=source.provide_data, provide_label=source.provide_label)
    return mx.io.DataBatch(batch.data, batch.label, 0, bucket_key=size, **shapes)


def parameters_of(symbol, sample=(3, 7, 7)):
    """Values for a net, which follow from names."""
    arguments, _, states = symbol.infer_shape(data=(2, *sample))
    named = zip(symbol.list_arguments(), arguments), zip(symbol.list_auxiliary_states(), states)
    return [{n: nd.array(drawn(n, s), dtype="float64") for n, s in part if n not in INPUTS} for part in named]


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


def trainable(symbol, contexts, kvstore="local", **given):
    module = bound(symbol, contexts, **given)
    module.init_optimizer(kvstore, "sgd", SETTINGS)
    return module


def settle(norm):
    """An executor does not tell MXNet's engine that plain BatchNorm writes its running statistics, in the backward."""
    if norm is PLAIN:
        mx.nd.waitall()


def values_of(module, norm=PLAIN):
    """Without the gammas that do not count."""
    settle(norm)
    values = {name: value.asnumpy() for part in module.get_params() for name, value in part.items()}
    return {name: value for name, value in values.items() if name not in ("bn1_gamma", "net_three_gamma")}


def train(module, seeds, norm=PLAIN):
    for seed in seeds:
        module.forward_backward(batch_of(seed))
        module.update()
    return values_of(module, norm)


def fitted(norm, contexts, kvstore="local", shares=None):
    """After three epochs of `fit`, with a validation behind each: parameters, running statistics and both metrics."""
    shares, symbol = shares if len(contexts) > 1 else None, classifier(norm)
    module = mx.mod.Module(symbol, context=contexts, work_load_list=shares)
    arguments, states = parameters_of(symbol)
    scores = []
    module.fit(
        samples(1, 48),
        eval_data=samples(2, 24),
        eval_metric="ce",
        num_epoch=3,
        kvstore=kvstore,
        optimizer_params=SETTINGS,
        arg_params=arguments,
        aux_params=states,
        eval_end_callback=lambda given: scores.append(given.eval_metric.get()[1]),
    )
    assert norm is SyncBatchNorm or "gluon_syncbn" not in symbol.tojson()
    before = values_of(module)
    predicted = module.predict(samples(4, 20)).asnumpy()  # the last batch is padded
    assert_near(values_of(module), before, 0)
    return {**before, "scores": np.array(scores), "predicted": predicted}


# ---- one context ---------------------------------------------------------------------------------------------


def stepped(norm, contexts, grad_req="write", **given):
    """Of two steps on uneven shards: output, gradients of data and parameters, running statistics."""
    heads = nd.array(np.random.RandomState(3).randn(12, 5, 4, 4), dtype="float64")
    given["work_load_list"] = [3, 1, 2][: len(contexts)]
    module = bound(symbols(norm), contexts, labels=False, inputs_need_grad=True, grad_req=grad_req, given=given)
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


def of_a_gluon_net(norm, contexts):
    """Its own layers are elsewhere, and stay."""
    net = filled(body(nn.BatchNorm if norm is PLAIN else gluon_syncbn.SyncBatchNorm), [mx.cpu(3), mx.cpu(4)])
    y = mx.sym.FullyConnected(net(mx.sym.var("data")), num_hidden=CLASSES, name="fc")
    return train(trainable(mx.sym.SoftmaxOutput(y, name="softmax"), contexts), range(3))


def in_other_sizes(norm, contexts, sizes=(12, 6, 12, 20, 6), buckets=False):
    """With a reshape that is asked for, and by the batch; with two forwards that nothing else puts in order. Buckets
    have graphs of their own, on the same parameters.
    """
    module = trainable(classifier(norm), contexts, buckets=buckets and functools.partial(classifier, norm))
    for seed, size in enumerate(sizes):
        batch = batch_of(seed, size)
        if seed % 2 and not buckets:
            module.reshape(batch.provide_data, batch.provide_label)
        for one in (batch, batch_of(seed + 10, 30 - size)):
            module.forward_backward(one)
            settle(norm)
        module.update()
    return values_of(module, norm)


def sequence(norm, contexts):
    """Two modules, one behind the other, in float32, because what goes between is."""
    rest = mx.sym.FullyConnected(norm(mx.sym.var("data"), name="bn2", fix_gamma=False), num_hidden=CLASSES, name="fc")
    both = symbols(norm), mx.sym.SoftmaxOutput(rest, name="softmax")
    chain = mx.mod.SequentialModule()
    chain.add(mx.mod.Module(both[0], label_names=None, context=contexts))
    chain.add(mx.mod.Module(both[1], context=contexts), take_labels=True, auto_wiring=True)
    chain.bind([("data", (12, 3, 7, 7))], [("softmax_label", (12,))])
    first, second = (parameters_of(symbol, sample) for symbol, sample in zip(both, [(3, 7, 7), (5, 4, 4)]))
    chain.init_params(arg_params={**first[0], **second[0]}, aux_params={**first[1], **second[1]})
    chain.init_optimizer("local", "sgd", SETTINGS)
    return chain


def contribs(y, **given):
    return mx.sym.contrib.SyncBatchNorm(y, ndev=2, key=given["name"], **given)


#: What trains, the norm, the number of contexts, and settings: as with plain BatchNorm on one context.
TRAININGS = {
    "fit, one context": (fitted, SyncBatchNorm, 1, {}),
    "fit, device": (fitted, SyncBatchNorm, 3, {"kvstore": "device"}),
    "fit, shares": (fitted, SyncBatchNorm, 2, {"kvstore": "local", "shares": [1, 3]}),
    "fit, updates here": (fitted, SyncBatchNorm, 2, {"kvstore": "local", "MXNET_UPDATE_ON_KVSTORE": "0"}),
    "fit, contrib's": (fitted, contribs, 2, {}),
    "fit, plain": (fitted, PLAIN, 2, {}),
    "write": (stepped, SyncBatchNorm, 3, {}),
    "add": (stepped, SyncBatchNorm, 3, {"grad_req": "add"}),
    "fixed": (stepped, SyncBatchNorm, 3, {"fixed_param_names": ["bn0_gamma", "bn0_beta", "conv0_weight"]}),
    "a net of gluon": (of_a_gluon_net, SyncBatchNorm, 2, {}),
    "other sizes": (in_other_sizes, SyncBatchNorm, 2, {}),
    "a larger size": (in_other_sizes, SyncBatchNorm, 2, {"sizes": (6, 24)}),
    "buckets": (in_other_sizes, SyncBatchNorm, 2, {"buckets": True}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_it_is_plain_on_one_context(name, contexts, monkeypatch):
    train_with, norm, count, settings = TRAININGS[name]
    for setting in [one for one in settings if one.isupper()]:
        monkeypatch.setenv(setting, settings[setting])
    given = {setting: value for setting, value in settings.items() if not setting.isupper()}
    want = train_with(PLAIN, contexts[:1], **given)
    if norm in (contribs, PLAIN):
        gluon_syncbn.install(convert=norm is PLAIN)
    assert_near(train_with(norm, contexts[:count], **given), want, 1e-9)


def test_a_net_of_gluon_that_is_gone(contexts):
    symbol = body(gluon_syncbn.SyncBatchNorm)(mx.sym.var("data"))
    gc.collect()
    with pytest.raises(mx.MXNetError, match=r"the SyncBatchNorm of 'net_one.*' no longer exists.*keep the net"):
        bound(symbol, contexts[:2], labels=False)


# ---- files ------------------------------------------------------------------------------------------------------


# MXNet leaves the file of the optimizer's states to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint(contexts, tmp_path):
    """Its file is for any MXNet; a Module of it goes on as if nothing had been saved."""
    symbol = classifier(SyncBatchNorm, ndev=2, key="k")
    module = trainable(symbol, contexts[:2])
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
    again.init_optimizer("local", "sgd", SETTINGS)
    assert_near(train(again, [3, 4]), want, 1e-12)


@pytest.mark.parametrize("settings", [dict(mode="local"), dict(groups=((0, 2), (1,)))], ids=str)
def test_a_file_keeps_the_settings(settings, contexts, tmp_path):
    norm = functools.partial(SyncBatchNorm, virtual_devices=2, running_variance="unbiased", timeout=17.0, **settings)

    def loaded(y, **given):
        norm(y, **given).save(str(tmp_path / "norm.json"))
        return mx.sym.load(str(tmp_path / "norm.json"))

    assert_near(stepped(loaded, contexts[:3]), stepped(norm, contexts[:3]), 1e-12)
    for symbol in (made(mx.sym.var("data"), name="bn0") for made in (norm, loaded)):
        ((_, replicas),) = bound(symbol, contexts[:3], labels=False)._exec_group.layers
        assert replicas.settings.unbiased and (replicas.settings.timeout, replicas.settings.virtual_devices) == (17, 2)
        assert replicas.settings.groups == settings.get("groups")


# ---- other executors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_net", [False, True])
def test_other_executors_predict(in_a_net, contexts):
    """A training step says what to do."""
    symbol = SyncBatchNorm(mx.sym.var("data"), name="alone", ndev=2, key="k")
    if in_a_net:  # whose contexts are known
        net = ready(gluon_syncbn.SyncBatchNorm(in_channels=3, prefix="alone_"), contexts=contexts[:1])
        symbol = net(mx.sym.var("data"))
    executor = symbol.simple_bind(contexts[0], data=(2, 3, 4))
    assert executor.forward()[0].asnumpy().shape == (2, 3, 4)
    said = r"'alone' on cpu\(0\): an executor .* in a Module or a SymbolBlock"
    with pytest.raises(mx.MXNetError, match=said):
        executor.forward(is_train=True)[0].asnumpy()


def test_layers_live_as_long_as_their_executors(contexts):
    module = trainable(classifier(SyncBatchNorm), contexts[:2])
    gc.collect()
    before = core.layers()
    train(module, [1])
    for _ in range(3):
        other = bound(classifier(SyncBatchNorm), contexts[:2])
        other.forward(batch_of(0), is_train=True)
        del other
    gc.collect()
    assert core.layers() == before + 2  # those of the last symbol


# ---- errors ---------------------------------------------------------------------------------------------------


def test_what_a_module_refuses(contexts, monkeypatch):
    with pytest.raises(ValueError, match=r"group2ctxs: .* expected None"):
        bound(classifier(SyncBatchNorm), contexts[:2], given={"group2ctxs": {"part": contexts[2:4]}})
    marked = functools.partial(SyncBatchNorm, attr={"force_mirroring": "True"})
    with pytest.raises(ValueError, match="force_mirroring: True was given, expected False for 'bn0'"):
        bound(classifier(marked), contexts[:1])
    bound(classifier(marked), contexts[:1], for_training=False)
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    with pytest.raises(ValueError, match="MXNET_BACKWARD_DO_MIRROR: '1' was given, expected 0"):
        bound(classifier(SyncBatchNorm), contexts[:2])


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


def broken(seed):
    batch = batch_of(seed)
    batch.data[0][0] = np.nan
    return batch


def read(module, _):
    """By whoever reads a result, or before the forward of the second of two modules."""
    with pytest.raises(gluon_syncbn.StepError, match="the batch is not finite"):
        module.forward_backward(broken(0))
        module.update()
        module.get_outputs()[0].asnumpy()


def read_before_the_update(module, _):
    """Which has not begun when the error is taken away."""
    module.forward_backward(broken(0))
    gate, group = Gate(), module._exec_group
    held = [gate.behind(array) for array in group.param_arrays[group.param_names.index("fc_bias")]]
    module.update()
    for output in (one for outputs in module.get_outputs(merge_multi_context=False) for one in outputs):
        with pytest.raises(mx.MXNetError):
            output.asnumpy()
    gate.open()
    gluon_syncbn.reset()
    assert len(held) == 2


def nobody_has_read(module, _):
    """The next forward raises it."""
    mx.nd.waitall()
    module.forward_backward(broken(0))
    module.update()
    while not core.failure():
        time.sleep(0.01)
    with pytest.raises(gluon_syncbn.StepError, match="the batch is not finite"):
        module.forward(batch_of(2), is_train=True)


def an_exception_in_forward(module, monkeypatch, what="forward"):
    """Between two executors. The replica that was called does not wait for the other one."""

    def fails(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module._exec_group.execs[1], what, fails)
        with pytest.raises(OSError, match="disk full"):
            module.forward_backward(batch_of(0))


an_exception_in_backward = functools.partial(an_exception_in_forward, what="backward")
FAILURES = [(read, mx.mod.Module), (read, mx.mod.SequentialModule), (read_before_the_update, mx.mod.Module)]
FAILURES += [(one, mx.mod.Module) for one in (nobody_has_read, an_exception_in_forward, an_exception_in_backward)]


@pytest.mark.parametrize("failure, kind", FAILURES)
def test_a_failed_step_changes_nothing_and_the_next_one_trains(failure, kind, contexts, monkeypatch):
    """The steps around it are those of a run without it."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", str(int(failure is not read_before_the_update)))
    in_parts = kind is mx.mod.SequentialModule  # of which the second does not train on what the first leaves
    make = sequence if in_parts else lambda norm, contexts: trainable(classifier(norm), contexts)
    want = train(make(SyncBatchNorm, contexts[:2]), [1, 2, 3])
    gluon_syncbn.configure(nonfinite="error")
    module = make(SyncBatchNorm, contexts[:2])
    for seed in (1, 2):
        train(module, [seed])
        failure(module, monkeypatch)
    got = train(module, [3])
    if failure is an_exception_in_backward:  # the forward before it has moved the running statistics
        got, want = ({k: v for k, v in values.items() if "moving" not in k} for values in (got, want))
    assert_near(got, want, 1e-6 if in_parts else 1e-12)


# ---- operators of others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [contribs, PLAIN])
def test_an_operator_stays_where_its_mean_is_used(norm, contexts):
    """A warning names it once, also where a ``Module`` binds one executor for each context."""
    operator = "BatchNorm" if norm is PLAIN else "_contrib_SyncBatchNorm"
    said = f"seen ({operator}): MXNet's own operator stays, because the graph uses its mean or variance"
    gluon_syncbn.install(convert=True)
    seen = norm(mx.sym.var("data"), output_mean_var=True, name="seen")
    other = PLAIN(seen[0], name="other")
    for symbol, converted in ((seen, 0), (mx.sym.Group([other, seen[1]]), 1)):
        module = mx.mod.Module(symbol, label_names=None, context=contexts[:2])
        with pytest.warns(UserWarning, match="stays, because") as warned:
            module.bind([("data", (4, 3))])
        assert [str(warning.message) for warning in warned] == [said]
        assert operators(module._exec_group.execs[1]._symbol).count("Custom") == converted
        assert f'"op": "{operator}"' in module.symbol.tojson() and "__gluon" not in module.symbol.tojson()
