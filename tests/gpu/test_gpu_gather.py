"""Rows of GPUs on each of them, against NumPy. Only on GPUs: MXNet's own operators do not run on the emulator."""

import numpy as np
import pytest
from gpus import EMULATED, GPUS, gpus
from mxnet import autograd, nd

from gluon_syncbn import contrastive

if not GPUS or EMULATED:
    pytest.skip("MXNet finds no GPU, or only the emulator's", allow_module_level=True)


def test_rows_and_gradients(rng):
    contexts = gpus(2)
    parts, heads = [rng.randn(n, 3) for n in (2, 5)], [rng.randn(7, 3) for _ in contexts]
    xs = [nd.array(part, ctx=c, dtype="float64") for part, c in zip(parts, contexts)]
    for x in xs:
        x.attach_grad()
    with autograd.record():
        ys = contrastive.gather(xs)
    autograd.backward(ys, [nd.array(head, ctx=c, dtype="float64") for head, c in zip(heads, contexts)])
    for y, context in zip(ys, contexts):
        assert y.context == context
        np.testing.assert_array_equal(y.asnumpy(), np.concatenate(parts))
    np.testing.assert_allclose(np.concatenate([x.grad.asnumpy() for x in xs]), sum(heads), rtol=1e-14)
