"""A contrastive loss over the batch of all devices and processes: SimCLR's, or the supervised one.

    python examples/contrastive/whole_batch.py --cpus 2
    mpiexec -n 2 python examples/contrastive/whole_batch.py --loss supervised --compare

gluon_syncbn.contrastive.gather brings the features of all to each, with a gradient. --compare also trains one process
without it, with all images, and prints how far the parameters are apart.

T. Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020 (arXiv 2002.05709);
P. Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020 (arXiv 2004.11362).
"""

from __future__ import annotations

import argparse
import sys

import mxnet as mx
import numpy as np
from images import UserError, load, view
from mxnet import autograd, gluon, nd

import gluon_syncbn
from gluon_syncbn.contrastive import gather

SIZE, TEMPERATURE, LEARNING_RATE = 16, 0.5, 0.2


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A contrastive loss over the whole batch of several processes")
    parser.add_argument(
        "--loss",
        choices=("simclr", "supervised"),
        default="simclr",
        help="two views belong together if they are of the same image / of the same class",
    )
    parser.add_argument("--kvstore", choices=("mpi",), default="mpi", help="what connects the processes")
    parser.add_argument("--cpus", type=int, default=1, help="number of CPU contexts of this process")
    parser.add_argument("--batch-size", type=int, default=33, help="of all processes together")
    parser.add_argument("--forwards", type=int, choices=(1, 2), default=1, help="encode both views at once, or in turn")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="compare with one process that has the whole batch")
    options = parser.parse_args(argv)
    for name in ("cpus", "steps", "batch_size"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: {getattr(options, name)} was given, expected at least 1")
    return options


def contrastive(own, marks, everyone, of_all):
    """The loss of each own row against the rows of everyone. ``marks`` holds the label and the number of each row."""
    same, itself = (nd.broadcast_equal(marks[:, i : i + 1], of_all[:, i : i + 1].reshape((1, -1))) for i in range(2))
    likelihood = nd.log_softmax(nd.dot(own, everyone, transpose_b=True) / TEMPERATURE - 1e9 * itself)
    return -(likelihood * (same - itself)).sum(axis=1) / (same - itself).sum(axis=1)


def batches(options):
    """The same in every process: two views of each image, (2N, C, S, S), and their marks, (2N, 2)."""
    images, random = load(None, SIZE), np.random.RandomState(options.seed)
    for _ in range(options.steps):
        rows = random.permutation(len(images.train))[: options.batch_size]
        labels = rows if options.loss == "simclr" else images.train_labels[rows]
        views = np.stack([view(images.train[rows], SIZE, random) for _ in range(2)], axis=1)
        marks = np.stack([np.repeat(labels, 2), np.arange(2 * len(rows))], axis=1)
        yield views.reshape((-1, *views.shape[2:])), marks


class Trained:
    """An encoder on some contexts. They hold the shards number ``first``, ``first + 1`` ... of ``count``."""

    def __init__(self, encoder, forwards, contexts, kvstore=None, first=0, count=1):
        self.encoder, self.contexts, self.first, self.count = encoder, contexts, first, count
        self.parts = [slice(i, None, forwards) for i in range(forwards)]  # views of an image are neighbours
        settings = {"learning_rate": LEARNING_RATE, "momentum": 0.9}
        self.trainer = gluon.Trainer(encoder.collect_params(), "sgd", settings, kvstore=kvstore)

    def step(self, views, marks) -> float:
        """One step. Returns the sum of the losses of its rows."""
        here = slice(self.first, self.first + len(self.contexts))

        def shards(values):
            parts = np.array_split(values, self.count)[here]
            return [nd.array(part, ctx=context, dtype="float64") for part, context in zip(parts, self.contexts)]

        def joined(parts):
            return [nd.concat(*each, dim=0) for each in zip(*parts)]

        with autograd.record():
            own = joined([[self.encoder(x) for x in shards(views[part])] for part in self.parts])
            own_marks = joined([shards(marks[part]) for part in self.parts])
            everyone = gather(own) if self.count > 1 else own
            of_all = gather(own_marks) if self.count > 1 else own_marks
            losses = [contrastive(*each).sum() for each in zip(own, own_marks, everyone, of_all)]
        autograd.backward(losses)
        self.trainer.step(len(views))
        return sum(loss.asscalar() for loss in losses)


def train(options) -> None:
    contexts = gluon_syncbn.cpu_devices(options.cpus)
    from moco import Encoder

    try:
        kvstore = gluon_syncbn.kvstore(options.kvstore)
    except ImportError as error:
        raise UserError(f"--kvstore: {error}") from None
    gluon_syncbn.configure(kvstore=kvstore)
    replicas, rank = kvstore.num_workers * len(contexts), kvstore.rank
    if options.batch_size < replicas:
        raise UserError(
            f"--batch-size: {options.batch_size} was given, expected at least {replicas}, one for each device"
        )

    def encoder(on):
        mx.random.seed(options.seed)
        net = Encoder("sync", 1, width=8)
        net.initialize(mx.init.Xavier(magnitude=2), ctx=on)
        net(nd.zeros((1, 1, SIZE, SIZE), ctx=on[0]))  # the first batch fixes the shapes
        net.cast("float64")
        return net

    together = Trained(encoder(contexts), options.forwards, contexts, kvstore, rank * len(contexts), replicas)
    # Every process builds it: SyncBatchNorm layers of a job are the same in all.
    alone = Trained(gluon_syncbn.revert(encoder([mx.cpu()])), options.forwards, [mx.cpu()])
    compared = options.compare and rank == 0
    for number, (views, marks) in enumerate(batches(options), 1):
        sums = kvstore.allgather("loss", np.array([together.step(views, marks)]))
        if compared:
            alone.step(views, marks)
        if rank == 0 and number in (1, options.steps):
            print(f"step {number}: loss {np.sum(sums) / len(views):.4f}")
    if compared:
        # Plain running statistics follow the order of the backwards, and those of the layer that of the forwards.
        select = None if options.forwards == 1 else ".*(weight|bias|gamma|beta)"
        pairs = zip(*(one.encoder.collect_params(select).values() for one in (together, alone)))
        apart = max(abs(p.data(contexts[0]).asnumpy() - q.data().asnumpy()).max() for p, q in pairs)
        print(f"{kvstore.num_workers} processes with {len(contexts)} contexts and one process: {apart:.1e} apart")


def main(argv=None) -> int:
    try:
        train(parse(argv))
    except UserError as error:
        print(f"whole_batch.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
