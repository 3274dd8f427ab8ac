"""Provides what contrastive training needs: shuffled samples, and the features of all devices and processes."""

from .training.gather import gather
from .training.shuffle import SampleShuffle, ShuffledBatch, ShuffleSampler, shuffle_shards, split_and_load

__all__ = ["SampleShuffle", "ShuffleSampler", "ShuffledBatch", "gather", "shuffle_shards", "split_and_load"]
