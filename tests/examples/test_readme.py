"""What the README says to paste runs, and what it links to is there."""

import os
import re
import subprocess
import sys

import pytest
from places import PACKAGE, ROOT

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
for folder in ("docs", "examples", "benchmarks", "tests"):
    DOCUMENTS += sorted((ROOT / folder).rglob("*.md"))

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")


def scripts():
    """Blocks of Python that import the package and train: whole programs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if "import gluon_syncbn" in block and ".step(" in block]


def test_the_script_of_the_readme_runs(tmp_path):
    (script,) = scripts()
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "script.py"],
        cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip(), "it shows nothing"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_point_at_what_is_there(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    links = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    # What stands between backticks and looks like a file of the checkout, with its folder.
    names = re.findall(
        r"(?<![\w/.])((?:tests|src/gluon_syncbn|tools|benchmarks|examples|docs|requirements)/[\w/.]+\.\w+)", text
    )
    lost = [link for link in links if not (document.parent / link).exists()]
    lost += [name for name in names if not any((base / name).exists() for base in (ROOT, document.parent))]
    assert not lost, f"{document.name}: {lost}"
