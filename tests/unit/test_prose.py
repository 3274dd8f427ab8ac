"""Pages, docstrings and comments are written in short sentences."""

import prose
import pytest
from places import PACKAGE, ROOT

PAGES = [
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "docs/architecture.md",
    "docs/comparison.md",
    "docs/distributed.md",
    "docs/gluoncv.md",
    "docs/gpu.md",
    "docs/large_batches.md",
    "docs/limits.md",
    "docs/measured.md",
    "docs/migrating.md",
    "docs/modes.md",
    "docs/quickstart.md",
    "docs/state.md",
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


SOURCES = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".cc", ".h", ".cu")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_sentence_of_a_docstring_or_a_comment_has_fewer_than_25_words(path):
    found = list(prose.sentences_of_source(path))
    assert [(line, one) for line, one in found if prose.words(one) >= prose.MOST_WORDS] == []


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


def test_what_counts_as_a_sentence_of_python(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '''"""One two
three. Four `five` ::

    code = here

Six seven.

Parameters
----------
name : str
    Eight nine. Ten
    eleven

- An item
  goes on
- Another one
"""

import os  # behind code

# A comment goes
# on. And on
#
# A paragraph


def function():
    """.. math:: a formula
           of two lines

    text
    """
'''
    )
    assert list(prose.sentences_of_source(path)) == [
        (1, "One two three."),
        (1, "Four CODE ::"),
        (6, "Six seven."),
        (10, "name : str"),
        (11, "Eight nine."),
        (11, "Ten eleven"),
        (14, "An item goes on"),
        (16, "Another one"),
        (31, "text"),
        (19, "behind code"),
        (21, "A comment goes on."),
        (21, "And on"),
        (24, "A paragraph"),
    ]


def test_what_counts_as_a_sentence_of_cpp(tmp_path):
    path = tmp_path / "source.cc"
    path.write_text(
        "// One two\n// three. Four\n//\n//     x ──► y     z ──► u\n\n"
        'const char* at = "https://host";  // behind code\n// below. `A. B`\nint i;\n'
    )
    assert list(prose.sentences_of_source(path)) == [
        (1, "One two three."),
        (1, "Four"),
        (6, "behind code"),
        (7, "below."),
        (7, "CODE"),
    ]
