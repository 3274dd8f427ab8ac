"""The pictures of these programs."""

from __future__ import annotations

import os
import sys

import numpy as np
from gluoncv.data import ADE20KSegmentation
from gluoncv.utils.viz import get_color_pallete
from matplotlib.patches import Patch
from scene import TREE

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import style


def class_name(label: int) -> str:
    """The short name of a label. Label -1 is "other"."""
    return "other" if label < 0 else ADE20KSegmentation.CLASSES[label].split(",")[0]


def coloured(labels: np.ndarray) -> np.ndarray:
    """(height, width, 3) in ADE20K's colours, but trees darker: theirs is nearly that of grass."""
    picture = np.array(get_color_pallete(labels.astype(np.int32), "ade20k").convert("RGB"))
    picture[labels == TREE - 1] = 0, 85, 35
    return picture


def draw_predictions(path: str, images: list, truths: list | None, predictions: dict, title: str = "") -> None:
    """Draw image, truth (if given) and predictions side by side, with a legend of the classes that occur.

    images: PIL images. truths, and predictions by their headings: (height, width) each, with labels from -1 on.
    """
    labelled = {**({"truth": truths} if truths else {}), **predictions}
    heads = ["image", *labelled]
    shape = max(image.size[1] / image.size[0] for image in images)
    figure, axes = style.figure(2.6 * len(heads), 2.6 * shape * len(images) + 0.9, len(heads), len(images))
    axes = axes.reshape(len(images), len(heads))
    seen = np.zeros(ADE20KSegmentation.NUM_CLASS + 1, np.int64)
    for line, image, *labels in zip(axes, images, *labelled.values()):
        for axis, picture in zip(line, [np.asarray(image), *map(coloured, labels)]):
            axis.imshow(picture, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        seen += sum(np.bincount(one.ravel() + 1, minlength=len(seen)) for one in labels)
    for axis, head in zip(axes[0], heads):
        axis.set_title(head, fontsize=10)
    # The legend leaves out classes with only a few stray pixels.
    common = [i - 1 for i in np.argsort(-seen) if seen[i] > 0.001 * seen.sum()]
    patches = [
        Patch(facecolor=coloured(np.array([[label]]))[0, 0] / 255, edgecolor="0.4", label=class_name(label))
        for label in common
    ]
    columns = min(len(patches), 1 + len(heads))
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def draw_curves(path: str, runs: dict, constant: tuple, title: str) -> None:
    """Draw loss, pixel accuracy and mIoU of BatchNorm and SyncBatchNorm over epochs.

    runs: rows of epochs.csv and steps.csv, by name. constant: (pixAcc, mIoU) of the best constant prediction.
    """
    figure, (loss, accuracy, iou) = style.figure(11, 3.6, 3)
    for (name, (epochs, steps)), colour in zip(runs.items(), (style.PLAIN, style.SYNC)):
        per_epoch = max(row["step"] for row in steps)
        x = [row["epoch"] - 1 + row["step"] / per_epoch for row in steps]
        loss.plot(x, [row["loss"] for row in steps], color=colour, alpha=0.3, linewidth=1)
        ends = [row["epoch"] for row in epochs]
        loss.plot([end - 0.5 for end in ends], [row["train_loss"] for row in epochs], "o-", color=colour, label=name)
        for axis, score in ((accuracy, "pixAcc"), (iou, "mIoU")):
            axis.plot(ends, [row[score] for row in epochs], "o-", color=colour, label=name)
    for axis, score, at in ((accuracy, "pixAcc", 0), (iou, "mIoU", 1)):
        axis.axhline(constant[at], color=style.LIMIT, linestyle="--", label="best constant prediction")
        axis.set_ylabel(f"validation {score}")
        axis.set_ylim(0, 1)
    loss.set_ylabel("training loss")
    loss.set_ylim(bottom=0)
    for axis in (loss, accuracy, iou):
        axis.set_xlabel("epoch")
        axis.set_xlim(0, max(ends) + 0.1)
    figure.legend(*iou.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title)
    figure.savefig(path)
