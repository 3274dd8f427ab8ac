"""What synchronising over many processes, and over many GPUs, would cost: a model, not a measurement.

Processes: from the cost of a message (measured by benchmarks/exchange.py), and the latency and bandwidth of the network
that you mean to rent, the time that a segmentation network's statistics spend between processes in one training step.

    python benchmarks/scaling.py --latency-us 20 --bandwidth-gbit 25 --step-ms 800

The model: every layer sends ``1 + 2C`` float64 in the forward and ``2C`` in the backward, one after the other, and
nothing hides them. Up to 4 processes send to each other; more add up by doubling, log2(P) messages deep. A message
costs ``message + latency + bytes / bandwidth``.

GPUs: what a layer asks of a GPU is counted (docs/architecture.md), what each of it takes is from the sources beside the
constants. Statistics go over the host between processes. Beside that stands NCCL, which needs one order of collectives
in all processes: an *agreement*, an all-gather over the host, would say which layer is next. It would go while the GPU
reads x, and in the backward x and dy. That time is taken off; nothing else hides anything.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import _measuring
import _results

GPUS = [2**k for k in range(11)]  # 1 to 1,024
PROCESSES = [8, 16, 32, 64, 128, 256, 512, 1024]
FEW = 4  # kFew in csrc/exchange/processes.cc

# Counted: of a layer on a GPU, in the forward and again in the backward (tests/gpu, what_a_step_costs, every_mode).
WAYS = {
    "NCCL": {"launches": 2, "waits": 1, "copies": 0},  # and one collective, where there are two GPUs
    "host, a process for each machine": {"launches": 2, "waits": 3, "copies": 2},
}
EACH = "host, a process for each GPU"
# From so many GPUs on NCCL is reckoned with an all-reduce in the place of the all-gather, which takes less then, and so
# many launches more in the forward.
ALL_REDUCE_FROM, MORE_LAUNCHES = 32, 2
# Bytes of a process in an agreement, beside 16 for each GPU: six numbers, and the frame.
AGREEMENT_BYTES = 72
# Published, in microseconds:
# A kernel that does nothing, "with recent hardware and software": forums.developer.nvidia.com/t/233645.
LAUNCH_US = 3.0
# About 1 for an event, and 1 to 2 for PCIe: github.com/chelsea0x3b/cudarc/pull/335, last comments.
WAIT_US = 3.0
# 5 to 7 for the submission of a small cudaMemcpyAsync: arXiv 2602.21548, section 5.2.
COPY_US = 6.0
# Ring all-reduce of 8 to 128 bytes on a DGX-A100, 2 hops on 2 GPUs 10.0, 14 hops on 8 GPUs 33.7:
# github.com/NVIDIA/nccl-tests/issues/123. An all-gather has half as many hops.
HOP_US = (33.7 - 10.0) / 12
BASE_US = 10.0 - 2 * HOP_US
# A hop over the network, in NCCL's own model of it: hwLat, NET, Ring, LL in github.com/NVIDIA/nccl src/graph/tuning.cc.
NET_HOP_US = 2.7
# The same for a tree: hwLat, NET, Tree, LL; and the part of the bandwidth that protocol LL has there.
TREE_HOP_US = 5.0
TREE_BANDWIDTH = 1 / 3.8
# The memory of an A100 with 40 GB, in GB/s: NVIDIA's data sheet.
MEMORY_GB = 1555.0
# A channel's bandwidth within a machine, same place: perChMaxRingLL128Bws of Ampere, in GB/s.
CHANNEL_GB = 20.0


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    env = _results.environment(["benchmarks/scaling.py", *arguments])
    nets = {f"PSPNet-ResNet{depth}": layers_of(depth) for depth in (50, 101)}
    costs = {name: [step_cost(layers, count, options) for count in PROCESSES] for name, layers in nets.items()}
    header = ["processes", *[f"{name}, ms ({len(layers)} layers)" for name, layers in nets.items()], "of a step"]
    rows = []
    for i, count in enumerate(PROCESSES):
        shares = " / ".join(f"{costs[name][i] * 1e5 / options.step_ms:.1f} %" for name in nets)
        rows.append([str(count), *[f"{costs[name][i] * 1e3:.1f}" for name in nets], shares])
    table = _results.table(header, rows)
    of_gpus = {
        name: {
            **{way: [gpu_cost(layers, count, way, options) for count in GPUS] for way in WAYS},
            EACH: [of_each_gpu_cost(layers, count, options) for count in GPUS],
        }
        for name, layers in nets.items()
    }
    gpu_text = describe_gpus(of_gpus, options)
    print(table, gpu_text, sep="\n\n")
    text = (
        f"A model: {options.message_us:.0f} us per message, {options.latency_us:.0f} us latency, "
        f"{options.bandwidth_gbit:.0f} Gbit/s, a step of {options.step_ms:.0f} ms. Milliseconds per step that the "
        f"statistics spend between processes, and their share of the step. The message is measured "
        f"(benchmarks/exchange.py), or given; everything else is reckoned.\n\n{table}\n\n{gpu_text}"
    )
    cells = {"processes": costs, "gpus": of_gpus}
    _results.write(options.out, "scaling", "Expected cost over many processes and GPUs", text, env, cells)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--message-us",
        type=float,
        help="by default what benchmarks/exchange.py measured, halved: "
        "an exchange of two processes sends and receives one message",
    )
    parser.add_argument(
        "--memory-us", type=float, help="of 8 KiB between two processes in memory; by default what was measured, too"
    )
    parser.add_argument("--latency-us", type=float, default=20, help="of the network, one way (20: 10 GbE)")
    parser.add_argument("--bandwidth-gbit", type=float, default=10)
    parser.add_argument("--gpus-per-machine", type=int, default=8)
    parser.add_argument("--gpu-bandwidth-gbit", type=float, default=100, help="between machines of GPUs")
    parser.add_argument("--images-per-gpu", type=int, default=4, help="of 480 x 480, in float32")
    parser.add_argument("--step-ms", type=float, default=800, help="time of a training step without synchronisation")
    parser.add_argument("--out", type=Path, default=_measuring.RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.message_us is None:
        options.message_us = measured(options.out, 1024, "ours over TCP") / 2
    if options.memory_us is None:
        options.memory_us = measured(options.out, 8192, "ours")
    for name in (
        "message_us",
        "memory_us",
        "latency_us",
        "bandwidth_gbit",
        "gpus_per_machine",
        "gpu_bandwidth_gbit",
        "images_per_gpu",
        "step_ms",
    ):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} was given, expected a number above 0")
    return options


def measured(out: Path, size: int, way: str) -> float:
    """The median exchange of so many bytes between two processes, in microseconds."""
    for folder in (out, _measuring.RESULTS):
        path = folder / "exchange.json"
        if path.exists():
            cells = json.loads(path.read_text())["cells"]["sizes"]
            taken = next(c["microseconds"] for c in cells if (c["bytes"], c["processes"]) == (size, 2))
            return taken[way]["median"]
    raise SystemExit("no measured exchange: run benchmarks/exchange.py first, or give --message-us and --memory-us")


def layers_of(depth: int) -> List[Tuple[int, int]]:
    """Channels, and bytes of x for an image, of every normalisation layer of GluonCV's PSPNet."""
    import gluoncv
    import mxnet as mx

    net = gluoncv.model_zoo.get_psp(dataset="ade20k", backbone=f"resnet{depth}", pretrained_base=False)
    values = mx.sym.Group(list(net(mx.sym.var("data")))).get_internals()
    _, shapes, _ = values.infer_shape(data=(1, 3, 480, 480))
    of_layers = [s for name, s in zip(values.list_outputs(), shapes) if re.search(r"batchnorm\d+_fwd_output$", name)]
    return [(shape[1], 4 * math.prod(shape)) for shape in of_layers]


