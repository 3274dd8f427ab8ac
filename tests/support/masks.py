"""Masks for the batch of a test, and a step of a layer with them."""

import numpy as np
from replicas import on_devices, step


def make_masks(rng, batch, axis=1, values=(1.0, -3.0, 0.5)):
    """One per shard, without the channel axis. Of several samples, the last one counts in no position."""
    masks = []
    for x in batch.shards:
        mask = (rng.rand(*np.delete(x.shape, axis % x.ndim)) < 0.6) * rng.choice(values)
        mask[:1].ravel()[:1] = 1
        mask[len(mask) - 1 :] *= len(mask) == 1 or axis % x.ndim == 0
        masks.append(mask)
    return masks


def masked_step(layer, batch, masks, contexts, dtype):
    """And no gradient reaches a mask."""
    masks = on_devices(masks, contexts, "float32")
    for mask in masks:
        mask.attach_grad()
    got = step(layer, batch, contexts, dtype, masks)
    assert not any(mask.grad.asnumpy().any() for mask in masks)
    return got
