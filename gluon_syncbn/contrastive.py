"""Provides what contrastive training needs: `gather`, and keys that are computed on other devices than their queries.

Each device's BatchNorm sees only the device's own samples. Where a query and its key share a device, the statistics
reveal which key belongs to the query. So the samples of the key view change places at random. Their features, which are
small, come back. Source: He, Fan, Wu, Xie and Girshick, "Momentum Contrast for Unsupervised Visual Representation
Learning", CVPR 2020, arXiv 1911.05722 (section 3.3 and appendix A.9).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.context import Context
from mxnet.gluon.data import Sampler
from mxnet.util import is_np_array

from .system import arguments, kinds
from .training.gather import gather
from .training.replicas import store_of

_MOST = 2**63 - 1  # samples, batches, epochs

__all__ = ["SampleShuffle", "ShuffleSampler", "ShuffledBatch", "gather", "shuffle_shards", "split_and_load"]


@dataclass
class SampleShuffle:
    """Draws a new, uniformly random permutation for each batch. The same seed gives the same ones everywhere.

    Attributes
    ----------
    seed : int
        From 0 to 2**64 - 1.
    position : int
        Number of permutations drawn so far. ``SampleShuffle(seed, position)`` continues another one from there.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    seed: int
    position: int = 0

    def __post_init__(self) -> None:
        self.seed = arguments.seed("seed", self.seed)
        self.position = arguments.whole("position", self.position, 0, _MOST)

    def permutation(self, n: int) -> np.ndarray:
        """Returns the next permutation, of 0 ... n-1.

        Raises
        ------
        ValueError
            If ``n`` is not an integer, or below 0.
        """
        order = _permutation(arguments.whole("n", n, 0, _MOST), self.seed, self.position)
        self.position += 1
        return order


@dataclass(eq=False, repr=False)
class ShuffledBatch:
    """A batch whose samples have changed places. It is not a list: its shards do not match the queries' shards.

    Attributes
    ----------
    shuffled_shards : list of NDArray
        One for each device, in shuffled order.
    order : numpy.ndarray
        Sample i over all ``shuffled_shards`` is sample ``order[i]`` of the batch.
    """

    shuffled_shards: List[Any]
    order: np.ndarray
    _batch_axis: int

    def apply(self, net: Callable[[Any], Any]) -> List[Any]:
        """Calls ``net(shard)`` for each shard and returns `unshuffle` of the results."""
        return self.unshuffle([net(shard) for shard in self.shuffled_shards])

    def unshuffle(self, features: Sequence[Any]) -> List[Any]:
        """Returns the features in the order of the batch, on the devices of its shards. Autograd goes through.

        Only rows that change device move. Row i of the batch goes to the place where ``gluon.utils.split_and_load``
        would put it, or where `shuffle_shards` found it.

        Parameters
        ----------
        features : list of NDArray
            One for each of ``shuffled_shards``, on its context: a row for each sample, then any further axes.

        Raises
        ------
        ValueError
            If features and shards do not match, or the features have been unshuffled before.
        """
        if isinstance(features, _Unshuffled):
            raise ValueError("features: these have been unshuffled before, expected those of shuffled_shards")
        count = len(self.shuffled_shards)
        if not isinstance(features, (list, tuple)) or len(features) != count:
            arguments.refuse("features", features, f"a list of {count}, one for each shard")
        for i, (feature, shard) in enumerate(zip(features, self.shuffled_shards)):
            _check_array(f"features[{i}]", feature)
            length = shard.shape[self._batch_axis]
            if feature.shape[0] != length or feature.ctx != shard.ctx:
                arguments.refuse(f"features[{i}]", feature, f"{length} rows on {shard.ctx}, as the shard has")
        _check_alike("features", features, 0)
        return _Unshuffled(_rearrange(features, np.argsort(self.order), 0))


class _Unshuffled(list):
    """Features that must not be unshuffled again."""


