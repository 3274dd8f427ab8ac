"""Holds what the package needs of Python, the machine and the environment. Nothing here depends on layers."""
