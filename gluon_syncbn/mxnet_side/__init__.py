"""Everything that knows MXNet's insides: the operator, patches, graphs as MXNet writes them, names that it misses.
The rest of the package uses MXNet as it is documented.
"""