def step_cost(layers: Sequence[Tuple[int, int]], processes: int, options: argparse.Namespace) -> float:
    """Seconds of one training step that the exchanges take."""
    return sum(exchange_cost(8 * length, processes, options) for c, _ in layers for length in (1 + 2 * c, 2 * c))


def exchange_cost(size: int, processes: int, options: argparse.Namespace) -> float:
    message, latency = options.message_us * 1e-6, options.latency_us * 1e-6
    transfer = size * 8 / (options.bandwidth_gbit * 1e9)
    if processes > FEW:
        whole = math.floor(math.log2(processes))
        return (whole + 2 * (processes > 1 << whole)) * (message + latency + transfer)
    return latency + (processes - 1) * (message + transfer)


def gpu_cost(layers: Sequence[Tuple[int, int]], gpus: int, way: str, options: argparse.Namespace) -> float:
    """Seconds of one training step, with a process for each machine."""
    machines = math.ceil(gpus / options.gpus_per_machine)
    counted = WAYS[way]
    operations = counted["launches"] * LAUNCH_US + counted["waits"] * WAIT_US + counted["copies"] * COPY_US
    seconds, adds = 0.0, way == "NCCL" and gpus >= ALL_REDUCE_FROM
    for (c, size), reads in ((layer, reads) for layer in layers for reads in (1, 2)):
        gathered, added = (1 + 2 * c, 1 + 4 * c) if reads == 1 else (2 * c, 2 * c)
        more = MORE_LAUNCHES * LAUNCH_US if adds and added > gathered else 0
        seconds += (operations + more) * 1e-6
        if way != "NCCL":
            seconds += exchange_cost(8 * gathered, machines, options) if machines > 1 else 0
            continue
        cost, length = (all_reduce_cost, added) if adds else (all_gather_cost, gathered)
        hidden = reads * size * options.images_per_gpu / (MEMORY_GB * 1e9)
        seconds += cost(8 * length, gpus, machines, options) + max(0.0, agreement_cost(machines, options) - hidden)
    return seconds


