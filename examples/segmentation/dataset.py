"""ADE20K from disk: the checks of the folder, a repeatable form of GluonCV's reader, and the loader."""

from __future__ import annotations

import multiprocessing
import os
import random
import zlib

import numpy as np
from errors import UserError
from gluoncv.data import ADE20KSegmentation
from mxnet import gluon
from mxnet.gluon.data.vision import transforms
from PIL import Image, ImageFile
from processes import ALONE

SUBFOLDER = {"train": "training", "val": "validation"}
NUM_CLASS = ADE20KSegmentation.NUM_CLASS
CHECK_CONTENTS_UP_TO = 1000  # pairs; reading the 20,210 of ADE20K would take minutes
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# GluonCV's reader of another data set sets this to True for the whole process. Pillow would then read half a file
# as an image with a grey lower half.
ImageFile.LOAD_TRUNCATED_IMAGES = False
HOW_TO_GET = "see 'Data' in the README, or write a small set with minidata.py"


def check_folder(root: str, split: str, contents: bool | None = None) -> int:
    """Return the number of image and mask pairs of a split. Raise a UserError if the folder is not complete.

    With `contents`, the function also reads every file. By default, it does so only for a small set.
    """
    base = os.path.join(root, ADE20KSegmentation.BASE_DIR)
    if not os.path.isdir(base):
        raise UserError(f"--data-root: {base}: no such folder; expected ADE20K's layout there ({HOW_TO_GET})")
    images = _names(os.path.join(base, "images", SUBFOLDER[split]), ".jpg")
    masks = _names(os.path.join(base, "annotations", SUBFOLDER[split]), ".png")
    for here, there, folder, suffix, what in (
        (images, masks, "annotations", ".png", "image without its mask"),
        (masks, images, "images", ".jpg", "mask without its image"),
    ):
        lost = sorted(here - there)
        if lost:
            path = os.path.join(base, folder, SUBFOLDER[split], lost[0] + suffix)
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise UserError(f"{path}{more}: missing ({what}); is the data set copied completely?")
    if contents or (contents is None and len(images) <= CHECK_CONTENTS_UP_TO):
        for name in sorted(images):
            _check_pair(
                os.path.join(base, "images", SUBFOLDER[split], name + ".jpg"),
                os.path.join(base, "annotations", SUBFOLDER[split], name + ".png"),
            )
    return len(images)


def _names(folder: str, suffix: str) -> set:
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder; is the data set copied completely?")
    names = {os.path.splitext(f)[0] for f in os.listdir(folder) if f.endswith(suffix)}
    if not names:
        raise UserError(f"{folder}: no {suffix} files; is the data set copied completely?")
    return names


def _check_pair(image_path: str, mask_path: str) -> None:
    image, mask = read_image(image_path), read_mask(mask_path)
    if image.size != (mask.shape[1], mask.shape[0]):
        raise UserError(f"{mask_path}: {mask.shape[1]}x{mask.shape[0]} pixels, its image has {image.size}")


def read_image(path: str) -> Image.Image:
    """Read and decode an RGB image. A UserError names the file."""
    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path}: not a readable image ({error})") from None


def read_mask(path: str) -> np.ndarray:
    """Read class ids as stored, 0 to 150. A UserError names the file."""
    try:
        with Image.open(path) as file:
            mask = np.array(file)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path}: not a readable mask ({error})") from None
    if mask.ndim != 2:
        raise UserError(f"{path}: {mask.shape[2]} channels; expected one channel of class ids")
    _check_ids(path, int(mask.max()))
    return mask


def _check_ids(path: str, highest: int) -> None:
    if highest > NUM_CLASS:
        raise UserError(f"{path}: class id {highest}; expected 0 (other) to {NUM_CLASS}")


