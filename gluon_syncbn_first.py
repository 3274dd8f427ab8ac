"""Supplies MXNet and GluonCV with what they lack on this machine, whoever imports them first.

gluon_syncbn.pth has Python import this module at its start, so it imports nothing until MXNet or GluonCV is loaded.
Then it is a package with the modules of gluon_syncbn, whose own ``__init__`` needs MXNet.
"""

import sys

__path__ = [__file__[: -len("_first.py")]]


class Finder:
    """Finds MXNet and GluonCV where the finders behind it do, and supplies what they lack before they run."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("mxnet", "gluoncv") or "gluon_syncbn" in sys.modules:
            return None
        from gluon_syncbn_first.mxnet_side import compatibility
        from gluon_syncbn_first.system import cuda_libraries

        spec = compatibility.spec_behind(self, name, path, target)
        if hasattr(getattr(spec, "loader", None), "exec_module"):
            compatibility.change(spec.loader, lambda _: cuda_libraries.load(), None)
            compatibility.change(spec.loader, lambda _: compatibility.supply(), None)  # runs first
        return spec


sys.meta_path.insert(0, Finder())
