"""Prediction of whole images with a trained network, window by window."""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
from checkpoint import check_arrays, set_arrays
from dataset import MEAN, NUM_CLASS, STD
from model import described, outputs, plain_network
from PIL import Image, ImageOps


def load_network(args, checkpoint, devices):
    """The network of a checkpoint, ready to predict."""
    net = plain_network(args, devices)
    check_arrays(net, checkpoint, described(args))
    set_arrays(net, checkpoint.arrays)
    net.hybridize()
    return net


class Predictor:
    """Computes class probabilities of images of any size.

    The predictor scales the longer side of an image to the base size. It predicts windows of the crop size, which every
    network takes, and scales the result back. GluonCV's own evaluator fills a last window beyond the border with black.
    Here the last window moves back inside the image, so the network sees only pixels as in training.
    """

    def __init__(self, net, devices, base_size, crop_size, flip=False, scales=(1.0,)):
        self._net, self._devices = net, devices
        self._base_size, self._crop_size = base_size, crop_size
        self._flip, self._scales = flip, scales

    def scores(self, images) -> list:
        """One (1, classes, height, width) array per PIL image, for at most as many images as devices."""
        return [self._image(image, device) for image, device in zip(images, self._devices)]

    def labels(self, image) -> np.ndarray:
        """Class of each pixel of a PIL image, 0 to 149 (ADE20K's id less one)."""
        return self.scores([image])[0].argmax(axis=1)[0].asnumpy().astype(np.int32)

    def _image(self, image, device):
        width, height = image.size
        total = mx.nd.zeros((1, NUM_CLASS, height, width), ctx=device)
        for scale in self._scales:
            factor = self._base_size * scale / max(image.size)
            w, h = (max(1, round(side * factor)) for side in image.size)
            scaled = self._windows(image.resize((w, h), Image.BILINEAR), device)[:, :, :h, :w]
            total += mx.nd.contrib.BilinearResize2D(scaled, height=height, width=width)
        return total

    def _windows(self, image, device):
        """The mean of the windows' probabilities, (1, classes, H, W). H and W are at least the crop size."""
        size = self._crop_size
        pad = [max(0, size - side) for side in image.size]
        pixels = normalised(ImageOps.expand(image, (0, 0, *pad))).as_in_context(device)
        _, height, width = pixels.shape
        total = mx.nd.zeros((1, NUM_CLASS, height, width), ctx=device)
        count = mx.nd.zeros((1, 1, height, width), ctx=device)
        for top in window_starts(height, size):
            for left in window_starts(width, size):
                window = pixels[:, top : top + size, left : left + size].expand_dims(0)
                total[:, :, top : top + size, left : left + size] += self._window(window)
                count[:, :, top : top + size, left : left + size] += 1
        return mx.nd.broadcast_div(total, count)

    def _window(self, window):
        result = outputs(self._net, window)[0].softmax(axis=1)
        if self._flip:
            result = result + outputs(self._net, window.flip(axis=3))[0].softmax(axis=1).flip(axis=3)
        return result


def window_starts(length: int, size: int) -> list:
    """The positions of windows that cover `length`, overlap by a third or more, and stay inside."""
    count = math.ceil((length - size) / (size * 2 / 3)) + 1
    return [int(start) for start in np.linspace(0, length - size, count)]


def normalised(image) -> mx.nd.NDArray:
    """The (3, height, width) array of a PIL image, as in training."""
    pixels = np.asarray(image, np.float32) / 255
    return mx.nd.array(((pixels - MEAN) / STD).transpose(2, 0, 1), dtype="float32")
