"""Which import comes first, said where ``import mxnet`` or ``import gluoncv`` fails without it.

gluon_syncbn.pth has Python import this module at its start: it imports nothing, and changes no import that succeeds.
"""

import sys


class Finder:
    """Finds MXNet and GluonCV where the others do, and has their errors explained."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("mxnet", "gluoncv") or "gluon_syncbn" in sys.modules:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _explain(spec.loader)
        return spec


def _explain(loader):
    execute = loader.exec_module

    def exec_module(module):
        try:
            execute(module)
        except (ImportError, AttributeError) as error:
            raise (_too_late() or error) from None

    loader.exec_module = exec_module


def _too_late():
    """The error of an ``import gluon_syncbn`` that comes after this one; None where no name is missing."""
    numpy = getattr(sys.modules.get("numpy"), "__version__", "0.0").split(".")
    if sys.version_info >= (3, 12) or (int(numpy[0]), int(numpy[1])) >= (1, 24):
        try:
            import gluon_syncbn  # noqa: F401
        except ImportError as error:
            return error
    return None


sys.meta_path.insert(0, Finder())
