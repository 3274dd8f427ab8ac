"""What `install` puts in the places of contrib's layer and GluonCV's helpers is used, and `uninstall` takes it away."""

import sys
from types import ModuleType, SimpleNamespace

import gluoncv
import mxnet as mx
import numpy as np
import pytest
from environments import ended
from gluoncv.model_zoo.rcnn.mask_rcnn import mask_rcnn
from gluoncv.nn import feature
from mxnet import nd
from mxnet.gluon import nn
from replicas import ready

import gluon_syncbn
from gluon_syncbn import parallel
from gluon_syncbn.mxnet_side import blocks

CONTRIB = mx.gluon.contrib.nn.SyncBatchNorm
untyped_symbol = pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")


def everything():
    """What every module of MXNet and GluonCV holds, by name."""
    return {
        (name, attribute): value
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in ("mxnet", "gluoncv") and isinstance(module, ModuleType)
        for attribute, value in vars(module).items()
    }


def changed(before, after):
    return {name for name, attribute in before.items() if after[name] is not attribute}


@pytest.mark.parametrize("cpus", [None, 2])
def test_uninstall_restores_every_object(cpus):
    before = everything()
    words = gluon_syncbn.install(cpus)
    assert gluon_syncbn.install(cpus) == words  # once more is once
    with pytest.raises(ValueError, match=f"cpus: 3 was given, expected {cpus}, as installed before"):
        gluon_syncbn.install(cpus=3)
    held = {
        ("mxnet.gluon.contrib.nn", "SyncBatchNorm"),
        ("mxnet.gluon.contrib.nn.basic_layers", "SyncBatchNorm"),
        ("gluoncv.model_zoo.segbase", "parallel_apply"),
        *(("gluoncv.utils.parallel", name) for name in parallel.__all__),
    }
    gpus = {("mxnet", "gpu"), ("mxnet.context", "gpu"), ("mxnet.context", "num_gpus"), ("mxnet.util", "get_gpu_count")}
    replaced = changed(before, everything())
    assert held <= replaced
    assert ("mxnet.symbol.contrib", "SyncBatchNorm") not in replaced
    assert gpus <= replaced if cpus else not gpus & replaced
    gluon_syncbn.uninstall()
    assert not changed(before, everything())
    gluon_syncbn.uninstall()
    assert not changed(before, everything())


def test_what_a_module_holds_by_name(monkeypatch):
    module, theirs = ModuleType("a_script"), gluoncv.utils.parallel.DataParallelModel
    module.Norm, module.Model, module.ours = CONTRIB, theirs, parallel.DataParallelModel
    monkeypatch.setitem(sys.modules, "a_script", module)
    gluon_syncbn.install()
    module.later = mx.gluon.contrib.nn.SyncBatchNorm
    assert issubclass(module.Norm, gluon_syncbn.SyncBatchNorm)
    assert issubclass(module.Model, parallel.DataParallelModel)
    gluon_syncbn.uninstall()
    assert module.Norm is module.later is CONTRIB
    assert module.Model is theirs
    assert module.ours is parallel.DataParallelModel  # by its own name, nobody's replacement


