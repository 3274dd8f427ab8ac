"""Memory of GluonCV's own way of training on several devices, over many steps."""

import sys

import pytest
from environments import ended
from places import PACKAGE

pytest.importorskip("gluoncv", reason="GluonCV is not installed")

# As GluonCV's scripts/segmentation/train.py trains, on random images; it prints the resident memory in MB.
SCRIPT = """
import sys
import mxnet as mx
from mxnet import autograd, gluon, nd
from gluoncv.loss import MixSoftmaxCrossEntropyLoss
from gluoncv.model_zoo.segbase import get_segmentation_model
from gluoncv.utils.parallel import DataParallelCriterion, DataParallelModel

contexts = [mx.gpu(0), mx.gpu(1)]
net = get_segmentation_model(
    "fastscnn", dataset="ade20k", aux=True, base_size=64, crop_size=64, pretrained_base=False,
    norm_layer=gluon.contrib.nn.SyncBatchNorm, norm_kwargs={"num_devices": 2},
)
net.initialize(ctx=contexts)
net.hybridize()
model = DataParallelModel(net, contexts, sync=True)
for context in contexts:  # GluonCV's threads race where they are the first to trace it
    net(nd.zeros((1, 3, 64, 64), ctx=context))
criterion = DataParallelCriterion(MixSoftmaxCrossEntropyLoss(True, aux_weight=0.4), contexts, sync=True)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
reported = [int(step) for step in sys.argv[1:]]
for step in range(1, reported[-1] + 1):
    images = nd.random.normal(shape=(4, 3, 64, 64))
    masks = nd.floor(nd.random.uniform(0, 10, shape=(4, 64, 64)))
    with autograd.record():
        losses = criterion(model(images), masks)
    autograd.backward(losses)
    trainer.step(4)
    nd.waitall()
    if step in reported:
        with open("/proc/self/statm") as file:
            print(int(file.read().split()[1]) * 4096 / 2**20, flush=True)
"""
# The same with GluonCV's helpers and the threads that they start.
THREADS = (
    "import gluon_syncbn.command.replacements as ours; ours.remove(); ours._put_helpers = lambda _: None\n"
    "ours.install(2)\n"
)


def memory(tmp_path, text, *steps):
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [sys.executable, "-W", "ignore", "-m", "gluon_syncbn", "run", "--cpus", "2", str(script)]
    done = ended([*command, *steps], PACKAGE.parent, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(line) for line in done.stdout.split()]


@pytest.mark.slow
def test_a_script_of_gluoncvs_stays_as_large_as_it_is(tmp_path):
    early, late = memory(tmp_path, SCRIPT, 50, 300)
    print(f"{early:.0f} MB after 50 steps, {late:.0f} MB after 300")
    assert late - early < 30


@pytest.mark.slow
def test_with_gluoncvs_own_helpers_it_grows(tmp_path):
    early, late = memory(tmp_path, THREADS + SCRIPT, 5, 15)
    print(f"{early:.0f} MB after 5 steps, {late:.0f} MB after 15")
    assert late - early > 100
