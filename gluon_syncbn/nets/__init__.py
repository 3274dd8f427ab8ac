"""Changes whole nets. Each module takes a net of MXNet's and finds the layers in it."""
