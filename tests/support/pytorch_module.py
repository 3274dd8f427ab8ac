"""A stand-in for a PyTorch module with one layer of batch normalisation."""

from types import SimpleNamespace


class Module:
    """What `from_torch` and `to_torch` ask of a module."""

    def __init__(self, state, momentum=0.3, running_mean=0):
        self.state = state
        self.norm = SimpleNamespace(eps=0.25, momentum=momentum, running_mean=running_mean)

    def state_dict(self):
        return self.state

    def load_state_dict(self, values, strict):
        assert not strict and values.keys() <= self.state.keys()
        self.state = {**self.state, **values}

    def named_modules(self):
        return [("", self), ("body.1", self.norm)]
