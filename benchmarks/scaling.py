"""What synchronising over many processes would cost: a model, not a measurement.

From the cost of a message (measured by benchmarks/exchange.py), and the latency and bandwidth of the network that you
mean to rent, the time that a segmentation network's statistics spend between processes in one training step.

    python benchmarks/scaling.py --latency-us 20 --bandwidth-gbit 25 --step-ms 800

The model: every layer sends ``1 + 2C`` float64 in the forward and ``2C`` in the backward, one after the other, and
nothing hides them. Pairs of processes swap totals of 1, 2, 4 ... of them, log2(P) messages deep. A message
costs ``message + latency + bytes / bandwidth``. A process with GPUs also brings the statistics to the host and back:
what a layer asks of a GPU is counted, what each of it takes is from the sources beside the constants.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import List, Sequence

import _measuring
import _results

PROCESSES = [8, 16, 32, 64, 128, 256, 512, 1024]

# Counted: of a layer on a GPU, in the forward and again in the backward (tests/gpu, what_a_step_costs, every_mode).
LAUNCHES, WAITS, COPIES = 2, 3, 2
# Published, in microseconds:
# A kernel that does nothing, "with recent hardware and software": forums.developer.nvidia.com/t/233645.
LAUNCH_US = 3.0
# About 1 for an event, and 1 to 2 for PCIe: github.com/chelsea0x3b/cudarc/pull/335, last comments.
WAIT_US = 3.0
# 5 to 7 for the submission of a small cudaMemcpyAsync: arXiv 2602.21548, section 5.2.
COPY_US = 6.0
GPU_US = LAUNCHES * LAUNCH_US + WAITS * WAIT_US + COPIES * COPY_US

EXPLANATION = f"""A model: {{message:.0f}} us per message, {{latency:.0f}} us latency, {{bandwidth:.0f}} Gbit/s, a step
of {{step:.0f}} ms. Milliseconds per step that the statistics spend between processes, and their share of the step. The
message is measured ([exchange.md](exchange.md)), or given; **everything else is reckoned**.

*With GPUs* are processes that have a machine's GPUs each. A layer then asks {LAUNCHES} launches, {WAITS} waits and
{COPIES} copies of a GPU in each direction, counted on the emulator, of {LAUNCH_US:.0f}, {WAIT_US:.0f} and
{COPY_US:.0f} us, as published by others ([scaling.py](../scaling.py) names them). Within a machine, NCCL takes part of
their place."""


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    env = _results.environment(["benchmarks/scaling.py", *arguments])
    nets = {f"PSPNet-ResNet{depth}": channels_of(depth) for depth in (50, 101)}
    cells = {}
    for name, channels in nets.items():
        cells[name] = [step_cost(channels, count, options) for count in PROCESSES]
        on_gpus = 2 * len(channels) * GPU_US * 1e-6
        cells[f"{name}, with GPUs"] = [seconds + on_gpus for seconds in cells[name]]
    header = ["processes", *(f"{name}, ms (of a step)" for name in cells)]
    rows = [
        [str(count), *(f"{1e3 * seconds:.1f} ({1e3 * seconds / options.step_ms:.1%})" for seconds in costs)]
        for count, *costs in zip(PROCESSES, *cells.values())
    ]
    about = {"message": options.message_us, "latency": options.latency_us, "bandwidth": options.bandwidth_gbit}
    parts = [EXPLANATION.format(**about, step=options.step_ms), [header, *rows]]
    _results.write(options.out, "scaling", "Expected cost over many processes", parts, env, cells)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--message-us",
        type=float,
        help="by default what benchmarks/exchange.py measured, halved: "
        "an exchange of two processes sends and receives one message",
    )
    parser.add_argument("--latency-us", type=float, default=20, help="of the network, one way (20: 10 GbE)")
    parser.add_argument("--bandwidth-gbit", type=float, default=10)
    parser.add_argument("--step-ms", type=float, default=800, help="time of a training step without synchronisation")
    parser.add_argument("--out", type=Path, default=_measuring.RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.message_us is None:
        options.message_us = measured(options.out) / 2
    for name in ("message_us", "latency_us", "bandwidth_gbit", "step_ms"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} was given, expected a number above 0")
    return options


def measured(out: Path) -> float:
    """The median exchange of 1 KiB between two processes over TCP, in microseconds."""
    for folder in (out, _measuring.RESULTS):
        path = folder / "exchange.json"
        if path.exists():
            cells = json.loads(path.read_text())["cells"]["sizes"]
            taken = next(c["microseconds"] for c in cells if (c["bytes"], c["processes"]) == (1024, 2))
            return taken["ours over TCP"]["median"]
    raise SystemExit("no measured exchange: run benchmarks/exchange.py first, or give --message-us")


def channels_of(depth: int) -> List[int]:
    """Of every normalisation layer of GluonCV's PSPNet."""
    import gluoncv
    import mxnet as mx

    net = gluoncv.model_zoo.get_psp(dataset="ade20k", backbone=f"resnet{depth}", pretrained_base=False)
    values = mx.sym.Group(list(net(mx.sym.var("data")))).get_internals()
    _, shapes, _ = values.infer_shape(data=(1, 3, 480, 480))
    return [s[1] for name, s in zip(values.list_outputs(), shapes) if re.search(r"batchnorm\d+_fwd_output$", name)]


def step_cost(channels: Sequence[int], processes: int, options: argparse.Namespace) -> float:
    """Seconds of one training step that the exchanges take."""
    return sum(exchange_cost(8 * length, processes, options) for c in channels for length in (1 + 2 * c, 2 * c))


def exchange_cost(size: int, processes: int, options: argparse.Namespace) -> float:
    message, latency = options.message_us * 1e-6, options.latency_us * 1e-6
    transfer = size * 8 / (options.bandwidth_gbit * 1e9)
    return math.log2(processes) * (message + latency + transfer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
