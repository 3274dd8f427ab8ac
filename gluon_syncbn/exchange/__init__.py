"""Ways in which packed statistics leave the process, and what carries them: MPI, Horovod, KVStores of MXNet's.
Nothing here knows about layers.
"""
