"""Shared by the tests on GPUs: which there are, and what the emulator has counted and found."""

import ctypes
import os

import mxnet as mx
import pytest
from devices import errors
from mxnet import autograd

EMULATED = "CUDA_EMULATOR" in os.environ
GPUS = [mx.gpu(i) for i in range(mx.context.num_gpus())]


def gpus(count):
    if len(GPUS) < count:
        pytest.skip(f"{count} GPUs are needed, {len(GPUS)} found")
    return GPUS[:count]


def counts(device):
    numbers = (ctypes.c_longlong * 7)()
    ctypes.CDLL("libcuda.so.1").cuda_emulator_counts(device, numbers)
    names = ("launches", "to device", "to host", "within", "waits", "collectives", "allocations")
    return dict(zip(names, numbers))


def counted(function):
    """Its result, when all that it has asked for is done, and what that was on each of four GPUs."""
    mx.nd.waitall()
    ctypes.CDLL("libcuda.so.1").cuda_emulator_reset_counts()
    result = function()
    mx.nd.waitall()
    return result, [counts(i) for i in range(4)]


def counted_step(call, heads, steps):
    """What `call` returns in the last of some steps, and what that forward and the backward have asked for."""

    def forward():
        with autograd.record():
            return call()

    for _ in range(steps):
        ys, forwards = counted(forward)
        _, backwards = counted(lambda ys=ys: autograd.backward(ys, heads))
    return ys, forwards, backwards


def assert_sound():
    """The emulator has seen no access that a GPU would not forgive."""
    if EMULATED:
        assert errors() == (0, "")
