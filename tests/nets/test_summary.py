"""What a user is told about which layers are synchronised."""

import re

import mxnet as mx
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn
from nets import Operates, contrib
from replicas import forward_and_backward, ready

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, assert_synchronised, convert, freeze, summary


class Own(nn.BatchNorm):
    def forward(self, x, *args):
        return super().forward(x, *args)


ALONE = "plain, because each group has one device"
#: A layer, the number of its contexts, and of its row the mode, the slots, and how the statistics begin.
ROWS = {
    "sync": (lambda: SyncBatchNorm(), 2, "sync", 1, "synchronised"),
    "groups": (lambda: SyncBatchNorm(group_size=2, virtual_devices=4), 2, "sync, groups of 2", 4, "synchronised"),
    "named": (lambda: SyncBatchNorm(groups=[[1], [0]]), 2, "sync, 2 named groups", 1, ALONE),
    "alone": (lambda: SyncBatchNorm(group_size=1), 2, "sync, groups of 1", 1, ALONE),
    "local": (lambda: SyncBatchNorm(mode="local"), 2, "local", 1, "plain, because mode 'local' shares nothing"),
    "frozen": (lambda: freeze(SyncBatchNorm()), 2, "sync", 1, "plain, because it is frozen: use_global_stats"),
    "one replica": (lambda: SyncBatchNorm(), 1, "sync", 1, "plain, because it has one replica"),
    "uninitialised": (lambda: SyncBatchNorm(), 0, "sync", 1, "not known before it is initialised"),
    "an error": (
        lambda: SyncBatchNorm(group_size=2),
        3,
        "sync, groups of 2",
        1,
        "an error in training: group_size: 2 was",
    ),
    "plain": (lambda: nn.BatchNorm(), 2, None, None, "plain, because it is BatchNorm; convert(net) changes it"),
    "contrib's": (contrib, 2, None, None, "plain, because it is contrib's; convert(net) changes it"),
    "own": (lambda: Own(), 2, None, None, "plain, because it has a forward of its own"),
    "each": (lambda: nn.InstanceNorm(), 2, None, None, "plain, because it normalises each sample by itself"),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_normalisation_layer_has_a_row(name, contexts):
    make, count, mode, slots, said = ROWS[name]
    layer = make()
    if count:
        layer.initialize(ctx=contexts[:count])
    (row,) = summary(layer, show=False)
    assert row.layer == f"{layer.name} ({type(layer).__name__})" and row.channels is None
    assert (list(row.contexts), row.mode, row.slots) == (contexts[:count], mode, slots)
    assert row.statistics.startswith(said) and row.synchronised == (said == "synchronised")


def test_its_text_is_a_table(contexts, capsys):
    net = nn.HybridSequential(prefix="")
    net.add(SyncBatchNorm(in_channels=3, prefix="sync_"), nn.InstanceNorm(prefix="each_"), nn.Dense(3))
    net.add(net[0])
    net.initialize(ctx=contexts[:2])
    said = summary(net)
    assert capsys.readouterr().out == f"{said}\n" and summary(net, show=False) == said
    assert not capsys.readouterr().out
    *_, sync, each, _, count, _ = str(said).splitlines()
    assert count == repr(said) == "Layers of batch normalisation: 1, synchronised: 1"
    assert re.split("  +", sync) == ["sync (SyncBatchNorm)", "3", "sync", "1", "[cpu(0), cpu(1)]", "-", "synchronised"]
    assert re.split("  +", each)[:4] == ["each (InstanceNorm)", "-", "-", "-"]


def test_that_all_layers_are_synchronised_is_asserted(contexts):
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=3), nn.BatchNorm(in_channels=3, prefix="plain_"), nn.LayerNorm(in_channels=3))
    with pytest.raises(AssertionError, match=r"2 of 2 .* not known before it is initialised; plain"):
        assert_synchronised(net)
    net.initialize(ctx=contexts[:2])
    with pytest.raises(AssertionError, match=r"1 of 2 .*: plain \(BatchNorm\): plain, because it is BatchNorm"):
        assert_synchronised(net)
    freeze(net, select="plain")
    with pytest.raises(AssertionError, match="1 of 2"):  # `convert` makes it a frozen layer of ours
        assert_synchronised(net)
    assert_synchronised(convert(net))
    with pytest.raises(AssertionError, match=r"^'layernorm.*has no layer of batch normalisation that takes"):
        assert_synchronised(net[2])


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments:UserWarning")
def test_recorded_graphs(contexts):
    layers = nn.BatchNorm(in_channels=3, prefix="net_plain_"), SyncBatchNorm(in_channels=3, prefix="net_sync_")
    body = ready(*layers, contexts=contexts[:2])
    data = mx.sym.var("data")
    net = gluon.SymbolBlock(body(data), data, params=body.collect_params())
    plain, ours = summary(net, show=False)
    assert plain.layer == "net_plain_fwd (BatchNorm)"
    assert plain.statistics.startswith("plain, because it is in the recorded graph")
    assert ours.statistics == "synchronised, in a recorded graph"
    assert repr(summary(net, show=False)) == "Layers of batch normalisation: 2, synchronised: 1"
    assert repr(summary(convert(net), show=False)) == "Layers of batch normalisation: 2, synchronised: 2"


