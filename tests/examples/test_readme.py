"""The README's figures and all pictures are those of the results."""

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


def test_pictures_are_as_old_as_what_draws_them():
    """`python benchmarks/_pictures.py`, benchmarks/overview.py, tools/notebook.py and the examples draw them."""
    image = pytest.importorskip("PIL.Image", reason="reads what a picture was drawn from")
    pytest.importorskip("matplotlib", reason="the style needs matplotlib")
    sys.path.append(str(ROOT / "examples"))
    import style

    found = [path for part in ("benchmarks", "docs", "examples") for path in (ROOT / part).rglob("*.png")]
    assert found
    for path in found:
        *names, _ = of = image.open(path).text[style.DRAWN_FROM].split()
        assert style.mark(*(ROOT / name for name in names[1:])).split() == of, f"draw {path} again"


def test_the_picture_draws(overview, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    overview.draw(tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
