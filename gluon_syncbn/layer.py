"""Defines SyncBatchNorm, the layer, and its variants with an addition and with shuffled statistics."""

from __future__ import annotations

import functools
import numbers
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Literal, Optional, Sequence, TypeVar

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, nn
from mxnet.gluon.parameter import Parameter

from .exchange import named
from .mxnet_side import export, op, patches
from .mxnet_side.blocks import PARAMETERS
from .settings import MODES, Mode, Settings
from .system import arguments, kinds
from .training.replicas import EAGER, Replicas, follow, followers_of, for_replica, records, setting, traced, unfollow
from .training.session import session

Constructor = TypeVar("Constructor", bound=Callable[..., None])


#: Arguments of other layers, most of PyTorch's, and what does the same here.
_INSTEAD = {
    "num_features": "in_channels, as nn.BatchNorm calls it",
    "eps": "epsilon, as nn.BatchNorm calls it",
    "affine": "scale and center, as nn.BatchNorm calls it",
    "process_group": "group_size or groups",
    "track_running_stats": "nothing, because a layer always has running statistics",
    "inplace": "nothing; gluon_syncbn.recompute(block) saves more memory, for any part of a net",
}


def _knows_other_layers(construct: Constructor) -> Constructor:
    """Refuses their names. The first positions are ``(axis, momentum)``, in contrib's ``(in_channels, num_devices)``.

    3 is the channel axis of NHWC here, and three channels there. With axis 1, both readings normalise alike. A momentum
    with a fraction, or in_channels by name, shows that the caller means nn.BatchNorm.
    """

    @functools.wraps(construct)
    def checking(layer: Any, *given: Any, **named: Any) -> None:
        for name in _INSTEAD.keys() & named.keys():
            arguments.refuse(name, named[name], _INSTEAD[name])
        values = given[:2]
        whole = all(arguments.is_a(numbers.Integral, value) and value >= 0 for value in values)
        if values and whole and values != (1,) and "in_channels" not in named:
            here, there = (
                ", ".join(f"{key}={value}" for key, value in zip(names, values))
                for names in (("axis", "momentum"), ("in_channels", "num_devices"))
            )
            warnings.warn(
                f"{type(layer).__name__}({', '.join(map(str, values))}) means {here} here, as in nn.BatchNorm, and "
                f"{there} in contrib's layer: write it by name",
                stacklevel=2,
            )
        construct(layer, *given, **named)

    return checking  # type: ignore[return-value]


