"""Images for training without labels, and random views of them. MoCo compares two views of each image."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp"}


class UserError(Exception):
    """A mistake in an option or a folder. The text says what the program expected."""


class Images(NamedTuple):
    """Values from 0 to 1, (N, C, S, S). The kNN check uses the labels. They are None for images without classes."""

    train: np.ndarray
    held_out: np.ndarray
    train_labels: np.ndarray | None
    held_out_labels: np.ndarray | None


def load(folder: str | None, size: int) -> Images:
    """Loads scikit-learn's digits, or a folder of images whose subfolders are the classes. A fifth is held out.

    Of the digits, the last fifth is held out, which other people wrote. Of a folder, every fifth image is held out.
    """
    pixels, labels = _digits() if folder is None else _folder(Path(folder), size)
    number = np.arange(len(pixels))
    held_out = number >= len(pixels) * 4 // 5 if folder is None else number % 5 == 4
    if labels is None:
        return Images(pixels[~held_out], pixels[held_out], None, None)
    return Images(pixels[~held_out], pixels[held_out], labels[~held_out], labels[held_out])


def _digits():
    from sklearn.datasets import load_digits

    digits = load_digits()  # 1797 scans of 8 x 8, part of scikit-learn
    return (digits.images[:, None] / 16).astype("float32"), digits.target


def _folder(folder: Path, size: int):
    from PIL import Image, UnidentifiedImageError

    if not folder.is_dir():
        raise UserError(
            f"--data {folder}: no such folder; expected a folder of images, with or without subfolders for classes"
        )
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if len(files) < 10:
        raise UserError(
            f"--data {folder}: {len(files)} images found, expected at least 10 ({', '.join(sorted(SUFFIXES))})"
        )
    pixels = np.empty((len(files), 3, size, size), "float32")
    for i, path in enumerate(files):
        try:
            with Image.open(path) as image:
                scaled = image.convert("RGB").resize((size, size), Image.BILINEAR)
        except (UnidentifiedImageError, OSError) as error:
            raise UserError(f"--data: {path} is not a readable image ({error})") from None
        pixels[i] = np.asarray(scaled, "float32").transpose(2, 0, 1) / 255
    names = [path.parent for path in files]
    classes = sorted(set(names))
    if len(classes) < 2:
        return pixels, None
    return pixels, np.array([classes.index(name) for name in names])


def view(images: np.ndarray, size: int, random: np.random.RandomState, n=None, own=slice(None)) -> np.ndarray:
    """Rotates, scales, shears and moves images at random, and adds noise. They are the rows ``own`` of a batch of n.

    Numbers are drawn for the whole batch, so a row has the same view in whichever process it is made.
    """
    n = n or len(images)

    def uniform(width, count=None):
        return random.uniform(-width, width, n if count is None else (n, count))

    angle, slant = uniform(0.35), uniform(0.3)
    scale, stretch = np.exp(uniform(0.25)), np.exp(uniform(0.15))
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], 1).reshape(n, 2, 2)
    shape = np.zeros((n, 2, 2))
    shape[:, 0, 0], shape[:, 1, 1], shape[:, 0, 1] = scale * stretch, scale / stretch, slant
    affine = np.concatenate([turn @ shape, uniform(0.25, 2)[:, :, None]], axis=2)
    noise = 0.05 * random.randn(n, images.shape[1], size, size).astype("float32")
    return resample(images, size, affine[own]) + noise[own]


def resample(images: np.ndarray, size: int, affine: np.ndarray | None = None) -> np.ndarray:
    """Resamples bilinearly, with black outside.

    affine: (N, 2, 3), maps the view's coordinates to the image's. Both range from -1 to 1.
    """
    n, _, height, width = images.shape
    if affine is None:
        affine = np.tile(np.eye(2, 3), (n, 1, 1))
    line = (np.arange(size) + 0.5) / size * 2 - 1
    y, x = np.meshgrid(line, line, indexing="ij")
    at = affine @ np.stack([x.ravel(), y.ravel(), np.ones(size * size)])
    x, y = (at[:, 0] + 1) * width / 2 - 0.5, (at[:, 1] + 1) * height / 2 - 0.5
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    right_part, lower_part = (x - left)[:, None], (y - top)[:, None]
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    rows = np.arange(n)[:, None]

    def value(row, column):
        picked = padded[rows, :, np.clip(row + 1, 0, height + 1), np.clip(column + 1, 0, width + 1)]
        return picked.transpose(0, 2, 1)  # (N, C, size * size)

    upper = value(top, left) * (1 - right_part) + value(top, left + 1) * right_part
    lower = value(top + 1, left) * (1 - right_part) + value(top + 1, left + 1) * right_part
    return (upper * (1 - lower_part) + lower * lower_part).reshape(n, -1, size, size).astype("float32")
