"""Adaptive average pooling of the segmentation example on its way to ONNX, which `make gluoncv` goes to its end."""

import itertools

import numpy as np
from mxnet import nd


def test_the_matrix_is_what_the_operator_computes(segmentation_modules, rng):
    from pooling import means

    for given, wanted in itertools.product(range(1, 14), repeat=2):
        x = rng.randn(2, 3, given, 1)
        want = nd.contrib.AdaptiveAvgPooling2D(nd.array(x, dtype="float64"), output_size=(wanted, 1)).asnumpy()
        np.testing.assert_allclose(means(given, wanted) @ x, want, rtol=1e-12, atol=1e-14)
