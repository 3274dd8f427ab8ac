"""The pages are written in short sentences."""

import prose
import pytest
from places import ROOT

PAGES = [
    "CONTRIBUTING.md",
    "README.md",
    "benchmarks/README.md",
    "docs/architecture.md",
    "docs/distributed.md",
    "docs/gluoncv.md",
    "docs/gpu.md",
    "docs/large_batches.md",
    "docs/limits.md",
    "docs/measured.md",
    "docs/migrating.md",
    "docs/modes.md",
    "docs/quickstart.md",
    "docs/supported.md",
    "docs/training.md",
    "docs/troubleshooting.md",
    "examples/contrastive/README.md",
    "examples/quickstart/README.md",
    "examples/segmentation/README.md",
    "tests/cuda_emulator/README.md",
]

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")


@pytest.mark.parametrize("page", PAGES)
def test_a_sentence_has_fewer_than_25_words(page):
    found = list(prose.sentences(ROOT / page))
    assert len(found) > 5
    lists = " · "  # of links
    long = [(line, one) for line, one in found if prose.words(one) >= prose.MOST_WORDS and lists not in one]
    assert long == []


def test_what_counts_as_a_sentence(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n\nOne two [three](x.md) `four five`.\nSix seven. Eight\nnine, 1.5 e.g. ten!\n\n"
        "| a | table |\n\n```\ncode here.\n```\n- An item. Another one\n  goes on\n- Next\n"
    )
    text = [(line, one) for line, one in prose.sentences(page)]
    assert text == [
        (3, "One two three CODE."),
        (3, "Six seven."),
        (3, "Eight nine, 1.5 e.g ten!"),
        (12, "An item."),
        (12, "Another one goes on"),
        (14, "Next"),
    ]
    assert [prose.words(one) for _, one in text] == [4, 2, 5, 2, 4, 1]
