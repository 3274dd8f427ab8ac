"""The permutations that the layer draws in mode shuffle, which csrc/pooling/pooling.cc computes, too."""

from typing import List


def derangement(seed: int, layer: int, node: int, call: int, slots: int) -> List[int]:
    """Draws a uniformly random permutation of ``range(slots)`` without fixed points, the same in every process.

    ::

        state = mix(mix(mix(mix(seed) ^ layer) ^ node) ^ call)                  (64 bits, unsigned; -1 is 2**64 - 1)
        next  : state <- state + 0x9e3779b97f4a7c15, mix(state)
        below n: next, repeated while it is less than 2**64 mod n, then mod n   (so that each residue is as likely)
        p = 0, 1, ..., slots - 1; for i = slots - 1, ..., 1: exchange p[i] and p[below i + 1]
        again from p = 0, 1, ... with the numbers that follow, as long as p has a fixed point

    **Returns:** p, for the argument `permutation` of `gluon_syncbn.reference.forward`.

    Sources: `mix` and `next` are SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014. The exchanges are Durstenfeld, "Algorithm 235: Random permutation", CACM 7(7), 1964.
    """
    assert slots > 1
    state = seed % 2**64
    for value in (layer, node, call):
        state = _mix(state) ^ value % 2**64
    state = _mix(state)

    while True:
        p = list(range(slots))
        for i in range(slots - 1, 0, -1):
            drawn = -1
            while drawn < 2**64 % (i + 1):
                state = (state + 0x9E3779B97F4A7C15) % 2**64
                drawn = _mix(state)
            j = drawn % (i + 1)
            p[i], p[j] = p[j], p[i]
        if all(p[i] != i for i in range(slots)):
            return p


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31
