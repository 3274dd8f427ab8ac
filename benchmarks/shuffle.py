"""Sample shuffle: bytes between devices and time of a step, against gathering all images on every device.

The way that MoCo's public code takes: every device gathers the images of all devices, picks its own by a common
permutation, and later gathers the features of all devices to pick its own again. The bytes are also counted from
the formula. All ways take turns in the same process, on CPU contexts; the figure is the median over the rounds.

    python benchmarks/shuffle.py             # writes benchmarks/results/shuffle.{md,json,png}
    python benchmarks/shuffle.py --quick     # a smoke test of a few seconds, its figures mean nothing
"""

import gc
import json
import statistics
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import _measuring
import _results
from tqdm import tqdm

IMAGE = (3, 224, 224)  # float32
FEATURES = 128  # float32
IMAGE_BYTES, FEATURE_BYTES = 4 * IMAGE[0] * IMAGE[1] * IMAGE[2], 4 * FEATURES
BATCH = 32  # of one device
DEVICES = [2, 4, 8]
COUNTED = range(2, 9)
QUICK = {"image": (3, 8, 8), "batch": 4, "devices": 2, "rounds": 2, "budget_s": 1}

WAYS = ("plain", "loading", "moving", "gathering")

EXPLANATION = f"""A batch of {BATCH} images per device ({" x ".join(map(str, IMAGE))}, float32) goes from the host to
the devices and is shuffled among them; its features ({FEATURES} per image, float32) come back in the old order.
*All-gather* is the way of MoCo's public code: every device gets the images of all N devices and picks its own by a
common permutation, and does the same with the features.

## Bytes between devices, in all and per step

Exact for the all-gather, N (N - 1) B rows. With the sample shuffle a row moves unless its new device is its old one:
(N - 1) B rows in the mean over all permutations, N B at most. The features come back likewise. The way from the host
to the devices is N B images in each case and not counted."""