def test_contexts_in_the_places_of_gpus():
    gluon_syncbn.install(cpus=3)
    assert [mx.gpu(i) for i in mx.test_utils.list_gpus()] == [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    assert mx.gpu() == mx.context.gpu(np.int64(0)) == mx.cpu(0)
    assert mx.context.num_gpus() == mx.util.get_gpu_count() == 3
    mx.gpu(1).empty_cache()
    with pytest.raises(ValueError, match="device_id: 3 was given, expected a whole number from 0 to 2"):
        mx.gpu(3)
    gluon_syncbn.uninstall()
    assert mx.gpu(3).device_type == "gpu"


# ---- contrib's layer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [-1, "2", 1.5, True])
def test_the_number_of_devices_is_checked(installed, count):
    with pytest.raises(ValueError, match=r"num_devices: .* was given, expected a whole number from 0"):
        mx.gluon.contrib.nn.SyncBatchNorm(num_devices=count)
    mx.gluon.contrib.nn.SyncBatchNorm(num_devices=0)  # of a script without GPUs


def test_positions_are_those_of_contribs_layer(installed):
    layer = mx.gluon.contrib.nn.SyncBatchNorm(5, 8, 0.7, 1e-3, False)
    found = layer.in_channels, layer.num_devices, layer._kwargs["momentum"], layer._kwargs["eps"]
    assert found == (5, None, 0.7, 1e-3)
    assert not layer.beta._differentiable and layer.gamma._differentiable


# ---- the symbol ------------------------------------------------------------------------------------------------


def operators(block):
    return [node.operator for node in blocks.recorded(block)]


@untyped_symbol
def test_a_symbol_block_has_layers_for_contribs_nodes(installed):
    """And for no others: GluonCV's feature pyramids have the backbone beside them in one graph."""

    def pyramid():
        data = mx.sym.var("data")
        inner = mx.sym.BatchNorm(mx.sym.Convolution(data, num_filter=2, kernel=(1, 1), name="inner"), name="own")
        # GluonCV compares by identity, and gives key and name
        norm = dict(norm_layer=mx.sym.contrib.SyncBatchNorm, norm_kwargs={"ndev": 2})
        return feature.FPNFeatureExpander(inner, outputs=["own"], num_filters=[2], use_upsample=False, **norm)

    ours = pyramid()
    ours.initialize()
    ours(mx.nd.ones((1, 3, 4, 4)))
    gluon_syncbn.uninstall()
    theirs = pyramid()
    assert operators(theirs) == ["BatchNorm", "_contrib_SyncBatchNorm", "_contrib_SyncBatchNorm"]
    assert operators(ours) == ["BatchNorm", "gluon_syncbn", "gluon_syncbn"]
    assert type(theirs) is feature.FPNFeatureExpander
    layers = [block for block in blocks.iterate(ours) if blocks.is_batch_norm(block)]
    assert [type(layer).__name__ for layer in layers] == ["BatchNorm", "SyncBatchNorm", "SyncBatchNorm"]
    assert layers[0].name == "own"


def test_mask_rcnn_has_all_layers(installed):
    """It compares the class by identity, and leaves out the layers of its mask head for any other."""
    kwargs = dict(batch_images=1, classes=["one"], mask_channels=4, num_fcn_convs=2, norm_kwargs={"num_devices": 2})
    head = mask_rcnn.Mask(norm_layer=mx.gluon.contrib.nn.SyncBatchNorm, **kwargs)
    layers = [block for block in blocks.iterate(head) if blocks.is_batch_norm(block)]
    assert len(layers) == 3 and all(isinstance(layer, gluon_syncbn.SyncBatchNorm) for layer in layers)


# ---- GluonCV's helpers -----------------------------------------------------------------------------------------


def test_a_model_that_is_no_block(contexts, installed):
    """GluonCV's segmentation scripts evaluate with one."""
    net = ready(nn.Dense(3, in_units=2))
    evaluated = gluoncv.model_zoo.segbase.SegEvalModel(SimpleNamespace(evaluate=net, collect_params=net.collect_params))
    model = gluoncv.utils.parallel.DataParallelModel(evaluated, contexts[:2])
    assert [y.shape for (y,) in model(nd.ones((4, 2)))] == [(2, 3), (2, 3)]
    with pytest.raises(ValueError, match=r"module: .* was given, expected a network"):
        gluoncv.utils.parallel.DataParallelModel(lambda x: x)


def test_gluoncv_that_is_imported_later():
    text = """
import sys, warnings
warnings.simplefilter("ignore")
import gluon_syncbn
gluon_syncbn.install()
assert "gluoncv" not in sys.modules
import gluoncv
assert gluoncv.utils.parallel.DataParallelModel.__mro__[1] is gluon_syncbn.parallel.DataParallelModel
assert gluoncv.model_zoo.segbase.parallel_apply is gluoncv.utils.parallel.parallel_apply
gluon_syncbn.uninstall()
assert gluoncv.utils.parallel.DataParallelModel.__module__ == "gluoncv.utils.parallel"
assert gluoncv.model_zoo.segbase.parallel_apply is gluoncv.utils.parallel.parallel_apply
assert gluoncv.nn.feature.SyncBatchNorm is __import__("mxnet").sym.contrib.SyncBatchNorm
"""
    ended([sys.executable, "-c", text], code=0)
