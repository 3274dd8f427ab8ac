"""Imported first, it has MXNet find the names that this Python lacks, and imports nothing else of gluon_syncbn.

For programs that are about what MXNet does before, or without, this package.
"""

import sys
from types import ModuleType

from places import PACKAGE

package = ModuleType("gluon_syncbn")
package.__path__ = [str(PACKAGE)]
sys.modules["gluon_syncbn"] = package
from gluon_syncbn.mxnet_side import compatibility  # noqa: E402

compatibility.supply()
del sys.modules["gluon_syncbn"]