class Scenes(gluon.data.Dataset):
    """GluonCV's ADE20K reader, with two additions.

    - The reader draws its crops from Python's global generator. Here (seed, epoch, index) seeds this generator for
      each sample. A sample therefore depends neither on the worker nor on timing.
    - An unreadable file and a class id out of range raise a UserError that names the file.

    (epoch, index) selects an item.
    """

    def __init__(self, root: str, split: str, mode: str, base_size: int, crop_size: int, seed: int):
        # Without `check_folder`, a mask may be missing. The reader prints this and continues.
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
        self._reader = ADE20KSegmentation(
            root, split=split, mode=mode, transform=transform, base_size=base_size, crop_size=crop_size
        )
        # The reader lists the folder in the file system's order, which differs between machines.
        self._reader.images.sort()
        self._reader.masks.sort()
        self._seed = seed
        self._pid = os.getpid()
        self.images = self._reader.images
        self.masks = self._reader.masks

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, key):
        epoch, index = key
        if os.getpid() != self._pid:
            # A loader worker leaves the terminal's process group, so Ctrl-C and `kill` of the group do not reach the
            # worker. A killed worker would be replaced by a fork in mid-step, and a fork stops MXNet's engine. The
            # worker ends when the pipe from the main process closes.
            self._pid = os.getpid()
            os.setpgid(0, 0)
        before = random.getstate()
        random.seed(zlib.crc32(f"{self._seed} {epoch} {index}".encode()))
        try:
            image, mask = self._reader[index]
        except (OSError, SyntaxError, ValueError) as error:
            read_image(self.images[index])  # raises an error that names the image, if the image is broken
            raise UserError(f"{self.masks[index]}: not a readable mask ({error})") from None
        finally:
            random.setstate(before)
        if mask.ndim != 2:
            read_mask(self.masks[index])
        _check_ids(self.masks[index], int(mask.max().asscalar()) + 1)
        return image, mask


class Order:
    """The batch sampler: the samples of each batch are a function of (seed, epoch) alone.

    All processes draw the same permutation, without messages. Each process takes its part of every batch, in the order
    of the ranks. Together, the parts are the batches of a single process.

    The caller sets `epoch` and `first` (the number of the first batch) before each pass.
    """

    def __init__(self, count: int, batch_size: int, seed: int, shuffle: bool, processes=ALONE):
        self._count, self._batch_size, self._seed, self._shuffle = count, batch_size, seed, shuffle
        self._rank, self._size = processes.rank, processes.size
        self.epoch = 0
        self.first = 0

    def __len__(self) -> int:
        # The learning rate schedule and the statistics need equal batches, so training drops a last batch that is not
        # full. Its samples come in other epochs. In validation every image counts, and a process may have no part of
        # the last batch.
        batches, rest = divmod(self._count, self._batch_size)
        if self._shuffle:
            return batches
        return batches * (self._rank < self._batch_size) + (self._rank < rest)

    def __iter__(self):
        order = np.arange(self._count)
        if self._shuffle:
            np.random.RandomState([self._seed, self.epoch]).shuffle(order)
        for batch in range(self.first, len(self)):
            part = order[batch * self._batch_size : (batch + 1) * self._batch_size]
            part = np.array_split(part, self._size)[self._rank]
            yield [(self.epoch, int(index)) for index in part]


class Loader:
    """Batches of a data set, read by worker processes.

    Threads would share the random generator of the reader's crops, and the interpreter's lock (the README has figures).
    The constructor forks the processes. Create the loader before the first training step, because a fork stops MXNet's
    engine for a moment. No step may be in flight then.
    """

    def __init__(self, data: Scenes, batch_size: int, workers: int, seed: int, shuffle: bool, processes=ALONE):
        self._order = Order(len(data), batch_size, seed, shuffle, processes)
        self._loader = gluon.data.DataLoader(data, batch_sampler=self._order, num_workers=workers)

    def __len__(self) -> int:
        return len(self._order)

    def batches(self, epoch: int = 0, first: int = 0):
        """Iterate over (images, masks) of an epoch, from batch number `first` on."""
        self._order.epoch, self._order.first = epoch, first
        try:
            yield from self._loader
        except multiprocessing.TimeoutError:  # Gluon has printed the details
            raise UserError("--workers: a reader process was killed, or took more than two minutes") from None

    def close(self) -> None:
        """End the workers."""
        pool, self._loader._worker_pool = self._loader._worker_pool, None
        if pool is not None:
            pool.terminate()
            pool.join()
