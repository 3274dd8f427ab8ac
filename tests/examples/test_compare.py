"""examples/segmentation/compare.py: both sides train on the same, rates are chosen apart, and results are kept."""

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("segmentation_modules")


@pytest.mark.parametrize("norm", ["BatchNorm", "SyncBatchNorm"])
def test_one_context_trains_as_four(norm, contexts):
    import mxnet as mx
    import trial

    import gluon_syncbn

    scenes = trial.Scenes(0, 8)
    scenes.masks = np.maximum(scenes.masks, 0)  # a context gives its pixels the mean over those that count
    options = {"batch": 8, "rate": 0.1, "seed": 3, "epochs": 2, "scenes": scenes}
    real = {"BatchNorm": mx.gluon.nn.BatchNorm, "SyncBatchNorm": gluon_syncbn.SyncBatchNorm}[norm]
    one = trial.trained("FCN-ResNet20", trial.NORMS[norm], contexts=contexts[:1], **options)
    four = trial.trained("FCN-ResNet20", real, contexts=contexts[:4], **options)
    assert list(one) == list(four)
    for name, expected in four.items():
        if norm == "BatchNorm" and "running" in name:
            continue  # a Trainer's first step gives all devices the statistics of the first
        np.testing.assert_allclose(one[name].asnumpy(), expected.asnumpy(), rtol=1e-3, atol=1e-3, err_msg=name)


def test_a_channel_that_was_constant_in_training_stays_so():
    import mxnet as mx
    import trial

    layer = mx.gluon.nn.BatchNorm(in_channels=3)
    layer.initialize()
    values = {"gamma": [1.5, 0.7, -2], "beta": [0.1, 0.2, 0.3]}
    values.update(running_mean=[1, 2, 3], running_var=[1e-8, 0.5, 1])
    arrays = {name: mx.nd.array(value) for name, value in values.items()}
    x = mx.nd.random.normal(shape=(5, 3))
    outputs = []
    for kept in (arrays, trial.constant_channels_kept(arrays)):
        for name, value in kept.items():
            getattr(layer, name).set_data(value)
        outputs.append(layer(x).asnumpy())
    saved, kept = outputs
    np.testing.assert_array_equal(kept[:, 0], np.float32(0.1))
    assert np.abs(saved[:, 0] - 0.1).max() > 10
    np.testing.assert_array_equal(kept[:, 1:], saved[:, 1:])
