"""pip installs the lists of requirements without dependencies, so each list names all that its packages import."""

import re
import sys

import pytest
from environments import ended
from places import ROOT


@pytest.mark.skipif(not (ROOT / "requirements").exists(), reason="needs the source tree")
def test_the_lists_name_the_dependencies_of_their_packages():
    """But for the OpenCV that GluonCV asks for, which is linked against libGL: the headless one replaces it."""
    said = ended([sys.executable, "-m", "pip", "check"]).stdout
    lost = re.findall(r"^(\S+) \S+ requires (\S+), which is not installed", said, re.MULTILINE)
    assert lost == [("gluoncv", "opencv-python")], said