def split_and_load(
    data: Any, ctx_list: Sequence[Context], batch_axis: int = 0, even_split: bool = True, *, shuffle: SampleShuffle
) -> ShuffledBatch:
    """Splits a batch as ``gluon.utils.split_and_load`` does, and shuffles the samples on their way to the devices.

    No sample moves twice. The result has a shard for each context.

    Parameters
    ----------
    data : NDArray or numpy.ndarray
        A batch that is not on the devices yet. The shards of an array of ``mx.nd`` or ``mx.np`` have the same kind.
    ctx_list : list of Context
        The contexts of the shards.
    batch_axis : int
        The axis of the samples.
    even_split : bool
        Whether to raise an error if the devices cannot share the samples evenly. Otherwise the first devices get one
        more.
    shuffle : SampleShuffle
        Draws the permutation.

    Raises
    ------
    ValueError
        If an argument is not as described, or there are fewer samples than devices.
    """
    if not isinstance(data, np.ndarray):
        _check_array("data", data, "an NDArray or a numpy.ndarray (shuffle_shards is for batches on devices)")
    ctx_list = arguments.contexts("ctx_list", ctx_list)
    axis = arguments.whole("batch_axis", batch_axis, -data.ndim, data.ndim - 1) % data.ndim
    n, count = data.shape[axis], len(ctx_list)
    if n < count:
        raise ValueError(f"data: {n} samples were given, expected at least {count}, one for each context")
    if arguments.flag("even_split", even_split) and n % count:
        raise ValueError(f"data: {n} samples were given, expected a multiple of {count} or even_split=False")
    order = _draw(shuffle, n)
    array = mx.np.array if is_np_array() else nd.array
    shards = []
    for context, rows in zip(ctx_list, np.array_split(order, count)):
        if isinstance(data, np.ndarray):
            shards.append(array(np.take(data, rows, axis), ctx=context))
        else:
            shards.append(kinds.like(_take(kinds.classic(data), rows, axis).as_in_context(context), data))
    return ShuffledBatch(shards, order, axis)


def shuffle_shards(shards: Sequence[Any], batch_axis: int = 0, *, shuffle: SampleShuffle) -> ShuffledBatch:
    """Shuffles a batch that is on its devices already: only samples that change device move.

    Each device keeps its number of samples. If the batch is not loaded yet, use `split_and_load`, which moves nothing.

    Parameters
    ----------
    shards : list of NDArray
        One for each device, of any length, alike in the other axes.
    batch_axis, shuffle
        As in `split_and_load`.

    Raises
    ------
    ValueError
        If an argument is not as described.
    """
    if not isinstance(shards, (list, tuple)) or not shards:
        arguments.refuse("shards", shards, "a list of NDArrays, one for each device")
    for i, shard in enumerate(shards):
        _check_array(f"shards[{i}]", shard)
    axis = arguments.whole("batch_axis", batch_axis, -shards[0].ndim, shards[0].ndim - 1) % shards[0].ndim
    _check_alike("shards", shards, axis)
    order = _draw(shuffle, sum(shard.shape[axis] for shard in shards))
    return ShuffledBatch(_rearrange(shards, order, axis), order, axis)


