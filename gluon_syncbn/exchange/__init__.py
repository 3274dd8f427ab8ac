"""Carries packed statistics out of the process, by MPI, or KVStores of MXNet's.
Nothing here depends on the layer's code.
"""
