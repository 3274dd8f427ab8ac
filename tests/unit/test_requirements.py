"""pip installs the lists of requirements without dependencies, so each list names all that its packages import."""

import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

RUN = "run.txt" if sys.version_info < (3, 12) else "run-3.12.txt"
#: GluonCV asks for an OpenCV that is linked against libGL. The headless one replaces it.
REPLACED = [("gluoncv", "opencv-python")]


def needed(requirement):
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def listed(*files):
    """{name: version} of the packages that this Python gets."""
    text = "".join((ROOT / "requirements" / file).read_text(encoding="utf-8") for file in files)
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    requirements = filter(needed, map(Requirement, filter(None, lines)))
    return {canonicalize_name(one.name): str(one.specifier).lstrip("=") for one in requirements}


def dependencies(name):
    return {canonicalize_name(one.name) for one in map(Requirement, metadata.requires(name) or []) if needed(one)}


@pytest.mark.skipif(not (ROOT / "requirements").exists(), reason="needs the source tree")
def test_the_lists_name_the_dependencies_of_their_packages():
    packages = listed(RUN, "dev.txt")
    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    ours = [name for name, version in installed.items() if packages.get(canonicalize_name(name)) == version]
    assert ours
    assert [(name, lost) for name in ours for lost in sorted(dependencies(name) - set(packages))] == REPLACED
