"""Changes whole nets: convert, fuse, summarise, recompute, and the care of their running statistics.
Each module takes a net of MXNet's and finds the layers in it.
"""
