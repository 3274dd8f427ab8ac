"""Holds the parts of a training loop: contexts, replicas, the scopes of a step, the settings of the process, shuffling.
Changes of nets before and after a loop are in ``nets``.
"""
