"""Sets the number of copies of temporary space that MXNet's operators on CPU contexts share.
 Replicas that wait for each other need more than MXNet's 4. An operator queued after a waiting one can hold the copy
that the missing replica needs. The number depends on the net. MXNet reads MXNET_CPU_TEMP_COPY once, when the first
operator runs. Most nets are built before that, so the number follows the layers that exist.
"""

from __future__ import annotations

from typing import Callable, Optional

from .environment import at_least, held_at, read, write

VARIABLE = "MXNET_CPU_TEMP_COPY"
#: For each layer and each context but the first. For two contexts FastSCNN (45 layers) needs 64 to 128 copies and
#: ResNet-101 (104) 128 to 256. DenseNet-121 (121) and DeepLabV3 on ResNet-101 (114) need 256 to 384, ResNet-152 (155)
#: 384 to 512.
FOR_A_LAYER = 4
#: For each context but the first, if any net may become synchronised after operators have run.
FOR_ANY_NET = 1024
#: The same, once there are layers.
FOR_A_NET = 256
#: For nets of few layers, which have more operators for each, without `cpu_devices`.
LEAST = 16

#: MXNet's own default.
DEFAULT = 4

_others = 1  # contexts but the first, as far as known
_least = LEAST
_chosen = False  # by the user
_set = ""  # the value that was set here, which may be lowered


def of_contexts(contexts: int, copies: Optional[int]) -> bool:
    """Takes the number of contexts, and of copies if the user chose one. Returns whether this raised the variable."""
    global _others, _least, _chosen, _set
    _others, _chosen = contexts - 1, copies is not None
    if contexts == 1:  # it waits for no other
        return False
    _least = FOR_A_NET
    raised = at_least(VARIABLE, FOR_ANY_NET * _others if copies is None else copies)
    _set = read(VARIABLE) if raised else ""
    return raised


def of_layers(layers: int) -> None:
    """Takes the number of layers."""
    global _set
    if _chosen or _others == 0:
        return
    wanted = max(_least, FOR_A_LAYER * layers) * _others
    if _set and read(VARIABLE) == _set:
        write(VARIABLE, wanted)
        _set = str(wanted)
    else:
        at_least(VARIABLE, wanted)


def as_mxnet_has_it(make: Callable[[], None]) -> None:
    """Creates the temporary space of a thread whose operators wait for no replica, with MXNet's own number of copies.

    Each copy grows to the largest space that any operator needs, so more copies would waste memory.
    """
    with held_at(VARIABLE, DEFAULT):
        make()
