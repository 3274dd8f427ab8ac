"""Holds what the package needs of Python, the machine and the environment: settings, GPUs, libraries, checks of
arguments, and the log. Nothing here depends on layers.
"""
