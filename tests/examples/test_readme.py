"""The README's figures are those of the results, and it stays short enough to be read."""

import re
import sys

import pytest
from places import BENCHMARKS, ROOT

README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists() or not BENCHMARKS.exists(), reason="needs the source tree")


@pytest.fixture
def overview(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overview

    yield overview
    for name in ("overview", "_results", "_measuring"):
        sys.modules.pop(name, None)


def test_the_sentences_on_speed_follow_from_the_results(overview):
    text = README.read_text(encoding="utf-8")
    assert overview.BEGIN + overview.sentences() + overview.END in text, "run python benchmarks/overview.py"


def test_a_changed_result_changes_the_sentences(overview, monkeypatch):
    before, cells = overview.sentences(), overview.cells

    def slower(name):
        found = cells(name)
        for cell in found:
            for one in cell["ratios"].values():
                one["median"] *= 2
        return found

    monkeypatch.setattr(overview, "cells", slower)
    lines = [(old, new) for old, new in zip(before.splitlines(), overview.sentences().splitlines()) if " times " in old]
    assert len(lines) == 5
    assert all(old != new for old, new in lines)


def test_no_other_figure_stands_in_the_readme(overview):
    """A ratio or a score has a decimal point; so have versions, and settings within code."""
    text = README.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text.replace(overview.sentences(), ""), flags=re.DOTALL)
    prose = re.sub(r"(MXNet|NumPy|Python|mxnet==) ?\d+(\.\d+)+( to \d+\.\d+)?|Apache-2\.0|0\.9 GB", "", prose)
    assert re.findall(r"\d+\.\d+", prose) == []


def test_the_picture_draws(overview, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    overview.draw(tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_is_short():
    assert 120 <= len(README.read_text(encoding="utf-8").splitlines()) <= 150
