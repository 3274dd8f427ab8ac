"""Holds all code that depends on MXNet's insides. The rest of the package uses MXNet as it is documented."""
