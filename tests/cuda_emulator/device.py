"""Kernels on emulated devices, without MXNet: NumPy arrays in, NumPy arrays out.

device = Device(out, source, index=1)
x, y = device.upload(numpy_array), device.empty(10, "float32")
device.launch("scale", 4, 128, x, y, numpy.int32(10))
y.download()
"""

import ctypes
from pathlib import Path

import numpy as np

OPTIONS = ("--gpu-architecture=compute_80", "--std=c++14")


class EmulatorError(RuntimeError):
    """What the emulator found wrong, or a source that does not compile."""


class Array:
    """Memory of a device, freed with the object; room for `shift` values is before it."""

    def __init__(self, device, shape, dtype, shift=0):
        self.device, self.shape, self.dtype = device, shape, np.dtype(dtype)
        self.begin, before = ctypes.c_void_p(), shift * self.dtype.itemsize
        size = before + int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        device.call("cuMemAlloc_v2", ctypes.byref(self.begin), ctypes.c_size_t(max(size, 1)))
        self.pointer = ctypes.c_void_p(self.begin.value + before)

    def download(self):
        result = np.empty(self.shape, self.dtype)
        self.device.call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(result.ctypes.data), self.pointer, ctypes.c_size_t(result.nbytes)
        )
        return result

    def free(self):
        if self.pointer:
            self.device.call("cuMemFree_v2", self.begin)
            self.pointer = None

    def __del__(self):
        if getattr(self, "pointer", None):
            self.device.cuda.cuMemFree_v2(self.begin)


class Device:
    """One device with one compiled source of ``extern "C"`` kernels. ``out`` is the folder that build.py set up."""

    def __init__(self, out, source, index=0, options=OPTIONS):
        self.cuda = ctypes.CDLL(str(Path(out) / "lib" / "libcuda.so.1"))
        self.index = index
        self.context, self.module = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), index))
        ptx = self._compile(ctypes.CDLL(str(Path(out) / "lib" / "libnvrtc.so.11.2")), source, options)
        self.call("cuModuleLoadData", ctypes.byref(self.module), ptx)

    def _compile(self, nvrtc, source, options):
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None)
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), flags)
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise EmulatorError(log.value.decode())
        nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetPTX(program, ptx)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return ptx

    def _check(self, name, status):
        if not status:
            return
        count, text = errors(self.cuda)
        if not count:
            reason = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(reason))
            text = reason.value.decode()
        raise EmulatorError(f"{name} on device {self.index}: {text}")

    def call(self, name, *arguments):
        """A function of the driver API, with this device as the current one."""
        self.cuda.cuCtxSetCurrent(self.context)
        self._check(name, getattr(self.cuda, name)(*arguments))

    def empty(self, shape, dtype="float32", shift=0):
        return Array(self, shape, dtype, shift)

    def upload(self, values, shift=0):
        values = np.ascontiguousarray(values)
        array = Array(self, values.shape, values.dtype, shift)
        source = ctypes.c_void_p(values.ctypes.data)
        self.call("cuMemcpyHtoD_v2", array.pointer, source, ctypes.c_size_t(values.nbytes))
        return array

    def launch(self, name, grid, block, *arguments):
        """Runs the kernel and waits for it. ``grid``, ``block``: a number or up to three; ``arguments``: arrays of
        this module, NumPy scalars, values of ctypes, or bytes."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernel", function, *_three(grid), *_three(block), 0, None, pointers, None)
        self.call("cuCtxSynchronize")


def _three(size):
    size = (size,) if np.isscalar(size) else tuple(size)
    return [ctypes.c_uint(n) for n in size + (1,) * (3 - len(size))]


def _value(argument):
    """The argument as bytes that can be pointed to."""
    if isinstance(argument, Array):
        return argument.pointer
    if isinstance(argument, np.generic):
        argument = argument.tobytes()
    if isinstance(argument, bytes):
        return ctypes.create_string_buffer(argument, len(argument))
    return argument


def errors(cuda):
    """The number of errors since the last reset and their text; they count as read."""
    text = ctypes.create_string_buffer(1 << 16)
    count = cuda.cuda_emulator_errors(text, ctypes.c_size_t(len(text)))
    return count, text.value.decode().strip()
