"""Checkpoints: one file holds everything, and is replaced in one step.

A checkpoint is an uncompressed zip archive of

    model.params    the network, as Block.save_parameters writes it (any Gluon program loads it after `unzip`)
    devices.params  running statistics of each device, if they differ (plain BatchNorm on several devices)
    trainer.states  the optimizer: momentum, number of updates, learning rate schedule
    state.json      options, position, history and random state

Parameters and optimizer state are replaced together, so they always match. The archive's checksums reveal a
truncated file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import zipfile

import mxnet as mx
from errors import UserError
from processes import ALONE

FORMAT = 1
RUNNING = ("running_mean", "running_var")


class Checkpoint:
    """The content of a checkpoint file: arrays by structural name. A .params file has nothing else."""

    def __init__(self, path, arrays, devices=None, trainer_states=None, state=None):
        self.path = path
        self.arrays = arrays
        self.devices = devices or {}
        self.trainer_states = trainer_states
        self.state = state


def replace_file(path: str, write) -> None:
    """Call write(temporary name), then replace `path` with the result, durably and in one step."""
    # The name tells `remove_strays` which process owns the file.
    temporary = f"{path}.{os.uname().nodename}-{os.getpid()}.tmp"
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the new name durable
        finally:
            os.close(folder)
    except OSError as error:  # such as a full disk, or no permission
        raise UserError(f"{path}: cannot be written ({error}); an earlier one is unchanged") from None


def remove_strays(folder: str) -> None:
    """Remove temporary files of `replace_file` from a folder, if killed processes of this machine have left them."""
    for name in os.listdir(folder):
        found = re.fullmatch(rf".+\.{re.escape(os.uname().nodename)}-(\d+)\.tmp", name)
        if found and not _lives(int(found[1])):
            with contextlib.suppress(FileNotFoundError):  # another run has removed it at the same time
                os.remove(os.path.join(folder, name))


def _lives(pid: int) -> bool:
    """Whether another process has this id."""
    if pid == os.getpid():
        return False  # this process has the id of a killed one
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True


def net_arrays(net, processes=ALONE) -> tuple:
    """Returns (arrays, devices): a value for each parameter, and the running statistics that differ by device.

    If devices have statistics of their own, the network's statistics are their mean, as Gluon saves them. Weights are
    the same everywhere. The first device's weights keep every bit, but a mean over three devices would not.
    All processes call this function. `devices` covers the devices of all processes.
    """
    # A static graph's operators do not tell MXNet's engine that they write the running statistics. Without waitall, a
    # read does not wait for the last step. With FastSCNN on 2 devices, 21 to 40 of 45 statistics were one step old.
    mx.nd.waitall()
    arrays, devices = {}, {}
    for name, parameter in net._collect_params_with_prefix().items():
        values = [value.as_in_context(mx.cpu()) for value in parameter.list_data()]
        arrays[name] = values[0]
        if name.rsplit(".", 1)[-1] in RUNNING:
            values = _of_all(values, processes)
            bits = {value.asnumpy().tobytes() for value in values}
            if len(bits) > 1:
                arrays[name] = mx.nd.add_n(*values) / len(values)
                devices.update({f"{name}@{i}": value for i, value in enumerate(values)})
    return arrays, devices


def _of_all(values: list, processes) -> list:
    if processes.size == 1:
        return values
    everyone = processes.gather([value.asnumpy() for value in values])  # process, device, channel
    return [mx.nd.array(value, dtype=values[0].dtype) for value in everyone.reshape(-1, *values[0].shape)]


def set_arrays(net, arrays: dict, devices: dict | None = None) -> None:
    """Set the parameters of a network to the values of `net_arrays`."""
    for name, parameter in net._collect_params_with_prefix().items():
        parameter.set_data(arrays[name])
    set_devices(net, devices or {})


def set_devices(net, devices: dict, first: int = 0) -> None:
    """Restore the running statistics of each device. first: the number of this process's first device."""
    for name, parameter in net._collect_params_with_prefix().items():
        for i, context in enumerate(parameter.list_ctx(), first):
            if f"{name}@{i}" in devices:
                parameter.data(context)[:] = devices[f"{name}@{i}"]


