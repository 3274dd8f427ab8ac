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


def contexts(args) -> list:
    """The devices that the options name, in each process of the job."""
    import mxnet as mx

    if args.no_cuda and args.ngpus:
        raise UserError(f"--no-cuda and --ngpus {args.ngpus}: give one of them")
    if args.cpus and args.ngpus:
        raise UserError(f"--cpus {args.cpus} and --ngpus {args.ngpus}: give one of them")
    try:
        there = mx.context.num_gpus()
    except mx.MXNetError:  # a CUDA build without a driver; `gluon-syncbn check` explains this
        there = 0
    index, sharing = place(args)  # the processes of a machine divide its GPUs in the order of their ranks
    if args.ngpus and args.ngpus * sharing > there:
        build = "" if mx.runtime.Features().is_enabled("CUDA") else "; this MXNet is built without CUDA"
        each = f" in each of {sharing} processes" if sharing > 1 else ""
        raise UserError(f"--ngpus {args.ngpus}{each}: MXNet sees {there} GPUs{build}; --cpus N trains without")
    if args.cpus or args.no_cuda or args.ngpus == 0 or not there:
        return [mx.cpu(i) for i in range(args.cpus or 1)]
    count = args.ngpus or there // sharing
    if not count:
        raise UserError(f"--ngpus: MXNet sees {there} GPUs for {sharing} processes; --cpus N trains without")
    return [mx.gpu(index * count + i) for i in range(count)]


def check_batch(args, devices: int, images: int) -> None:
    """Raise a UserError unless every device gets an image in every training step."""
    if args.batch_size < devices:
        raise UserError(f"--batch-size {args.batch_size}: expected at least one for each of {devices} devices")
    if args.batch_size % devices:
        raise UserError(f"--batch-size {args.batch_size}: expected a multiple of the {devices} devices")
    if images < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: there are only {images} training images")
