"""The pictures of these programs."""

from __future__ import annotations

import os
import sys

import numpy as np
from gluoncv.data import ADE20KSegmentation
from gluoncv.utils.viz import get_color_pallete
from matplotlib.patches import Patch

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import style


def class_name(label: int) -> str:
    """The short name of a label. Label -1 is "other"."""
    return "other" if label < 0 else ADE20KSegmentation.CLASSES[label].split(",")[0]


def coloured(labels: np.ndarray) -> np.ndarray:
    """(height, width, 3) in ADE20K's colours."""
    return np.asarray(get_color_pallete(labels.astype(np.int32), "ade20k").convert("RGB"))


def draw_predictions(path: str, rows: list, title: str = "") -> None:
    """Draw image, truth (if given) and prediction side by side, with a legend of the classes that occur.

    rows: (PIL image, truth or None, prediction). Truth and prediction are (height, width), with labels from -1 on.
    """
    with_truth = any(truth is not None for _, truth, _ in rows)
    heads = ["image", "truth", "prediction"] if with_truth else ["image", "prediction"]
    shape = max(image.size[1] / image.size[0] for image, _, _ in rows)
    width = 2.6 * len(heads)
    figure, axes = style.figure(width, 2.6 * shape * len(rows) + 0.9, len(heads), len(rows))
    axes = axes.reshape(len(rows), len(heads))
    seen = np.zeros(ADE20KSegmentation.NUM_CLASS + 1, np.int64)
    for line, (image, truth, prediction) in zip(axes, rows):
        pictures = [np.asarray(image)] + ([coloured(truth)] if with_truth else []) + [coloured(prediction)]
        for axis, picture in zip(line, pictures):
            axis.imshow(picture, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        for labels in (truth, prediction):
            if labels is not None:
                seen += np.bincount(labels.ravel() + 1, minlength=len(seen))
    for axis, head in zip(axes[0], heads):
        axis.set_title(head, fontsize=10)
    # The legend leaves out classes with only a few stray pixels.
    common = [i - 1 for i in np.argsort(-seen) if seen[i] > 0.001 * seen.sum()]
    patches = [
        Patch(facecolor=coloured(np.array([[label]]))[0, 0] / 255, edgecolor="0.4", label=class_name(label))
        for label in common
    ]
    columns = min(len(patches), 4 if with_truth else 3)
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def draw_curves(path: str, epochs: list, steps: list, constant: tuple | None = None, title: str = "") -> None:
    """Draw loss, learning rate, pixel accuracy and mIoU over epochs.

    epochs, steps: rows of epochs.csv and steps.csv. constant: (pixAcc, mIoU) of the best constant prediction.
    """
    per_epoch = max(row["step"] for row in steps)
    x = [row["epoch"] - 1 + row["step"] / per_epoch for row in steps]
    ends = [row["epoch"] for row in epochs]
    figure, (loss, rate, accuracy, iou) = style.figure(8.5, 6, 2, 2)
    loss.plot(x, [row["loss"] for row in steps], color=style.SYNC, alpha=0.35, linewidth=1, label="step")
    means = [row["train_loss"] for row in epochs]
    loss.plot([e - 0.5 for e in ends], means, "o-", color=style.SYNC, label="mean of the epoch")
    loss.set_ylabel("training loss")
    loss.set_ylim(bottom=0)
    loss.legend(frameon=False)
    rate.plot(x, [row["lr"] for row in steps], color=style.LOCAL)
    rate.set_ylabel("learning rate")
    for axis, name, at in ((accuracy, "pixAcc", 0), (iou, "mIoU", 1)):
        scored = [row for row in epochs if row[name] is not None]
        at_epoch = [row["epoch"] for row in scored]
        axis.plot(at_epoch, [row[name] for row in scored], "o-", color=style.SYNC, label="network")
        if constant:
            axis.axhline(constant[at], color=style.PLAIN, linestyle="--", label="best constant prediction")
        axis.set_ylabel(f"validation {name}")
        axis.set_ylim(0, 1)
        axis.legend(frameon=False, loc="upper left" if name == "mIoU" else "lower right")
    for axis in (loss, rate, accuracy, iou):
        axis.set_xlabel("epoch")
        axis.set_xlim(0, max(ends) + 0.1)
    if title:
        figure.suptitle(title)
    figure.savefig(path)
