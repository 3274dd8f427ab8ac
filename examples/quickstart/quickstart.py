"""Two devices train as one. The script converts, trains, saves, loads, exports and reverts a net."""

from pathlib import Path

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

import gluon_syncbn

two = [mx.cpu(0), mx.cpu(1)]  # on GPUs: [mx.gpu(0), mx.gpu(1)]
one = two[:1]
out = Path("runs/quickstart")
out.mkdir(parents=True, exist_ok=True)
digits = load_digits()  # 1797 scans of 8 x 8, part of scikit-learn
images, labels = digits.images[:, None].astype("float32") / 16, digits.target.astype("float32")


def network():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for channels in (16, 32):
            net.add(nn.Conv2D(channels, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D())
        net.add(nn.Dense(10))
    net.hybridize()
    return net


def train(net, contexts):
    """Returns the losses of 300 steps of 4 images. Every net gets the same images and the same first parameters."""
    net.load_parameters(str(out / "start.params"), ctx=contexts)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02})
    loss, losses = gluon.loss.SoftmaxCrossEntropyLoss(), []
    for start in range(0, 1200, 4):
        xs = gluon.utils.split_and_load(images[start : start + 4], contexts)
        ys = gluon.utils.split_and_load(labels[start : start + 4], contexts)
        with autograd.record():  # call all devices before you read a result
            parts = [loss(net(x), y) for x, y in zip(xs, ys)]
        autograd.backward(parts)
        trainer.step(4)
        losses.append(sum(float(part.sum().asscalar()) for part in parts) / 4)
    return losses


mx.random.seed(1)
first = network()
first.initialize(mx.init.Xavier())
first(mx.nd.array(images[:1]))  # a forward fixes all shapes
first.save_parameters(str(out / "start.params"))

nets = {
    "one device, BatchNorm": network(),
    "two devices, BatchNorm": network(),
    "two devices, SyncBatchNorm": gluon_syncbn.convert(network()),  # parameters and their names stay
}
losses = {name: train(net, one if name.startswith("one") else two) for name, net in nets.items()}
steps = 1, 2, 10, 300
print(f"{'loss of step':30}" + "".join(f"{step:10}" for step in steps) + "   running mean of a channel, by device")
for name, net in nets.items():
    means = [f"{net[1].running_mean.data(context)[0].asscalar():.6f}" for context in net[1].running_mean.list_ctx()]
    print(f"{name:30}" + "".join(f"{losses[name][step - 1]:10.6f}" for step in steps), " ", *means)
net = nets["two devices, SyncBatchNorm"]
gluon_syncbn.summary(net)

net.save_parameters(str(out / "net.params"))  # in the format of plain BatchNorm
nets["loaded into plain BatchNorm"] = network()
nets["loaded into plain BatchNorm"].load_parameters(str(out / "net.params"), ctx=one)
net.export(str(out / "net"))  # net-symbol.json and net-0000.params load without gluon_syncbn
files = str(out / "net-symbol.json"), ["data"], str(out / "net-0000.params")
nets["exported, and imported"] = gluon.SymbolBlock.imports(*files, ctx=one[0])
gluon_syncbn.revert(net)  # every layer is nn.BatchNorm again, in memory
for name, net in nets.items():
    answers = net(mx.nd.array(images[1200:])).asnumpy().argmax(axis=1)
    print(f"{name:30} {np.mean(answers == labels[1200:]):.3f} of 597 other digits are right")
print("Two devices with SyncBatchNorm are one device with the whole batch. On so small a net, the seed decides whether")
print("plain statistics of two images score a little better or worse; `make demo` shows a net that loses much by them.")

figure, axes = plt.subplots(figsize=(8, 4), constrained_layout=True)
whole = losses.pop("one device, BatchNorm")
for (name, values), color in zip(losses.items(), ("#7F7F7F", "#0072B2")):
    difference = np.abs(np.subtract(values, whole))
    axes.plot(range(1, 301), difference, label=f"{name}: {difference.max():.0e} at most", color=color)
axes.set_yscale("symlog", linthresh=1e-6)  # logarithmic, with a zero
axes.set(xlabel="step, of 4 images in all", ylabel="difference of the training loss\nfrom one device with all 4 images")
axes.set_ylim(bottom=0)
axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=2, frameon=False, labelcolor="linecolor")
figure.savefig(str(out / "losses.png"), dpi=120)