MEASURED = """## Measured

One step on CPU contexts of one process, from the batch on the host to its features in the old order, and the bytes
between devices counted in these steps. *Not shuffled* is `gluon.utils.split_and_load` alone. A CPU context is no
device of its own: what moves is copied in memory, so the bytes hold anywhere, the times here."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, quick="small images and few rounds: a smoke test")
    if options.child:
        child(json.loads(options.child))
        return 0

    env = _results.environment(["benchmarks/shuffle.py", *arguments])
    full = {"image": IMAGE, "batch": BATCH, "rounds": 15, "budget_s": 25}
    cells: List[_measuring.Cell] = [QUICK] if options.quick else [{**full, "devices": n} for n in DEVICES]
    samples = []
    with tqdm(total=len(cells), desc="shuffle", unit="cell", disable=None) as progress:
        measured = _measuring.measure(
            __file__, [{**cell, "contrib": False} for cell in cells], 30 if options.quick else 90
        )
        for cell, taken, problems in measured:
            moved: Any = taken.pop("bytes", {})
            samples.append({**cell, "problems": problems, "seconds": taken, "bytes": moved})
            progress.set_postfix_str(f"{cell['devices']} devices")
            progress.update()

    results = [{**sample, "seconds": _results.summary(sample["seconds"])} for sample in samples]
    ways = ["while loading", "on the devices", "all-gather"]
    header = ["devices", *(f"{way}, ms" for way in ["not shuffled", *ways]), *(f"{way}, MB" for way in ways)]
    times = _results.table(header, [row(result) for result in results])
    header = ["devices", *(f"images {way}, MB" for way in ways), "features, kB", "features all-gather, kB"]
    counts = _results.table(header, [[str(n), *count(n)] for n in COUNTED])
    text = "\n\n".join([EXPLANATION, counts, MEASURED, times])
    print(counts, times, sep="\n\n")
    _results.write(options.out, "shuffle", "Sample shuffle", text, env, results, samples)
    return _results.report(results, "devices")


def rows_moved(n: int, b: int) -> Dict[str, Tuple[int, int]]:
    """Of images and of features, between n devices with b rows each; the mean where it depends on the permutation."""
    some, all_of_them = (n - 1) * b, n * (n - 1) * b
    return {"loading": (0, some), "moving": (some, some), "gathering": (all_of_them, all_of_them)}


def count(n: int) -> List[str]:
    """The cells of the table of bytes, from the formula."""
    rows = rows_moved(n, BATCH)
    images = [f"{rows[name][0] * IMAGE_BYTES / 1e6:.2f}" for name in rows]
    return images + [f"{rows[name][1] * FEATURE_BYTES / 1e3:.2f}" for name in ("moving", "gathering")]


def row(result: Dict[str, Any]) -> List[str]:
    taken, moved = result["seconds"], result["bytes"]
    times = [f"{taken[name]['median'] * 1e3:.1f}" if taken else "error" for name in WAYS]
    return [
        str(result["devices"]),
        *times,
        *(f"{moved[name] / 1e6:.2f}" if moved else "-" for name in WAYS[1:]),
    ]


def child(cells: Sequence[_measuring.Cell]) -> None:
    """Measures the cells in turn and prints one line of JSON for each, with the mean of bytes between devices."""
    import gluon_syncbn

    *contexts, host = gluon_syncbn.cpu_devices(max(cell["devices"] for cell in cells) + 1)
    import mxnet as mx

    original = mx.nd.NDArray.copyto
    counter = {"bytes": 0}

    def copyto(array: Any, target: Any) -> Any:
        if array.context != host:
            counter["bytes"] += array.dtype(0).itemsize * array.size
        return original(array, target)

    mx.nd.NDArray.copyto = copyto  # what as_in_context calls where the context is another one

    def counted(step: Callable[[], None], each: List[int]) -> Callable[[], None]:
        def run() -> None:
            before = counter["bytes"]
            step()
            each.append(counter["bytes"] - before)

        return run

    for cell in cells:
        moved: Dict[str, List[int]] = {name: [] for name in WAYS}
        ways = {
            name: counted(step, moved[name]) for name, step in steps(cell, contexts[: cell["devices"]], host).items()
        }
        taken = _measuring.interleaved(ways, cell["rounds"], cell["budget_s"])
        print(json.dumps({**taken, "bytes": {name: statistics.mean(each) for name, each in moved.items()}}), flush=True)
        del ways
        gc.collect()  # the arrays of this cell
        mx.nd.waitall()


def steps(cell: _measuring.Cell, contexts: Sequence[Any], host: Any) -> Dict[str, Callable[[], None]]:
    """One step of each way, on the same batch and features."""
    import mxnet as mx
    import numpy as np
    from mxnet import nd
    from mxnet.gluon.utils import split_and_load

    from gluon_syncbn import contrastive as ours

    n = cell["batch"] * len(contexts)
    data = nd.random.uniform(shape=(n, *cell["image"]), ctx=host)
    features = [nd.random.normal(shape=(cell["batch"], FEATURES), ctx=ctx) for ctx in contexts]
    shuffle = ours.SampleShuffle(seed=0)

    def plain() -> None:
        shards = split_and_load(data, contexts)
        mx.nd.waitall()
        del shards

    def loading() -> None:
        batch = ours.split_and_load(data, contexts, shuffle=shuffle)
        keys = batch.unshuffle(features)
        mx.nd.waitall()
        del keys

    def moving() -> None:
        batch = ours.shuffle_shards(split_and_load(data, contexts), shuffle=shuffle)
        keys = batch.unshuffle(features)
        mx.nd.waitall()
        del keys

    def picked(arrays: Sequence[Any], order: Any) -> List[Any]:
        results = []
        for ctx, rows in zip(contexts, np.split(order, len(contexts))):
            everything = nd.concat(*[array.as_in_context(ctx) for array in arrays], dim=0)
            results.append(nd.take(everything, nd.array(rows, ctx=ctx, dtype="int64")))
        return results

    def gathering() -> None:
        order = shuffle.permutation(n)
        shards = picked(split_and_load(data, contexts), order)
        keys = picked(features, np.argsort(order))
        mx.nd.waitall()
        del shards, keys

    return dict(zip(WAYS, (plain, loading, moving, gathering)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