def save_checkpoint(paths, net, trainer, state: dict, processes=ALONE) -> None:
    """Write the same checkpoint to each of `paths`. All processes call this function, and the first one writes."""
    arrays, devices = net_arrays(net, processes)
    if processes.rank:
        return
    with tempfile.TemporaryDirectory() as folder:  # MXNet writes to named files only
        members = {name: os.path.join(folder, name) for name in ("model.params", "trainer.states")}
        mx.nd.save(members["model.params"], arrays)
        trainer.save_states(members["trainer.states"])
        if devices:
            members["devices.params"] = os.path.join(folder, "devices.params")
            mx.nd.save(members["devices.params"], devices)

        def write(name):
            with zipfile.ZipFile(name, "w") as archive:
                for member, file in members.items():
                    archive.write(file, member)
                archive.writestr("state.json", json.dumps({"format": FORMAT, **state}))

        for path in paths:
            replace_file(path, write)


def load_checkpoint(path: str) -> Checkpoint:
    """Read a checkpoint, or a bare .params file. A UserError names the fault of the file."""
    if not os.path.isfile(path):
        raise UserError(f"--resume {path}: no such file")
    if not zipfile.is_zipfile(path):
        if path.endswith(".params"):
            return Checkpoint(path, _load_arrays(path, path))
        raise UserError(f"--resume {path}: neither a checkpoint nor a .params file, or truncated")
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
            archive.extractall(folder)  # compares the checksums
            state = json.loads(archive.read("state.json"))
            if state.get("format") != FORMAT:
                raise UserError(f"--resume {path}: format {state.get('format')}, expected {FORMAT}")
            arrays = _load_arrays(os.path.join(folder, "model.params"), path)
            devices = os.path.join(folder, "devices.params")
            return Checkpoint(
                path,
                arrays,
                _load_arrays(devices, path) if os.path.exists(devices) else {},
                archive.read("trainer.states"),
                state,
            )
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
        raise UserError(f"--resume {path}: damaged or truncated checkpoint ({error})") from None


def _load_arrays(file: str, path: str) -> dict:
    try:
        arrays = mx.nd.load(file)
    except mx.MXNetError:
        raise UserError(f"--resume {path}: damaged or truncated parameters") from None
    if not isinstance(arrays, dict):
        raise UserError(f"--resume {path}: parameters without names; expected Block.save_parameters' format")
    return arrays


def check_arrays(net, checkpoint: Checkpoint, described: str) -> None:
    """Raise a UserError unless the checkpoint has exactly the parameters of this network."""
    mine = {name: p.shape for name, p in net._collect_params_with_prefix().items()}
    theirs = {name: array.shape for name, array in checkpoint.arrays.items()}
    if mine == theirs:
        return
    name = sorted(set(mine.items()) ^ set(theirs.items()))[0][0]
    raise UserError(
        f"--resume {checkpoint.path}: not the parameters of {described}: "
        f"{name} is {theirs.get(name, 'absent')} there and {mine.get(name, 'absent')} in the network"
    )


def load_trainer(trainer, checkpoint: Checkpoint, contexts) -> None:
    """Restore the optimizer state of the trainer, for these contexts."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trainer.states")
        with open(file, "wb") as out:
            out.write(checkpoint.trainer_states)
        trainer.load_states(file)
    if not trainer._update_on_kvstore:
        # MXNet counts the updates of each device. A device that the saved run did not have would start at 0. Adam would
        # then take another step there than on the other devices.
        counts = trainer._optimizer._all_index_update_counts
        for context in contexts:
            counts.setdefault(context.device_id, dict(next(iter(counts.values()))))
