"""Holds all code that depends on MXNet's insides: the operator, patches, graph files, names for newer versions.
The rest of the package uses MXNet as it is documented.
"""
