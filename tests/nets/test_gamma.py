"""Gammas of layers with scale=False: they do not count, and who writes a net puts 1 there."""

import warnings

import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm


def net_of(norm=nn.BatchNorm):
    """The last two layers have a gamma that does not count, and so has the graph in between."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 2, in_channels=3), norm(in_channels=4))
        net.add(nn.Conv2D(4, 2, in_channels=4), norm(in_channels=4, scale=False), nn.Activation("relu"))
        net.add(norm(in_channels=4, scale=False))
    return net


def filled(net, contexts, values=(3, 2, 0.5)):
    """As after the checkpoint of such a net."""
    net.initialize(ctx=contexts)
    rng = np.random.RandomState(0)
    for parameter in net.collect_params().values():
        parameter.set_data(nd.array(rng.rand(*parameter.shape) + 0.5, dtype=parameter.dtype))
    for gamma, value in zip(gammas(net), values):
        gamma.set_data(nd.full(4, value))
    return net


def gammas(net):
    return [parameter for name, parameter in net.collect_params().items() if name.endswith("gamma")]


def stored(net):
    return [[array.asnumpy().tolist() for array in gamma.list_data()] for gamma in gammas(net)]


def heard(function, *args, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        result = function(*args, **kwargs)
    assert all(one.filename == __file__ for one in caught)
    return result, [str(one.message) for one in caught]


def expected(*names):
    names = ", ".join(f"net_batchnorm{name}_gamma" for name in names)
    return (
        f"export wrote 1 into gammas that were not 1: {names}. Their layers have scale=False (fix_gamma): MXNet uses "
        "1 for them, but ONNX and other exporters use the stored values"
    )


@pytest.mark.parametrize("norm", [nn.BatchNorm, SyncBatchNorm])
def test_export(norm, contexts, tmp_path):
    SyncBatchNorm()  # without a layer, `export` is MXNet's
    x = nd.random.normal(shape=(2, 3, 6, 6))
    net = filled(net_of(norm), contexts[:1])
    net.hybridize()
    want = net(x).asnumpy()
    assert heard(net.export, str(tmp_path / "net"))[1] == [expected(1, 2)]
    assert heard(net.export, str(tmp_path / "net"))[1] == []  # once
    arrays = nd.load(str(tmp_path / "net-0000.params"))
    for number, value in enumerate((3, 1, 1)):
        assert (arrays[f"arg:net_batchnorm{number}_gamma"] == value).asnumpy().all()
    np.testing.assert_array_equal(net(x).asnumpy(), want)
