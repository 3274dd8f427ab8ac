"""The devices that a run uses, and what suits them."""

from __future__ import annotations

import os

from errors import UserError
from model import package
from processes import place


def prepare_mxnet(args) -> None:
    """Divide the cores among the CPU devices of all processes, and find a GPU build's CUDA libraries.

    Both have to happen before MXNet is imported; the package does the second when it is.

    Left alone, each device's operators use as many threads as there are cores, and they wait for each other
    by spinning: FastSCNN on 2 devices and 2 cores trained 1.9 images/s so, and 3.2 with one thread each.
    """
    devices = 0 if args.ngpus else (args.cpus or 1) * place(args)[1]
    if devices > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // devices)))
    package()


def contexts(args, processes: int = 1) -> list:
    """The devices that the options name, in each of so many processes of the job."""
    import mxnet as mx

    if args.no_cuda and args.ngpus:
        raise UserError(f"--no-cuda and --ngpus {args.ngpus}: give one of them")
    if args.cpus and args.ngpus:
        raise UserError(f"--cpus {args.cpus} and --ngpus {args.ngpus}: give one of them")
    try:
        there = mx.context.num_gpus()
    except mx.MXNetError:  # a CUDA build without a driver; `python -m gluon_syncbn` says more
        there = 0
    index, sharing = place(args)  # processes share the machine's GPUs, one after the other
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
    """CPU contexts of one of so many processes; call it before the first MXNet operator.

    Replicas that wait for each other need MXNet's shared resources prepared for it. Plain BatchNorm
    does not wait, but is faster with it: otherwise all devices' Dropout layers share one generator, which
    strings the devices' steps one behind the other (FastSCNN, 2 devices: 2.3 images/s, with it 3.7).
    """
    import mxnet as mx

    devices = count * processes
    if devices == 1:
        return [mx.cpu(0)]
    # A seed gives each Dropout other numbers where MXNet has another number of generators. So each process of a job has
    # as many as one process with all devices.
    return package().cpu_devices(count, temp_copies=temp_copies, random_copies=4 * (devices - 1))


def choose_mode(args, devices) -> str:
    """--mode, or the fastest that is safe; UserError for one that is not."""
    several_cpus = len(devices) > 1 and devices[0].device_type == "cpu"
    if args.mode == "static" and args.syncbn and several_cpus:
        # The operators of a static graph keep the temporary space that they took first; those that touch
        # the images or the gradient of the loss take theirs anew in each step, in turn. On CPUs all devices
        # share these, so after some steps one device's first convolution comes to hold what another's
        # operator needs before they meet: FastSCNN stood still at step 34 to 87, with 64 to 1024 spaces.
        raise UserError("--mode static: with --syncbn not on several CPU devices; expected hybrid or imperative")
    return args.mode or ("hybrid" if several_cpus else "static")


def check_batch(args, devices: int, images: int) -> None:
    """UserError unless every device gets an image in every training step."""
    if args.batch_size < devices:
        raise UserError(f"--batch-size {args.batch_size}: expected at least one for each of {devices} devices")
    if args.batch_size % devices:
        raise UserError(f"--batch-size {args.batch_size}: expected a multiple of the {devices} devices")
    if images < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: there are only {images} training images")