class SyncBatchNorm(nn.BatchNorm):
    r"""Batch normalisation over the batch of all devices.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \gamma + \beta

    Mean and (biased) variance of each channel are taken over all values of that channel on all devices. N devices with
    this layer compute the same as one device with ``nn.BatchNorm`` on the concatenated batch. This holds for the
    output, the gradients of input, gamma and beta, and the running statistics. The gradient goes through mean and
    variance:

    .. math:: dx = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}
                   \left(dy - \overline{dy} - \hat{x} \cdot \overline{dy \cdot \hat{x}}\right)

    with means over all devices. Each device has its own part of dgamma and dbeta, and ``gluon.Trainer`` adds the parts.

    ::

        import gluon_syncbn
        import mxnet as mx
        from mxnet import autograd, gluon

        contexts = [mx.cpu(0), mx.cpu(1)]
        layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
        layer.initialize(ctx=contexts)
        with autograd.record():  # call all devices before you read a result
            ys = [layer(x) for x in gluon.utils.split_and_load(mx.nd.random.normal(shape=(6, 3, 8, 8)), contexts)]

    In training, the forward sets ``running = momentum * running + (1 - momentum) * batch``, the same on every device.
    The variance is biased unless ``running_variance`` says otherwise. (MXNet's BatchNorm updates in the backward on a
    CPU, and takes the unbiased variance on a GPU.) One device, predict mode and ``use_global_stats`` wait for no other
    replica.

    A device holds ``virtual_devices`` *slots*. Each slot is a contiguous part of the mini-batch, cut as
    ``numpy.array_split`` does. ``mode`` selects the statistics that normalise a slot:

    ``'sync'``
        The statistics of all slots together, or of the slots in a group of devices (``group_size``, ``groups``).
    ``'local'``
        The slot's own statistics: N devices compute plain BatchNorm on N * V devices. No replica waits for another.
    ``'shuffle'``
        The statistics of another slot, by a random permutation without fixed points. Each call draws a new one from
        `configure`'s seed, the layer and the number of its call. The gradient through a slot's statistics goes back to
        that slot.

    With a mask, mean and variance are those of the n positions where it is not 0. They normalise all positions. With
    m = 1 at these positions and 0 elsewhere, and sums over all positions of all devices:

    .. math:: dx = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}
                   \left(dy - \frac{m}{n} \left(\sum dy + \hat{x} \sum dy \cdot \hat{x}\right)\right)

    A slot of which no position counts adds nothing to any statistic. Where no other slot shares a statistic with it,
    its xhat is 0. Predictions ignore the mask, and it gets no gradient.

    In ``'local'`` and ``'shuffle'`` each device's running statistics take the mean over its own slots' statistics. A
    slot without a sample takes no part.

    Parameters
    ----------
    axis : int
        The channel axis: 1 for NCHW, -1 for NHWC.
    momentum : float
        From 0 to 1: the weight of the old running statistics.
    epsilon : float
        At least 0.
    center, scale, use_global_stats : bool
        As in ``nn.BatchNorm``. Without ``scale``, gamma counts as 1. Without ``center``, beta gets no gradient.
    beta_initializer, gamma_initializer, running_mean_initializer, running_variance_initializer
        As in ``nn.BatchNorm``.
    in_channels : int
        0 takes it from the first batch.
    num_devices : int, optional
        Number of replicas, which is the number of contexts of the parameters. The layer finds it, and needs it only
        to check yours.
    activation : str, optional
        An activation, computed in the same passes over memory. ``'relu6'`` is ``'relu'`` up to 6. ``'leaky'`` is y
        where y > 0, else slope * y. The layer keeps no more memory, because the backward recomputes it from x.
    slope : float
        The slope of ``'leaky'``: above 0 and below 1, in float32 too.
    mode : str
        ``'sync'``, ``'local'`` or ``'shuffle'``.
    virtual_devices : int
        Number of slots on each device. It changes nothing in ``'sync'``.
    group_size : int, optional
        Number of devices, consecutive in the layer's contexts, that share a statistic in ``'sync'``: a divisor of the
        number of all, which is the default.
    groups : list of lists of int, optional
        Instead of ``group_size``, the ranks of the replicas in each group, as in ``[[0, 2], [1, 3]]``. In one process,
        the rank of a replica is the index of its context; they go on from one process to the next. Each replica of the
        job is in one group, and takes part in every step.
    running_variance : str
        The variance that the running variance averages. ``'biased'`` is the variance that normalises. ``'unbiased'``
        multiplies it by n / (n - 1) for the n > 1 values of a channel, as cuDNN's BatchNorm and PyTorch do.
    kvstore : str or KVStore, optional
        The exchange that adds the statistics: ``'nccl'``, ``'host'``, ``'device'``, ``'local'``, a KVStore object, or a
        store of `gluon_syncbn.kvstore` or its name. By default the setting of `configure`, which explains each.
    timeout : float, optional
        Seconds to wait for the other replicas. By default the setting of `configure`, which starts as 300.

    Attributes
    ----------
    mode, virtual_devices, group_size, groups, num_devices, timeout, activation, slope, running_variance
        As given. Without ``'leaky'``, ``slope`` is None.
    kvstore
        The name of the KVStore that was given, or None.

    Inputs
        - **data**: of ``mx.nd`` or ``mx.np``, 2 to 5 dimensions; float16 or, on CPUs, bfloat16 (with float32
          parameters), float32 or float64. Shards of a batch may differ in size.
        - **mask** (optional): any type of number; a value that is not 0 counts. The extents are those of the data, with
          1 along the channel axis or without that axis. Any of them may be 1, which repeats.

    Outputs
        - **out**: kind, shape and type of the data.

    Raises
    ------
    ValueError
        At construction, if an argument is out of range, or ``groups`` names a rank twice or leaves one out. In a
        training call, if ``group_size`` does not divide the number of devices, or ``groups`` names other replicas. Also
        there, if the parameters are twice on a context, ``num_devices`` is not the number of contexts, or there are
        fewer than two slots to shuffle. Also if parameters are put on a GPU for which MXNet has no code.
    StepError
        Reading a result raises it if a replica is late or has failed. The text names the layer, who arrived and who is
        missing.
    MXNetError
        A training call raises it for a mask of another shape, or another number of channels.

    Warns
    -----
    UserWarning
        If two positional integers mean one thing to ``nn.BatchNorm`` and another to contrib's layer.

    References
    ----------
    S. Ioffe, C. Szegedy, "Batch Normalization", ICML 2015. T. Chan, G. Golub, R. LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1979. K. He et al., "Momentum Contrast for Unsupervised Visual
    Representation Learning", CVPR 2020, appendix A.9, on why contrastive training needs other slots' statistics.
    """

    _modes: Sequence[str] = MODES  # that its arguments may choose

    @_knows_other_layers
    def __init__(
        self,
        axis: int = 1,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        in_channels: int = 0,
        num_devices: Optional[int] = None,
        *,
        activation: Optional[Literal["relu", "relu6", "leaky"]] = None,
        slope: float = 0.01,
        mode: Mode = "sync",
        virtual_devices: int = 1,
        group_size: Optional[int] = None,
        groups: Optional[Sequence[Sequence[int]]] = None,
        running_variance: Literal["biased", "unbiased"] = "biased",
        kvstore: Any = None,
        timeout: Optional[float] = None,
        prefix: Optional[str] = None,
        params: Any = None,
    ) -> None:
        given = locals()
        center = arguments.flag("center", center)
        in_channels = arguments.whole("in_channels", in_channels, 0, 2**31 - 1)
        settings = Settings.of_arguments(given, self._modes, adds=isinstance(self, SyncBatchNormAdd))
        settings = replace(settings, exchange=named.exchange(kvstore))
        super().__init__(
            center=center,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=in_channels,
            prefix=prefix,
            params=params,
            **settings.batch_norm(),
        )
        self._origin: Any = None  # class and settings before `convert`
        self._adopt_parameters(settings)

    mode = property(lambda self: self._replicas.settings.mode)
    virtual_devices = property(lambda self: self._replicas.settings.virtual_devices)
    group_size = property(lambda self: self._replicas.settings.group_size)
    groups = property(lambda self: self._replicas.settings.groups)
    num_devices = property(lambda self: self._replicas.settings.num_devices)
    kvstore = property(lambda self: self._replicas.exchange and self._replicas.exchange.name)
    timeout = property(lambda self: self._replicas.settings.timeout)
    activation = property(lambda self: self._activation.arguments()["activation"])
    slope = property(lambda self: self._activation.arguments().get("slope"))
    running_variance = property(lambda self: "unbiased" if self._replicas.settings.unbiased else "biased")

    _activation = property(lambda self: self._replicas.settings.activation)  # as `BatchNormActivation` has it

    def __repr__(self) -> str:
        """Adds those settings to the text of ``nn.BatchNorm`` that a layer need not have."""
        own = "".join(f", {name}={getattr(self, name)!r}" for name in self._replicas.settings.arguments())
        return f"{super().__repr__()[:-1]}{own})"

    def cast(self, dtype: Any) -> None:
        """Casts as ``nn.BatchNorm`` does: for float16 and bfloat16, parameters stay float32."""
        super().cast("float32" if kinds.is_bfloat16(dtype) else dtype)

    def infer_shape(self, *args: Any) -> None:
        settings = self._replicas.settings
        if settings.use_global_stats:
            # The graph of running statistics does not use a mask, and Gluon refuses an input without a use.
            for parameter in self._reg_params.values():
                parameter.shape = (args[0].shape[settings.axis],)
        else:
            with setting(records, []):
                super().infer_shape(*args)

    def _alias(self) -> str:
        return "batchnorm"  # parameters get the names that they have in a net with plain BatchNorm

    def _adopt_parameters(self, settings: Optional[Settings] = None) -> None:
        """Makes the contexts of ``running_mean`` this layer's replicas; by default with the settings as before."""
        self._replicas: Replicas = Replicas(self.name, self._kwargs, settings or self._replicas.settings)
        for one in (self.running_mean, self.running_var):
            self._replicas.running(one)
        patches.replace(_initialising, Parameter, "_init_impl")
        patches.replace(export.of_plain_graph, mx.base._LIB, "MXSymbolRemoveAmpCast")
        follow(self.running_mean, self._replicas)
        if self.running_mean._data is not None:
            _place(self._replicas, self.running_mean)

    def _release_parameters(self) -> None:
        unfollow(self.running_mean, self._replicas)

    def __setstate__(self, state: Any) -> None:
        """For ``copy`` and ``pickle``. A copy has replicas of its own, which do not meet those of the original."""
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        self.__dict__.update(attributes)
        for name, value in slots.items():
            setattr(self, name, value)
        given: Any = self._replicas  # its settings, or the original's in a shallow copy
        self._adopt_parameters(getattr(given, "settings", given))

    def hybrid_forward(
        self, F: Any, x: Any, *given: Any, mask: Any = None, addend: Any = None, **parameters: Any
    ) -> Any:
        """Returns the output as the kind of ``x``, from operators of ``mx.nd`` or ``mx.sym``. In ``given`` is the mask,
        if there is one, and then the parameters without a name, as in ``nn.BatchNorm``.
        """
        unnamed = [name for name in PARAMETERS if name not in parameters]
        if len(given) > len(unnamed):
            mask, *given = given  # type: ignore[assignment]
        parameters.update(zip(unnamed, given))
        if len(given) > len(unnamed) or len(parameters) > len(PARAMETERS):  # perhaps a subclass has misspelt the mask
            unknown = ", ".join(sorted(parameters.keys() - set(PARAMETERS))) or "behind the mask"
            raise TypeError(f"SyncBatchNorm '{self.name}': hybrid_forward has no argument {unknown}")
        replicas, training, eager = self._replicas, autograd.is_training(), F is mx.nd
        settings = replicas.settings
        # MXNet's BatchNorm fails in 5 dimensions behind a convolution ("Check failed: !is_view").
        frozen = settings.use_global_stats or (eager and not training)
        if eager and training:
            replicas.runs(EAGER)
        if not eager:
            traced(self.running_mean, replicas)
        data = [x] if addend is None else [x, addend]
        with session.issuing(mx.current_context()) if eager else nullcontext():  # that of x, by HybridBlock.forward
            y = op.sync_batch_norm(F, replicas, data, [parameters[name] for name in PARAMETERS], mask, frozen)
        return y if type(x) is mx.nd.NDArray else kinds.like(y, x)


