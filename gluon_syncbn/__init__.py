"""Provides synchronised BatchNorm for MXNet Gluon: statistics of the whole batch, over all devices.

Layers
    SyncBatchNorm                     replaces nn.BatchNorm, with the statistics of all devices
    SyncBatchNormAdd                  adds a second input, then applies an activation
    ShuffleBatchNorm                  SyncBatchNorm with mode='shuffle'
    symbol.SyncBatchNorm              the layer in a symbol, for Module

Finished nets
    convert                           makes the BatchNorm layers of a net synchronised, or fused
    revert                            makes them plain again
    freeze                            lets layers use their running statistics
    summary                           prints which layers are synchronised, and why others are not
    assert_synchronised               raises an error if one is not; also assert_synchronized
    recompute                         drops activations, and computes them again in the backward

Training
    cpu_devices                       CPU contexts to train on
    only_on                           names the devices of a short batch
    configure                         sets defaults: KVStore, timeout, seed, what a NaN does
    reset                             ends a step that failed
    StepError                         what a failed step raises
    average_running_stats             gives all devices one mean of their running statistics
    update_bn_stats                   computes running statistics anew from given batches

Processes
    kvstore                           the KVStore of a job of several processes
    broadcast_parameters              sends the parameters of one process to all
    join                              lets processes have different numbers of batches

Scripts as they are
    install                           replaces contrib's layer and GluonCV's helpers by ours
    uninstall                         puts them back

Contrastive training
    contrastive.gather                brings the rows of all devices to each, with gradients
    contrastive.SampleShuffle         draws which device computes which key
    contrastive.split_and_load        splits a batch over devices, shuffled
    contrastive.shuffle_shards        shuffles a batch that lies on devices already
    contrastive.ShuffledBatch         what these two return
    contrastive.ShuffleSampler        gives each process the samples whose keys it computes

GluonCV's helpers
    parallel.DataParallelModel        a net on several devices
    parallel.DataParallelCriterion    a loss on several devices
    parallel.parallel_apply           calls a net on each device
    parallel.criterion_parallel_apply calls a loss on each device
    parallel.parallel_backward        runs the backward of all losses
"""

import sys as _sys

from .mxnet_side import compatibility as _compatibility
from .system import cuda_libraries as _cuda_libraries
from .system import distribution as _distribution
from .system.distribution import __version__

# These errors name the package, as that for a missing module does. `python -m gluon_syncbn` prints the text alone then.
try:
    _compatibility.supply()
    _cuda_libraries.load()
    import mxnet as _mxnet
except ImportError as error:
    if error.name == _cuda_libraries.__package__:  # a missing CUDA library
        raise
    raise ImportError(f"gluon_syncbn needs Apache MXNet 1.9 ({error}): {_distribution.MXNET}", name=__name__) from (
        None if error.name == "mxnet" else error
    )
except OSError as error:
    if str(error).startswith(("libarmpl_lp64_mp.", "libamath.", "libastring.")):
        remedy = "its wheel for ARM64 lacks Arm Performance Libraries; link libopenblas0 and liblapacke in their place"
    elif str(error).startswith(("libgomp.", "libquadmath.")):  # a bare system has neither, and MXNet does not ask for
        remedy = "`apt-get install libgomp1 libquadmath0`, or `dnf install libgomp libquadmath`"
    else:
        raise
    raise ImportError(f"MXNet 1.9 cannot be loaded ({error}): {remedy}", name=__name__) from None
except AttributeError as error:
    if not str(error).startswith(("module 'numpy", "`np.")):  # as where a file beside the script is called logging.py
        raise
    # NumPy has lost more names than this package supplies. What pip finds for each Python, as in pyproject.toml.
    serves = "<1.24" if _sys.version_info < (3, 12) else f"=={_compatibility.TRIED}.*"
    raise ImportError(
        f"MXNet 1.9 cannot be imported ({error}): with this Python it was tried with `pip install 'numpy{serves}'`",
        name=__name__,
    ) from error

if tuple(map(int, _mxnet.__version__.split(".")[:2])) < (1, 8):
    raise ImportError(
        f"gluon_syncbn needs Apache MXNet 1.9, or 1.8, and this is {_mxnet.__version__}: {_distribution.MXNET}",
        name=__name__,
    )

import functools as _functools
import typing as _typing
import warnings as _warnings

from . import contrastive, parallel, symbol
from ._native import StepError
from .command.replacements import install, uninstall
from .layer import ShuffleBatchNorm, SyncBatchNorm, SyncBatchNormAdd
from .mxnet_side import lifetime as _lifetime
from .mxnet_side import patches as _patches
from .mxnet_side import recording as _recording
from .mxnet_side import trainer as _trainer
from .nets import executors as _executors
from .nets.convert import convert, revert
from .nets.freezing import freeze
from .nets.parameters import broadcast_parameters
from .nets.recompute import recompute
from .nets.statistics import average_running_stats, update_bn_stats
from .nets.summary import assert_synchronised, summary
from .nets.summary import assert_synchronised as assert_synchronized
from .training import steps as _steps
from .training.devices import cpu_devices, only_on
from .training.join import join
from .training.session import configure, kvstore
from .training.steps import reset

_lifetime.begin()
_patches.install(_steps.WRAPPED, _trainer.WRAPPED, _recording.WRAPPED, _executors.WRAPPED)
for _module in (contrastive, parallel, symbol):  # `dir` shows their public names alone
    vars(_module)["__dir__"] = _functools.partial(list, _module.__all__)

__all__ = [
    "ShuffleBatchNorm",
    "StepError",
    "SyncBatchNorm",
    "SyncBatchNormAdd",
    "__version__",
    "assert_synchronised",
    "assert_synchronized",
    "average_running_stats",
    "broadcast_parameters",
    "configure",
    "contrastive",
    "convert",
    "cpu_devices",
    "freeze",
    "install",
    "join",
    "kvstore",
    "only_on",
    "parallel",
    "recompute",
    "reset",
    "revert",
    "summary",
    "symbol",
    "uninstall",
    "update_bn_stats",
]


_RENAMED = {"checkpoint": "recompute", "devices": "only_on"}  # for one release


def __dir__() -> _typing.List[str]:
    return __all__


if not _typing.TYPE_CHECKING:  # a checker would take every name for one of the module

    def __getattr__(name: str) -> _typing.Any:
        if name in _RENAMED:
            _warnings.warn(f"{__name__}.{name} is {__name__}.{_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
            return globals()[_RENAMED[name]]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