class Calling(Operates):
    """One layer, and one operator of its own."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.bn = nn.BatchNorm(in_channels=3)

    def hybrid_forward(self, F, x, **parameters):
        return super().hybrid_forward(F, self.bn(x), **parameters)


def test_an_operator_that_a_hybrid_forward_calls(contexts):
    net = ready(convert(Calling()), contexts=contexts[:2], way="hybrid")
    net(nd.ones((2, 3)))
    layer, operator = summary(net, show=False)
    assert layer.synchronised and operator.layer.endswith("called (BatchNorm)") and not operator.synchronised
    assert operator.statistics.startswith("plain, because a hybrid_forward calls the operator")


# ---- what training warns of ------------------------------------------------------------------------------------


def train(net, contexts):
    for block in (net, *getattr(net, "__held__", ())):
        block.initialize(ctx=contexts)
    held = [p for block in getattr(net, "__held__", ()) for p in block.collect_params().values()]
    trainer = gluon.Trainer([*net.collect_params().values(), *held], "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        forward_and_backward(net, [nd.random.normal(shape=(2, 3, 4, 4), ctx=c) for c in contexts])
        trainer.step(2 * len(contexts), ignore_stale_grad=True)
    nd.waitall()


def mixed(change=lambda net: net):
    """As GluonCV's MobileNetV3, which hands `norm_layer` on to 2 of its 34 layers."""
    net = nn.HybridSequential(prefix="")
    first, last = (SyncBatchNorm(in_channels=3, prefix=prefix) for prefix in ("first_", "last_"))
    net.add(first, *[nn.BatchNorm(in_channels=3) for _ in range(32)], last)
    net.hybridize()
    return change(net)


def fusing(hybridized):
    """In two parts."""
    net = nn.HybridSequential()
    for prefix in ("a_", "b_"):
        part = nn.HybridSequential(prefix=prefix)
        with part.name_scope():
            part.add(nn.Conv2D(3, 1, in_channels=3), SyncBatchNorm(), nn.Activation("relu"))
        net.add(part)
    net.__held__ = [SyncBatchNorm(in_channels=3)]  # which nobody uses, and of which nothing is said
    (net if hybridized == "whole" else net[0]).hybridize(hybridized != "not")
    return convert(net, fuse=True)


class Bypassing(nn.HybridBlock):
    """Normalises with the parameters of its layer, and without the layer."""

    def __init__(self, used, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.bn, self.used = SyncBatchNorm(in_channels=3), used

    def forward(self, x):
        return x + self.bn(x) if self.used else nd.BatchNorm(x, *(p.data(x.ctx) for p in self.bn._reg_params.values()))


def bypassing(used):
    net = nn.Sequential()
    net.add(SyncBatchNorm(in_channels=3), Bypassing(used, prefix="net_"))
    return net


MIXED = (
    r"2 of 34 layers of batch normalisation are synchronised, and these are not: .* and 27 more\. gluon_syncbn\.convert"
)


@pytest.mark.parametrize(
    "make, contexts_of_it, said",
    [
        (mixed, 2, MIXED),
        (mixed, 1, None),
        (lambda: mixed(convert), 2, None),
        (lambda: mixed(lambda net: freeze(net, select="(?!(first|last))")), 2, None),
        (lambda: mixed(gluon_syncbn.revert), 2, None),
        (lambda: fusing("not"), 2, "a_batchnorm0, b_batchnorm0: fuse=True fuses nothing here"),
        (lambda: fusing("in part"), 2, None),
        (lambda: fusing("whole"), 2, None),
        (lambda: bypassing(True), 2, None),
        (lambda: bypassing(False), 2, "net_batchnorm0: "),
    ],
)
def test_training_warns_once(make, contexts_of_it, said, contexts, recwarn):
    train(make(), contexts[:contexts_of_it])
    assert len(recwarn) == bool(said)
    for warning in recwarn:
        assert re.match(said, str(warning.message)) and warning.filename == __file__
