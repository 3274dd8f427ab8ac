"""What is done in a training loop: contexts, replicas, the scopes of a step, the settings of the process, shuffling.
What is done to nets before and after a loop is in ``nets``.
"""