class ShuffleSampler(Sampler):
    """Shuffles samples between processes: each loads the samples whose keys it computes. No image crosses the network.

    Pass it as batch sampler to ``gluon.data.DataLoader(dataset, batch_sampler=...)``. It yields lists of pairs (index
    of a query, index of a key). ``dataset[q, k]`` gives one view of sample q and another view of sample k. All
    processes draw the same permutations without communication: of the samples for each epoch, which `set_epoch` sets
    before its iteration, and of the keys for each batch. Samples that do not fill a batch of all processes are left
    out. If a process splits its batch among several devices, the keys are shuffled on each of them. ::

        # mpiexec -n 2 python train.py
        import mxnet as mx
        import numpy as np
        import gluon_syncbn
        from mxnet import autograd, gluon

        class Views(gluon.data.SimpleDataset):
            def __getitem__(self, pair):
                query, key = (self._data[index] for index in pair)
                return query, key + 0.1  # two views; yours are random crops, for example

        kv = gluon_syncbn.kvstore("mpi")
        gluon_syncbn.configure(kvstore=kv)
        images = np.random.RandomState(0).rand(64, 4).astype("float32")  # the same in every process
        encoder_k = gluon.nn.BatchNorm()
        encoder_k.initialize()
        sampler = gluon_syncbn.contrastive.ShuffleSampler(len(images), 8, kv.num_workers, kv.rank, seed=1)
        loader = gluon.data.DataLoader(Views(images), batch_sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch, (x_q, x_k) in enumerate(loader):
                with autograd.train_mode():
                    k = sampler.restore(encoder_k(x_k), batch)  # k[i] belongs to x_q[i]

    Parameters
    ----------
    length : int
        Samples of the data set.
    batch_size : int
        Samples of one process in a batch.
    num_workers, rank : int
        The number of processes, which all take part in each batch, and the number of this one, as a KVStore has them.
    seed : int
        From 0 to 2**64 - 1, the same for all processes.

    Raises
    ------
    ValueError
        If an argument is out of range, or there are fewer samples than in a batch of all processes.
    """

    def __init__(self, length: int, batch_size: int, num_workers: int, rank: int, seed: int) -> None:
        length = arguments.whole("length", length, 1, _MOST)
        batch_size = arguments.whole("batch_size", batch_size, 1, _MOST)
        num_workers = arguments.devices("num_workers", num_workers)
        rank = arguments.whole("rank", rank, 0, num_workers - 1)
        seed = arguments.seed("seed", seed)
        whole = batch_size * num_workers
        if length < whole:
            raise ValueError(f"length: {length} was given, expected at least {whole}, one batch of all processes")
        self._length, self._whole = length, whole
        self._num_workers, self._rank, self._seed = num_workers, rank, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iterations, which draws other permutations, and of `restore`."""
        self._epoch = arguments.whole("epoch", epoch, 0, _MOST)

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:  # for one release
        warnings.warn("sampler.epoch = e is sampler.set_epoch(e) now", DeprecationWarning, stacklevel=2)
        self.set_epoch(value)

    def __len__(self) -> int:
        return self._length // self._whole

    def __iter__(self) -> Iterator[List[Tuple[int, int]]]:
        return self._pairs(self.epoch)  # the iterator keeps this epoch

    def _pairs(self, epoch: int) -> Iterator[List[Tuple[int, int]]]:
        samples = _permutation(self._length, self._seed, epoch, 0)
        for batch in range(len(self)):
            of_all = samples[batch * self._whole :][: self._whole]
            keys = of_all[self._order(epoch, batch)]
            yield list(zip(self._own(of_all).tolist(), self._own(keys).tolist()))

    def _order(self, epoch: int, batch: int) -> np.ndarray:
        """Returns the sample at each place of the keys of all processes."""
        return _permutation(self._whole, self._seed, epoch, 1 + batch)

    def _own(self, rows: np.ndarray) -> np.ndarray:
        return np.split(rows, self._num_workers)[self._rank]

    def restore(self, features: Any, batch: int, kvstore: Any = None) -> Any:
        """Returns the keys of this process in the order of its queries. Autograd goes through NDArrays.

        All processes call it within ``autograd.record()`` or ``autograd.train_mode()``. `gather` then sends the
        features of all processes to each. Only the features travel.

        Parameters
        ----------
        features : NDArray, list of NDArray or numpy.ndarray
            The features of the keys that this process has loaded, in their order. A list has one array for each
            context, and the result has the same lengths. Gathered features of all processes are accepted, too.
        batch : int
            The number of the batch in the current epoch.
        kvstore : KVStore, optional
            The KVStore of the processes. By default that of `configure`, or the only one.

        Raises
        ------
        ValueError
            If there is no such batch, or it has another number of rows, or the KVStore has other processes.
        StepError, MXNetError
            As in `gather`.
        """
        batch = arguments.whole("batch", batch, 0, len(self) - 1)
        store = store_of(kvstore)
        order = self._order(self.epoch, batch)
        own = self._own(np.argsort(order))  # where the keys of this process's queries are
        parts = list(features) if isinstance(features, (list, tuple)) and features else [features]
        for part in parts:
            if parts[0] is not features or not isinstance(part, np.ndarray):
                _check_array("features", part, "an NDArray, a list of them or a numpy.ndarray")
        count = sum(len(part) if part.ndim else 0 for part in parts)
        if parts[0] is features and count == len(order):
            return features[own] if isinstance(features, np.ndarray) else _take(features, own, 0)
        if count != len(own) or isinstance(features, np.ndarray):
            expected = f"{len(own)} rows, those of this process in batch {batch}, or {len(order)}, all of them"
            arguments.refuse("features", features, expected)
        place = (0, 1) if store is None else (store.rank, store.num_workers)
        if place != (self._rank, self._num_workers):
            expected = f"one in which this is rank {self._rank} of {self._num_workers}, as the sampler says"
            raise ValueError(f"kvstore: this process is rank {place[0]} of {place[1]} in it, expected {expected}")
        gathered = gather([kinds.classic(part) for part in parts], name="keys", kvstore=kvstore)
        cuts = np.cumsum([len(part) for part in parts])[:-1]
        keys = [kinds.like(_take(rows, places, 0), parts[0]) for rows, places in zip(gathered, np.split(own, cuts))]
        return keys[0] if parts[0] is features else keys


def _permutation(n: int, *numbers: int) -> np.ndarray:
    # NumPy promises that RandomState's streams never change. So processes may have different versions of NumPy.
    words = [word for number in numbers for word in (number % 2**32, number >> 32)]
    return np.random.RandomState(words).permutation(n)


def _rearrange(shards: Sequence[Any], order: np.ndarray, axis: int) -> List[Any]:
    """Returns ``concat(shards)[order]`` along ``axis``, cut like the shards, on their contexts."""
    ends = np.cumsum([shard.shape[axis] for shard in shards])
    owners = np.searchsorted(ends, order, side="right")  # the shard that holds the row for each place
    results = []
    for target, rows, there in zip(shards, np.split(order, ends[:-1]), np.split(owners, ends[:-1])):
        parts = []
        for i in np.unique(there):
            part = _take(shards[i], rows[there == i] - (ends[i] - shards[i].shape[axis]), axis)
            parts.append(kinds.classic(part).as_in_context(target.ctx))
        # The parts come in the order of their owners, and the rows of a part in the order of the places.
        back = np.argsort(np.argsort(there, kind="stable"))
        result = _take(nd.concat(*parts, dim=axis), back, axis) if len(parts) > 1 else parts[0]
        results.append(kinds.like(result, target))
    return results


def _take(data: Any, rows: np.ndarray, axis: int) -> Any:
    taken = nd.take(kinds.classic(data), nd.array(rows, ctx=data.ctx, dtype="int64"), axis=axis)
    return kinds.like(taken, data)


def _draw(shuffle: Any, n: int) -> np.ndarray:
    if not isinstance(shuffle, SampleShuffle):
        arguments.refuse("shuffle", shuffle, "a SampleShuffle, which draws for all batches")
    return shuffle.permutation(n)


def _check_array(name: str, value: Any, expected: str = "an NDArray with samples") -> None:
    # the type itself: sparse arrays are subclasses with other operators
    if type(value) not in (nd.NDArray, mx.np.ndarray) or value.ndim == 0:
        arguments.refuse(name, value, expected)


def _check_alike(name: str, arrays: Sequence[Any], axis: int) -> None:
    samples = [(type(one), one.dtype, one.shape[:axis] + one.shape[axis + 1 :]) for one in arrays]
    for i, array in enumerate(arrays):
        if samples[i] != samples[0] or not array.shape[axis]:
            expected = f"samples like those of {name}[0], {arguments.described(arrays[0])}"
            arguments.refuse(f"{name}[{i}]", array, expected)
