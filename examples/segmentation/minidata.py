"""A small data set with the layout and the class ids of ADE20K, drawn by a program.

    python minidata.py runs/minidata

writes real JPEG images and PNG masks to

    runs/minidata/ADEChallengeData2016/{images,annotations}/{training,validation}/ADE_*_00000001.{jpg,png}

Mask values are ADE20K's: 0 is "other", k is class k of the list of 150. Colour and light change strongly
from image to image (`scene.py`). The statistics of one or two images therefore say little about those of
a batch. Synchronised batch normalisation is for such data. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile

from errors import UserError, run
from scene import draw_scene

BASE_DIR = "ADEChallengeData2016"  # the name that GluonCV's reader looks for
STAMP = "minidata.json"
VERSION = 1  # raise this number when the drawing changes; the program then replaces older sets
SPLITS = (("training", "train"), ("validation", "val"))  # folder, part of the file name


def make_minidata(root: str, train: int = 200, val: int = 50, seed: int = 0) -> bool:
    """Write the set below `root`, or keep an existing set that is the same and complete.

    The function writes to a temporary folder and renames the folder. A folder with the stamp was therefore complete
    once. The function also compares the counts, because somebody may have deleted files.

    Returns True if it has written files. Raises UserError if the folder holds files of another program.
    """
    target = os.path.join(root, BASE_DIR)
    stamp = {"version": VERSION, "seed": seed, "training": train, "validation": val}
    if _is_complete(target, stamp):
        return False
    if os.path.isdir(target) and os.listdir(target) and not os.path.isfile(os.path.join(target, STAMP)):
        raise UserError(f"{target}: not written by minidata.py (no {STAMP}), will not be overwritten")

    os.makedirs(root, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix=BASE_DIR + ".tmp-", dir=root)
    try:
        for (folder, part), count in zip(SPLITS, (train, val)):
            _write_split(temporary, folder, part, count, seed)
        with open(os.path.join(temporary, STAMP), "w") as file:
            json.dump(stamp, file)
        os.chmod(temporary, 0o755)  # mkdtemp creates private folders
        if os.path.isdir(target):
            shutil.rmtree(target)
        try:
            os.rename(temporary, target)
        except OSError:
            # Another process was faster. Keep its set, if the set is the same.
            if not _is_complete(target, stamp):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _write_split(base: str, folder: str, part: str, count: int, seed: int) -> None:
    images = os.path.join(base, "images", folder)
    masks = os.path.join(base, "annotations", folder)
    os.makedirs(images)
    os.makedirs(masks)
    for number in range(1, count + 1):
        image, mask = draw_scene([seed, 0 if part == "train" else 1, number])
        name = f"ADE_{part}_{number:08d}"
        image.save(os.path.join(images, name + ".jpg"), quality=92)
        mask.save(os.path.join(masks, name + ".png"))


def _is_complete(target: str, stamp: dict) -> bool:
    try:
        with open(os.path.join(target, STAMP)) as file:
            if json.load(file) != stamp:
                return False
        return all(
            len(os.listdir(os.path.join(target, kind, folder))) == stamp[folder]
            for kind in ("images", "annotations")
            for folder, _ in SPLITS
        )
    except (OSError, ValueError):
        return False


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", help="folder of the set; use the same folder as --data-root of train.py")
    parser.add_argument("--train", type=_count, default=200, metavar="N", help="number of training images (200)")
    parser.add_argument("--val", type=_count, default=50, metavar="N", help="number of validation images (50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawings (0)")
    args = parser.parse_args(argv)
    written = make_minidata(args.root, args.train, args.val, args.seed)
    what = "written" if written else "exists already"
    print(f"{os.path.join(args.root, BASE_DIR)}: {args.train} + {args.val} images, {what}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
