"""Figures of pages and all pictures are those of the results."""

import pytest
from places import BENCHMARKS, ROOT

README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists() or not BENCHMARKS.exists(), reason="needs the source tree")


def test_the_figures_follow_from_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overview

    for page in overview.PAGES:
        text = page.read_text(encoding="utf-8")
        assert overview.BLOCK.search(text)
        assert overview.written(text) == text, "run python benchmarks/overview.py"


def test_pictures_are_as_old_as_what_draws_them(monkeypatch):
    """`python benchmarks/_pictures.py`, benchmarks/overview.py, tools/notebook.py and the examples draw them."""
    image = pytest.importorskip("PIL.Image", reason="reads what a picture was drawn from")
    pytest.importorskip("matplotlib", reason="the style needs matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import style

    found = [path for part in ("benchmarks", "docs", "examples") for path in (ROOT / part).rglob("*.png")]
    assert found
    for path in found:
        *names, _ = of = image.open(path).text[style.DRAWN_FROM].split()
        assert style.mark(*(ROOT / name for name in names[1:])).split() == of, f"draw {path} again"