def all_gather_cost(size: int, gpus: int, machines: int, options: argparse.Namespace) -> float:
    """Of NCCL's ring: each GPU's part passes all others."""
    if gpus == 1:
        return 0.0
    bandwidth = CHANNEL_GB * 1e9 if machines == 1 else options.gpu_bandwidth_gbit * 1e9 / 8
    hops = (gpus - machines) * HOP_US + (machines - 1) * NET_HOP_US
    return (BASE_US + hops) * 1e-6 + (gpus - 1) * size / bandwidth


def all_reduce_cost(size: int, gpus: int, machines: int, options: argparse.Namespace) -> float:
    """Of NCCL's tree: up and down a chain within each machine, and a tree between them."""
    if gpus == 1:
        return 0.0
    bandwidth = CHANNEL_GB * 1e9 if machines == 1 else options.gpu_bandwidth_gbit * 1e9 / 8
    within = math.ceil(gpus / machines) - 1
    hops = within * HOP_US + math.ceil(math.log2(machines)) * TREE_HOP_US
    return (BASE_US + 2 * hops) * 1e-6 + 2 * size / (bandwidth * TREE_BANDWIDTH)


def agreement_cost(processes: int, options: argparse.Namespace) -> float:
    """Of the all-gather over the host that says which collective is next."""
    message, latency = options.message_us * 1e-6, options.latency_us * 1e-6
    own = AGREEMENT_BYTES + 16 * options.gpus_per_machine
    transfer = (processes - 1) * own * 8 / (options.bandwidth_gbit * 1e9)
    if processes > FEW:
        return math.ceil(math.log2(processes)) * (message + latency) + transfer
    return latency + (processes - 1) * message + transfer if processes > 1 else 0.0


def of_each_gpu_cost(layers: Sequence[Tuple[int, int]], gpus: int, options: argparse.Namespace) -> float:
    """Seconds of one training step over the host, with a process for each GPU.

    The processes of a machine meet in memory, and one of them, the leader, sends for all.
    """
    machines, within = math.ceil(gpus / options.gpus_per_machine), min(gpus, options.gpus_per_machine)
    seconds = gpu_cost(layers, 1, "host, a process for each machine", options)
    for length in (8 * n for c, _ in layers for n in (1 + 2 * c, 2 * c)):
        meeting = math.ceil(math.log2(within)) * options.memory_us * 1e-6
        seconds += meeting if machines == 1 else 2 * meeting + exchange_cost(length, machines, options)
    return seconds


def describe_gpus(costs: Dict[str, Dict[str, List[float]]], options: argparse.Namespace) -> str:
    name, ways = next(iter(costs.items()))
    rows = []
    for i, gpus in enumerate(GPUS):
        shares = [f"{seconds[i] * 1e3:.1f} ({seconds[i] * 1e3 / options.step_ms:.1%})" for seconds in ways.values()]
        rows.append([str(gpus), str(math.ceil(gpus / options.gpus_per_machine)), *shares])
    header = ["GPUs", "machines", *[f"{way}, ms (of a step)" for way in ways]]
    messages = f"messages {options.latency_us:.0f} us, {options.bandwidth_gbit:.0f} Gbit/s"
    asked = "NCCL 2 launches, 1 wait, 1 collective; the host 2 launches, 3 waits, 2 copies"
    tuning = "NVIDIA/nccl, src/graph/tuning.cc"
    figures = [
        ["asked of a GPU, by layer and direction", asked, "counted on the emulator", "docs/architecture.md"],
        ["message", f"{options.message_us:.0f} us", "measured, or given", "exchange.md"],
        ["exchange of two processes in memory", f"{options.memory_us:.0f} us", "measured, or given", "exchange.md"],
        ["of more processes in memory", "that, times log2 of their number", "assumed", ""],
        ["launch, wait, copy", f"{LAUNCH_US:.0f}, {WAIT_US:.0f}, {COPY_US:.0f} us", "published", "scaling.py"],
        ["memory of a GPU", f"{MEMORY_GB:.0f} GB/s", "published", "NVIDIA's data sheet of the A100"],
        ["NCCL: start, hop in a machine", f"{BASE_US:.1f}, {HOP_US:.1f} us", "published", "NVIDIA/nccl-tests#123"],
        ["NCCL: hop between machines, ring and tree", f"{NET_HOP_US}, {TREE_HOP_US} us", "published", tuning],
        ["NCCL: bandwidth of a tree", f"{TREE_BANDWIDTH:.2f} of the network's", "published", tuning],
        ["network", f"{options.gpu_bandwidth_gbit:.0f} Gbit/s; {messages}", "assumed", "options"],
    ]
    return (
        f"## GPUs\n\n{name}. **Every time in this table is reckoned**: what is asked of a GPU, times what that takes "
        "according to others. Within a machine, NCCL is what this package does for one process. Between machines, "
        "NCCL would need an agreement over the host for each collective, and the package goes over the host instead. "
        f"From {ALL_REDUCE_FROM} GPUs on NCCL is reckoned with an all-reduce.\n\n"
        f"{_results.table(header, rows)}\n\n"
        f"What it rests on:\n\n{_results.table(['figure', 'value', 'is', 'source'], figures)}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
