"""The README's figures are those of the results."""

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


def test_the_figures_follow_from_the_results(overview):
    text = README.read_text(encoding="utf-8")
    assert overview.BEGIN + overview.figures() + overview.END in text, "run python benchmarks/overview.py"


def test_a_changed_result_changes_the_figures(overview, monkeypatch):
    before, cells = overview.figures(), overview.cells

    def slower(name):
        found = cells(name)
        for cell in found:
            for one in cell["ratios"].values():
                one.update({key: 2 * one[key] for key in ("10%", "median", "90%")})
        return found

    monkeypatch.setattr(overview, "cells", slower)
    both = zip(before.splitlines(), overview.figures().splitlines())
    rows = [(old, new) for old, new in both if re.match(r"\| (a step|five layers)", old)]
    assert len(rows) == 6
    assert all(old != new for old, new in rows)


def test_no_difference_stands_where_one_lies_between_the_quantiles(overview):
    assert overview.entry({"10%": 0.9, "median": 1.2, "90%": 1.3}) == "no difference (0.90 to 1.30)"
    assert overview.entry({"10%": 1.01, "median": 1.2, "90%": 1.3}) == "1.20 (1.01 to 1.30)"


def test_the_picture_draws(overview, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    overview.draw(tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
