"""The devices of a run, and settings for them."""

from __future__ import annotations

import os

from errors import UserError
from model import package
from processes import place


def prepare_mxnet(args) -> None:
    """Divide the cores among the CPU devices of all processes, and find a GPU build's CUDA libraries.

    Call this function before you import MXNet. The import of the package finds the CUDA libraries.

    By default, each device's operators use as many threads as there are cores, and wait for each other by spinning.
    FastSCNN on 2 devices and 2 cores then trained 1.9 images/s. With one thread per device, it trained 3.2.
    """
    devices = 0 if args.ngpus else (args.cpus or 1) * place(args)[1]
    if devices > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // devices)))
    package()


def contexts(args, processes: int = 1) -> list:
    """The devices that the options name, in each of `processes` processes of the job."""
    import mxnet as mx

    if args.no_cuda and args.ngpus:
        raise UserError(f"--no-cuda and --ngpus {args.ngpus}: give one of them")
    if args.cpus and args.ngpus:
        raise UserError(f"--cpus {args.cpus} and --ngpus {args.ngpus}: give one of them")
    try:
        there = mx.context.num_gpus()
    except mx.MXNetError:  # a CUDA build without a driver; `python -m gluon_syncbn` explains this
        there = 0
    index, sharing = place(args)  # the processes of a machine divide its GPUs in the order of their ranks
    if args.ngpus and args.ngpus * sharing > there:
        build = "" if mx.runtime.Features().is_enabled("CUDA") else "; this MXNet is built without CUDA"
        each = f" in each of {sharing} processes" if sharing > 1 else ""
        raise UserError(f"--ngpus {args.ngpus}{each}: MXNet sees {there} GPUs{build}; --cpus N trains without")
    if args.cpus or args.no_cuda or args.ngpus == 0 or not there:
        return cpu_contexts(args.cpus or 1, args.cpu_temp_copies, processes)
    count = args.ngpus or there // sharing
    if not count:
        raise UserError(f"--ngpus: MXNet sees {there} GPUs for {sharing} processes; --cpus N trains without")
    return [mx.gpu(index * count + i) for i in range(count)]


def cpu_contexts(count: int, temp_copies: int | None = None, processes: int = 1) -> list:
    """The CPU contexts of one of `processes` processes. Call this function before the first MXNet operator.

    Replicas that wait for each other need `cpu_devices`, which prepares MXNet's shared resources. Plain BatchNorm does
    not wait, but is faster with `cpu_devices`: 3.7 images/s instead of 2.3, for FastSCNN on 2 devices. Otherwise the
    Dropout layers of all devices share one generator, and the devices' steps run one after the other.
    """
    import mxnet as mx

    devices = count * processes
    if devices == 1:
        return [mx.cpu(0)]
    # With another number of generators, a seed gives each Dropout other numbers. Each process of a job therefore has as
    # many generators as one process with all devices.
    return package().cpu_devices(count, temp_copies=temp_copies, random_copies=4 * (devices - 1))


def choose_mode(args, devices) -> str:
    """Return --mode, or else the fastest safe mode. Raise a UserError for an unsafe mode."""
    several_cpus = len(devices) > 1 and devices[0].device_type == "cpu"
    if args.mode == "static" and args.syncbn and several_cpus:
        # The operators of a static graph keep their first temporary space. Operators that touch the images or the
        # gradient of the loss take a space anew in each step, in turn. On CPUs all devices share these spaces. After
        # some steps, one device's first convolution holds a space that another device's operator needs before the
        # rendezvous. FastSCNN deadlocked at step 34 to 87, with 64 to 1024 spaces.
        raise UserError(
            "--mode static: does not work with --syncbn on several CPU devices; expected hybrid or imperative"
        )
    return args.mode or ("hybrid" if several_cpus else "static")


def check_batch(args, devices: int, images: int) -> None:
    """Raise a UserError unless every device gets an image in every training step."""
    if args.batch_size < devices:
        raise UserError(f"--batch-size {args.batch_size}: expected at least one for each of {devices} devices")
    if args.batch_size % devices:
        raise UserError(f"--batch-size {args.batch_size}: expected a multiple of the {devices} devices")
    if images < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: there are only {images} training images")
