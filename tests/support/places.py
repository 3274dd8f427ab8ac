"""Where things are in the checkout."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
PACKAGE = ROOT / "gluon_syncbn"
SOURCES = PACKAGE / "csrc"
BENCHMARKS = ROOT / "benchmarks"
SEGMENTATION = ROOT / "examples" / "segmentation"
CONTRASTIVE = ROOT / "examples" / "contrastive"
QUICKSTART = ROOT / "examples" / "quickstart"
