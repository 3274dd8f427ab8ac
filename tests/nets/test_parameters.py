"""Parameters that are the same everywhere; between processes: tests/processes/test_mpi.py."""

import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import nn
from nets import made
from replicas import ready

from gluon_syncbn import average_running_stats, broadcast_parameters


@pytest.mark.parametrize("kind", ["a model", "a graph", "shared layers"])
@pytest.mark.parametrize("given", ["a net", "one that holds it", "parameters", "a dict"])
def test_all_contexts_get_those_of_the_first(contexts, kind, given):
    net, holder = made(kind, contexts[:3]), nn.Sequential()
    holder.__held__ = [net]
    params = net.collect_params()
    arrays = [p.list_data() for p in params.values()]
    want = [first.asnumpy() for first, *_ in arrays]
    for one in arrays:
        for k, array in enumerate(one):
            array += k
    ways = {"a net": net, "one that holds it": holder, "parameters": params, "a dict": dict(params.items())}
    broadcast_parameters(ways[given])
    for p, before, value in zip(params.values(), arrays, want):
        for now, array in zip(p.list_data(), before):
            assert now is array
            np.testing.assert_array_equal(array.asnumpy(), value)


@pytest.mark.parametrize("call", [broadcast_parameters, average_running_stats])
def test_without_values(call, contexts):
    net = ready(nn.BatchNorm(prefix="net_"), contexts=contexts)
    with pytest.raises(ValueError, match=r"^(params|net): 'net_\w+' without a value was given, expected initialised"):
        call(net)
    net(nd.ones((1, 3)))
    call(net)
