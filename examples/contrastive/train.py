"""Contrastive training with MoCo. It shows how batch statistics leak the answer.

    python examples/contrastive/train.py --bn local             # scikit-learn's digits
    python examples/contrastive/train.py --bn sample-shuffle --data my_images/
    mpiexec -n 2 python examples/contrastive/train.py --kvstore mpi

Writes epochs.csv and last.ckpt to the run's folder. Each of several processes has a checkpoint, last-RANK.ckpt. The
same command with --resume continues a stopped run.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import signal
import sys
import zipfile
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
from images import Images, UserError, load, resample, view
from tqdm import tqdm

import gluon_syncbn
from gluon_syncbn import contrastive

FIELDS = ("epoch", "loss", "pretext", "knn", "lr")


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="MoCo on small images, with and without the leak through batch statistics"
    )
    parser.add_argument(
        "--bn",
        choices=("local", "sync", "shuffle", "sample-shuffle"),
        default="sample-shuffle",
        help="normalise with the statistics of each slot / of the whole batch / of another slot / of each slot, "
        "with the keys in other slots than their queries",
    )
    parser.add_argument("--virtual-devices", type=int, default=8, metavar="V", help="number of slots of each device")
    parser.add_argument("--cpus", type=int, default=1, help="number of CPU contexts of each process")
    parser.add_argument("--kvstore", choices=("mpi",), help="train in the processes that it connects")
    parser.add_argument("--data", metavar="FOLDER", help="images, with classes in subfolders (default: digits)")
    parser.add_argument("--size", type=int, help="pixels of a view (default: 16 for digits, 32 for a folder)")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32, help="of all devices together")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate at the start; it decays along a cosine")
    parser.add_argument("--queue", type=int, default=512, help="number of keys in the queue")
    parser.add_argument("--momentum", type=float, default=0.99, help="of the key encoder")
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/contrastive/BN-SEED)")
    parser.add_argument("--resume", action="store_true", help="continue the run in that folder")
    options = parser.parse_args(argv)  # fmt: skip
    options.size = options.size or (32 if options.data else 16)
    options.out = options.out or Path("runs/contrastive") / f"{options.bn}-{options.seed}"
    for name in ("virtual_devices", "cpus", "size", "epochs", "batch_size", "queue"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: {getattr(options, name)} was given, expected at least 1")
    for name, low, high in (("lr", 0, math.inf), ("momentum", 0, 1), ("temperature", 0, math.inf)):
        if not low < getattr(options, name) < high:
            raise UserError(f"--{name}: {getattr(options, name)} was given, expected above {low} and below {high}")
    if options.queue < options.batch_size:
        raise UserError(f"--queue: {options.queue} was given, expected at least --batch-size, {options.batch_size}")
    if not 0 <= options.seed < 2**31:
        raise UserError(f"--seed: {options.seed} was given, expected from 0 to 2**31 - 1")
    return options


class Alone:
    """The job of one process, in the place of a KVStore."""

    rank, num_workers = 0, 1

    def allgather(self, name: str, array: np.ndarray) -> list:
        return [array]


def train(options: argparse.Namespace) -> list:
    """Trains, or continues a run. Returns the rows of epochs.csv, in rank 0 of several processes."""
    contexts = gluon_syncbn.cpu_devices(options.cpus)
    from moco import MoCo

    kvstore = None
    if options.kvstore:
        try:
            kvstore = gluon_syncbn.kvstore(options.kvstore)
        except ImportError as error:
            raise UserError(f"--kvstore: {error}") from None
        gluon_syncbn.configure(kvstore=kvstore)
    job = kvstore or Alone()
    devices = job.num_workers * options.cpus
    slots = devices * options.virtual_devices
    if options.bn != "sync" and slots < 2:
        raise UserError(f"--bn {options.bn}: one slot in all, expected at least 2 (--virtual-devices, --cpus)")
    if options.batch_size < slots:
        raise UserError(f"--batch-size: {options.batch_size} was given, expected at least one image for each slot")
    if options.batch_size % devices:
        raise UserError(f"--batch-size: {options.batch_size} was given, expected a multiple of the {devices} devices")
    images = load(options.data, options.size)
    if options.batch_size > len(images.train):
        raise UserError(f"--batch-size: {options.batch_size} was given, expected at most {len(images.train)} images")
    each = options.batch_size // job.num_workers
    own = slice(job.rank * each, (job.rank + 1) * each)  # rows of a batch
    sampler = contrastive.ShuffleSampler(len(images.train), each, job.num_workers, job.rank, options.seed)
    steps, shuffled = len(sampler), options.bn == "sample-shuffle"
    moco = MoCo(
        contexts, kvstore, bn=options.bn, virtual_devices=options.virtual_devices, channels=images.train.shape[1],
        size=options.size, queue=options.queue, momentum=options.momentum, temperature=options.temperature,
        seed=options.seed, lr=options.lr,
    )  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / (f"last-{job.rank}.ckpt" if kvstore else "last.ckpt")
    rows = restore(options, checkpoint, moco) if options.resume else []
    done = [int(epochs) for (epochs,) in job.allgather("epochs", np.array([len(rows)]))]
    if len(set(done)) > 1:
        raise UserError(f"--resume: the processes' checkpoints are of the epochs {done}, expected the same epoch")
    stop = Stop()
    bar = tqdm(range(len(rows), options.epochs), desc=options.bn, unit="epoch", disable=True if job.rank else None)
    for epoch in bar:
        # Random numbers depend on seed and epoch alone, so a resumed run gives the same result.
        random = np.random.RandomState([options.seed, epoch])
        gluon_syncbn.configure(seed=options.seed << 32 | epoch)
        sampler.set_epoch(epoch)
        results = np.zeros((steps, 2, options.batch_size), "float32")  # loss and hit of each row; 0 for others' rows
        for k, pairs in enumerate(sampler):
            done = (epoch * steps + k) / (options.epochs * steps)
            moco.trainer.set_learning_rate(options.lr * 0.5 * (1 + math.cos(math.pi * done)))
            queries, keys = np.transpose(pairs)
            samples = queries, keys if shuffled else queries
            views = [view(images.train[one], options.size, random, options.batch_size, own) for one in samples]
            own_keys = partial(sampler.restore, batch=k) if shuffled else itemgetter(own)
            results[k][:, own] = moco.step(*map(centred, views), own_keys)
        loss, pretext = map(float, sum(job.allgather("results", results)).mean(axis=(0, 2)))
        if not np.isfinite(loss):
            raise UserError(f"the loss became {loss} in epoch {epoch + 1}; a smaller --lr may help")
        knn = knn_accuracy(moco, images, options.size) if job.rank == 0 else None
        rows.append(dict(zip(FIELDS, (epoch + 1, loss, pretext, knn, moco.trainer.learning_rate))))
        bar.set_postfix(loss=f"{loss:.2f}", pretext=f"{pretext:.1%}", knn="-" if knn is None else f"{knn:.1%}")
        save(options, checkpoint, moco, rows)
        if job.rank == 0:
            write(options.out / "epochs.csv", rows)
        asked = int(max(signals[0] for signals in job.allgather("stop", np.array([stop.requested]))))
        if asked:
            if job.rank == 0:
                print(f"stopped after epoch {epoch + 1}; --resume continues", file=sys.stderr)
            raise SystemExit(128 + asked)
    return rows if job.rank == 0 else []


def centred(images: np.ndarray) -> np.ndarray:
    return (images - 0.3) / 0.35


def knn_accuracy(moco, images: Images, size: int) -> float | None:
    """The share of held-out images whose 20 nearest training images vote for the right class.

    The distance is the cosine of the features.
    """
    from sklearn.neighbors import KNeighborsClassifier

    if images.train_labels is None:
        return None
    train, held_out = (moco.features(centred(resample(x, size))) for x in (images.train, images.held_out))
    neighbours = KNeighborsClassifier(min(20, len(train)), weights="distance", metric="cosine")
    return float(neighbours.fit(train, images.train_labels).score(held_out, images.held_out_labels))


class Stop:
    """The first Ctrl-C or SIGTERM stops the run after the current epoch. The second one stops at once."""

    def __init__(self):
        self.requested = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number, _):
        if self.requested:
            os._exit(128 + number)
        self.requested = number
        print("\nstopping after this epoch; press Ctrl-C again to stop at once", file=sys.stderr)


# ---- files -------------------------------------------------------------------------------------------------

#: A run continues only if these options are the same.
FIXED = ("bn", "virtual_devices", "cpus", "data", "size", "batch_size", "lr", "queue", "momentum", "temperature",
         "seed", "epochs")  # fmt: skip


def save(options: argparse.Namespace, path: Path, moco, rows: list) -> None:
    """Writes a temporary file, then renames it, so no checkpoint is ever incomplete."""
    aside = path.with_suffix(".tmp")
    state = {"options": {name: getattr(options, name) for name in FIXED}, "rows": rows, "position": moco.position}
    with zipfile.ZipFile(aside, "w") as archive:
        archive.writestr("state.json", json.dumps(state))
        for name, encoder in (("query", moco.query), ("key", moco.key)):
            for i, context in enumerate(moco.contexts):
                values = {n: p.data(context).asnumpy() for n, p in encoder._collect_params_with_prefix().items()}
                _write(archive, f"{name}-{i}.npz", values)
        _write(archive, "queue.npz", {"queue": moco.queue.asnumpy()})
        states = path.with_suffix(".trainer")
        moco.trainer.save_states(str(states))
        archive.write(states, "trainer.states")
        states.unlink()
    os.replace(aside, path)


def write(path: Path, rows: list) -> None:
    aside = path.with_suffix(".tmp")
    with aside.open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        table.writerows(rows)
    os.replace(aside, path)


def _write(archive: zipfile.ZipFile, name: str, arrays: dict) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    archive.writestr(name, buffer.getvalue())


def restore(options: argparse.Namespace, path: Path, moco) -> list:
    """Loads a checkpoint into `moco`. Returns the rows of the run."""
    from mxnet import nd

    if not path.exists():
        raise UserError(f"--resume: {path} does not exist; expected the folder of a run (--out)")
    try:
        with zipfile.ZipFile(path) as archive:
            state = json.loads(archive.read("state.json"))
            for name in FIXED:
                if state["options"][name] != getattr(options, name):
                    raise UserError(
                        f"--resume: {path} was made with --{name.replace('_', '-')} {state['options'][name]}, "
                        f"not {getattr(options, name)}"
                    )
            for name, encoder in (("query", moco.query), ("key", moco.key)):
                for i, context in enumerate(moco.contexts):
                    values = np.load(io.BytesIO(archive.read(f"{name}-{i}.npz")))
                    for n, parameter in encoder._collect_params_with_prefix().items():
                        nd.array(values[n], ctx=context).copyto(parameter.data(context))
            moco.queue = nd.array(np.load(io.BytesIO(archive.read("queue.npz")))["queue"])
            states = path.with_suffix(".trainer")
            states.write_bytes(archive.read("trainer.states"))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UserError(f"--resume: {path} is damaged ({error})") from None
    moco.trainer.load_states(str(states))
    states.unlink()
    moco.position = state["position"]
    return state["rows"]


def main(argv=None) -> int:
    try:
        rows = train(parse(argv))
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    if rows:
        last = rows[-1]
        knn = "no labels" if last["knn"] is None else f"{last['knn']:.3f}"
        print(f"epoch {last['epoch']}: loss {last['loss']:.3f}, pretext accuracy {last['pretext']:.3f}, kNN {knn}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
