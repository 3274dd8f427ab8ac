"""A process of two that make a training step of a residual network, and find the parameters that PyTorch has found."""

import sys

import numpy as np

import gluon_syncbn

SIZES = (7, 4)  # of the shards
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-3


def main(path):
    (context,) = gluon_syncbn.cpu_devices(1)
    from mxnet import autograd, gluon, nd
    from mxnet.gluon import nn

    kv = gluon_syncbn.kvstore("mpi")

    def convolution(channels, kernel, stride, padding):
        return nn.Conv2D(channels, kernel, stride, padding, use_bias=False)

    def norm():
        return gluon_syncbn.SyncBatchNorm(kvstore=kv, running_variance="unbiased")

    class Block(nn.HybridBlock):
        def __init__(self, channels, stride):
            super().__init__()
            self.body, self.shortcut = nn.HybridSequential(), nn.HybridSequential()
            self.body.add(convolution(channels, 3, stride, 1), norm(), nn.Activation("relu"))
            self.body.add(convolution(channels, 3, 1, 1), norm())
            self.shortcut.add(convolution(channels, 1, stride, 0), norm())

        def hybrid_forward(self, F, x):
            return F.relu(self.body(x) + self.shortcut(x))

    net = nn.HybridSequential()
    net.add(convolution(8, 3, 1, 1), norm(), nn.Activation("relu"))
    net.add(Block(16, 2), Block(32, 2), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(5))
    net.initialize(ctx=context)
    data = np.load(path)
    own = slice(kv.rank * SIZES[0], kv.rank * SIZES[0] + SIZES[kv.rank])
    x, y = (nd.array(data[name][own], ctx=context) for name in "xy")
    net(x)  # the shapes follow from the input
    # Both list the parameters of a layer in the same order.
    parameters = list(net.collect_params().values())
    for i, parameter in enumerate(parameters):
        parameter.set_data(nd.array(data[f"before{i}"]))
    settings = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "wd": WEIGHT_DECAY}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=kv)
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
    loss.backward()
    trainer.step(sum(SIZES))
    for i, parameter in enumerate(parameters):
        got, want = parameter.data().asnumpy(), data[f"after{i}"]
        error = np.abs(got - want).max() / np.abs(want).max()
        moved = np.abs(want - data[f"before{i}"]).max() / np.abs(want).max()
        assert error < 1e-5 < 1e-4 < moved, (parameter.name, error, moved)
    print(f"OK {kv.rank}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
