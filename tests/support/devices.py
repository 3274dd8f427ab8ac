"""Kernels on a GPU, or on the emulator of tests/cuda_emulator, by the driver alone: NumPy arrays in, NumPy arrays out.

device = Device(source)
x, y = device.upload(numpy_array), device.empty(10, "float32")
device.launch("scale", (4, 1, 1), 128, structure)  # a NumPy array of one structure, with x.address and y.address
y.download()
"""

import ctypes

import numpy as np

OPTIONS = ("--gpu-architecture=compute_50", "--std=c++14")  # those of csrc/cuda/compiler.cc


class Array:
    """Memory of a device with a copy of these values, freed with the object; room for `shift` more is before them."""

    def __init__(self, device, values, shift):
        self.device, self.shape, self.dtype = device, values.shape, values.dtype
        self.begin, before = ctypes.c_void_p(), shift * values.itemsize
        device.call("cuMemAlloc_v2", ctypes.byref(self.begin), ctypes.c_size_t(before + max(values.nbytes, 1)))
        self.address = self.begin.value + before
        device.copy("cuMemcpyHtoDAsync_v2", self.address, values.ctypes.data, values.nbytes)

    def download(self):
        result = np.empty(self.shape, self.dtype)
        self.device.copy("cuMemcpyDtoHAsync_v2", result.ctypes.data, self.address, result.nbytes)
        return result

    def __del__(self):
        self.device.driver.cuMemFree_v2(self.begin)


class Device:
    """One device with one compiled source of ``extern "C"`` kernels. Raises OSError where there is none."""

    def __init__(self, source):
        self.driver = ctypes.CDLL("libcuda.so.1")
        if self.driver.cuInit(0):
            raise OSError("the driver finds no GPU")
        self.context, self.module = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuModuleLoadData", ctypes.byref(self.module), compiled(source))

    def _check(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        if status:
            reason = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(reason))
            raise RuntimeError(f"{name}: {reason.value.decode()}. {errors()[1]}")

    def call(self, name, *arguments):
        """A function of the driver, with this device as the current one."""
        self._check("cuCtxSetCurrent", self.context)
        self._check(name, *arguments)

    def copy(self, way, to, from_, size):
        self.call(way, ctypes.c_void_p(to), ctypes.c_void_p(from_), ctypes.c_size_t(size), None)
        self.call("cuCtxSynchronize")

    def empty(self, shape, dtype):
        return self.upload(np.full(shape, np.nan, dtype))

    def upload(self, values, shift=0):
        return Array(self, np.ascontiguousarray(values), shift)

    def launch(self, name, grid, threads, structure):
        """Runs the kernel, in so many blocks in each of three directions, and waits for it."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        pointers = (ctypes.c_void_p * 1)(structure.ctypes.data)
        self.call("cuLaunchKernel", function, *grid, threads, 1, 1, 0, None, pointers, None)
        self.call("cuCtxSynchronize")


def compiled(source, library="libnvrtc.so.11.2"):
    """What NVRTC makes of it."""
    nvrtc, program, size = ctypes.CDLL(str(library)), ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None)
    flags = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    failed = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), flags)
    getter = "nvrtcGetProgramLog" if failed else "nvrtcGetPTX"
    getattr(nvrtc, f"{getter}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, getter)(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(text.value.decode())
    return text


def errors():
    """The number of errors that the emulator has found since the last reset, and their text; they count as read."""
    text, driver = ctypes.create_string_buffer(1 << 16), ctypes.CDLL("libcuda.so.1")
    read = getattr(driver, "cuda_emulator_errors", None)
    count = read(text, ctypes.c_size_t(len(text))) if read else 0
    return count, text.value.decode().strip()