class SyncBatchNormAdd(SyncBatchNorm):
    r"""`SyncBatchNorm`, an addition and an activation: the end of a residual block.

    .. math:: y = \mathrm{activation}\left(
                  \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \gamma + \beta + addend\right)

    Parameters
    ----------
    activation : str, optional
        As in `SyncBatchNorm`, but ``'relu'`` by default.
    *args, **kwargs
        Arguments of `SyncBatchNorm`.

    Inputs
        - **data**: as in `SyncBatchNorm`.
        - **addend**: shape and type of the data.
        - **mask** (optional): as in `SyncBatchNorm`.

    Outputs
        - **out**: shape and type of the data.
    """

    if not TYPE_CHECKING:
        __init__ = functools.partialmethod(SyncBatchNorm.__init__, activation="relu")

    def hybrid_forward(  # type: ignore[override]
        self, F: Any, x: Any, addend: Any, *given: Any, **parameters: Any
    ) -> Any:
        return SyncBatchNorm.hybrid_forward(self, F, x, *given, addend=addend, **parameters)


class ShuffleBatchNorm(SyncBatchNorm):
    """`SyncBatchNorm` with ``mode='shuffle'``, to be passed as ``norm_layer=``. All other arguments are the same."""

    _modes = ("shuffle",)
    if not TYPE_CHECKING:
        __init__ = functools.partialmethod(SyncBatchNorm.__init__, mode="shuffle")


def _initialising(initialise: Callable, parameter: Parameter, *args: Any) -> None:
    """Tells layers where their running means are: ``initialize``, ``reset_ctx``, ``load_parameters`` all come here. A
    hybridized net calls no Python code of its layers, so a layer cannot check this itself.
    """
    initialise(parameter, *args)
    for replicas in followers_of([parameter]):
        _place(replicas, parameter)


def _place(replicas: Replicas, parameter: Parameter) -> None:
    replicas.set_contexts(parameter.list_ctx(), parameter._data[0].shape[0])
    if len(replicas.contexts) > 1 and replicas.on_cpus:
        patches.replace(for_replica, Block, "__call__")
