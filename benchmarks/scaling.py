"""What synchronising over many processes would cost: a model, not a measurement.

From the cost of a message (measured by benchmarks/exchange.py), and the latency and bandwidth of the network that you
mean to rent, the time that a segmentation network's statistics spend between processes in one training step.

    python benchmarks/scaling.py --latency-us 20 --bandwidth-gbit 25 --step-ms 800

The model: every layer sends ``1 + 2C`` float64 in the forward and ``2C`` in the backward, one after the other, and
nothing hides them. Up to 8 processes send to each other; more add up along a tree, twice log2(P) messages deep; vectors
above 256 KiB are added in parts. A message costs ``message + latency + bytes / bandwidth``.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Dict, List, Sequence

import _measuring
import _results

PROCESSES = [8, 16, 32, 64, 128, 256, 512, 1024]
FEW, SMALL = 8, 1 << 18  # as in src/gluon_syncbn/exchange/mpi.py


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    env = _results.environment(["benchmarks/scaling.py", *arguments])
    nets = {f"PSPNet-ResNet{depth}": channels_of(depth) for depth in (50, 101)}
    costs = {name: [step_cost(channels, count, options) for count in PROCESSES] for name, channels in nets.items()}
    header = ["processes", *[f"{name}, ms ({len(channels)} layers)" for name, channels in nets.items()], "of a step"]
    rows = []
    for i, count in enumerate(PROCESSES):
        shares = " / ".join(f"{costs[name][i] * 1e5 / options.step_ms:.1f} %" for name in nets)
        rows.append([str(count), *[f"{costs[name][i] * 1e3:.1f}" for name in nets], shares])
    table = _results.table(header, rows)
    print(table)
    text = (
        f"A model: {options.message_us:.0f} us per message, {options.latency_us:.0f} us latency, "
        f"{options.bandwidth_gbit:.0f} Gbit/s, a step of {options.step_ms:.0f} ms. Milliseconds per step that the "
        f"statistics spend between processes, and their share of the step. Not measured.\n\n{table}"
    )
    _results.write(options.out, "scaling", "Expected cost over many processes", text, env, costs)
    plot(options.out / "scaling.png", costs, options)
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
    """The median exchange of 1 KiB between two processes, in microseconds."""
    for folder in (out, _measuring.RESULTS):
        path = folder / "exchange.json"
        if path.exists():
            cells = json.loads(path.read_text())["cells"]["sizes"]
            taken = next(c["microseconds"] for c in cells if (c["bytes"], c["processes"]) == (1024, 2))
            return taken["ours"]["median"]
    raise SystemExit("no measured cost of a message: run benchmarks/exchange.py first, or give --message-us")


def channels_of(depth: int) -> List[int]:
    """Channels of every normalisation layer of GluonCV's PSPNet."""
    import gluoncv
    from mxnet.gluon import nn

    net = gluoncv.model_zoo.get_psp(dataset="ade20k", backbone=f"resnet{depth}", pretrained_base=False)
    sizes: List[int] = []
    net.apply(lambda block: sizes.append(block.gamma.shape[0]) if isinstance(block, nn.BatchNorm) else None)
    return sizes


def step_cost(channels: Sequence[int], processes: int, options: argparse.Namespace) -> float:
    """Seconds of one training step that the exchanges take."""
    return sum(exchange_cost(8 * length, processes, options) for c in channels for length in (1 + 2 * c, 2 * c))


def exchange_cost(size: int, processes: int, options: argparse.Namespace) -> float:
    message, latency = options.message_us * 1e-6, options.latency_us * 1e-6
    transfer = size * 8 / (options.bandwidth_gbit * 1e9)
    if size > SMALL:
        return 2 * (latency + (processes - 1) * (message + transfer / processes))
    if processes > FEW:
        return 2 * math.ceil(math.log2(processes)) * (message + latency + transfer)
    return latency + (processes - 1) * (message + transfer)


def plot(path: Path, costs: Dict[str, List[float]], options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    for (name, seconds), colour in zip(costs.items(), ("#0072B2", "#D55E00")):
        axis.plot(PROCESSES, [100 * s / (options.step_ms * 1e-3) for s in seconds], "o-", color=colour, label=name)
    axis.set(
        xscale="log",
        xlabel="processes",
        ylabel=f"exchange of statistics,\n% of a step of {options.step_ms:.0f} ms",
        ylim=(0, None),
    )
    axis.set_xticks(PROCESSES)
    axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    axis.set_title(
        f"Expected, not measured: {options.message_us:.0f} us per message, {options.latency_us:.0f} us latency, "
        f"{options.bandwidth_gbit:.0f} Gbit/s",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
