"""Pixel accuracy and mean intersection over union, of a network and of the best constant prediction."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from gluoncv.utils.metrics import SegmentationMetric
from processes import ALONE


class Scores(SegmentationMetric):
    """GluonCV's metric, with mIoU over the classes that occur in the truth.

    GluonCV divides by the number of classes of the data set. On ADE20K's validation images all 150 classes occur, and
    both figures are the same. On a set with seven classes, GluonCV's figure could not exceed 7/150.
    """

    def reset(self):
        super().reset()
        self.truth = 0  # labelled pixels of each class, after the first update

    def update(self, labels, preds):
        super().update(labels, preds)
        for label in labels if isinstance(labels, (list, tuple)) else [labels]:
            values = label.asnumpy().astype(np.int64).ravel()
            self.truth = self.truth + np.bincount(values[values >= 0], minlength=self.nclass)

    def add_up(self, processes):
        """Add up the sums of all processes."""
        parts = [self.total_correct, self.total_label, self.total_inter, self.total_union, self.truth]
        sizes = [1, 1, self.nclass, self.nclass, self.nclass]
        packed = processes.sum(np.concatenate([np.broadcast_to(part, n) for part, n in zip(parts, sizes)]))
        parts = np.split(packed.astype(np.int64), np.cumsum(sizes)[:-1])
        self.total_correct, self.total_label = int(parts[0][0]), int(parts[1][0])
        self.total_inter, self.total_union, self.truth = parts[2:]

    def get(self):
        if not np.any(self.truth):
            return 0.0, 0.0
        pix_acc, _ = super().get()
        occurs = self.truth > 0
        iou = self.total_inter / np.maximum(self.total_union, 1)
        return float(pix_acc), float(np.mean(iou[occurs]))


def best_constant(truth: np.ndarray) -> tuple:
    """(pixAcc, mIoU) of the best constant prediction.

    If the prediction is class c everywhere, n_c of n pixels are right. The IoU of c is n_c / n, and that of every other
    class is 0. Both scores are therefore best for the commonest class. mIoU is pixAcc divided by the number of classes.

    truth: labelled pixels of each class.
    """
    share = truth.max() / truth.sum()
    return float(share), float(share / np.count_nonzero(truth))


def spread(batch, contexts) -> list:
    """Split a batch over devices. A batch with fewer samples than devices uses one device for each sample."""
    used = contexts[: min(len(contexts), batch.shape[0])]
    return mx.gluon.utils.split_and_load(batch, used, even_split=False)


def validate(net, batches, contexts, num_class, bar=None, stop=lambda: False, processes=ALONE):
    """Scores of `net` over the images of all processes, or None if stop() is true in one process.

    Each device predicts its share. In prediction mode no replica waits for another, so a last batch on fewer devices or
    processes is no special case.
    """
    scores = Scores(num_class)
    stopped = False
    with processes.together():
        for images, masks in batches:
            stopped = stop()
            if stopped:
                break
            predictions = [net(x) for x in spread(images, contexts)]
            predictions = [p[0] if isinstance(p, (list, tuple)) else p for p in predictions]
            scores.update(spread(masks, contexts), predictions)
            if bar is not None:
                bar.update(1)
                bar.set_postfix_str("pixAcc {:.3f} mIoU {:.3f}".format(*scores.get()), refresh=False)
    if processes.sum(stopped):
        return None
    scores.add_up(processes)
    return scores
