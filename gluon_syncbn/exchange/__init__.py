"""Carries packed statistics out of the process, by MPI, KVStores of MXNet's, or Horovod.
Nothing here depends on the layer's code.
"""
