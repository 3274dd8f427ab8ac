"""What the pages and the docstrings say to paste runs, and what they link to is there."""

import inspect
import json
import re
import sys
from pathlib import Path

import pages
import pytest
from environments import ended
from places import PACKAGE, ROOT, SUPPORT

import gluon_syncbn

BIN = Path(sys.executable).parent
# The first line of a block that is the program of several processes.
LAUNCHED = "# mpiexec -n 2 python train.py\n"

MODULES = [gluon_syncbn.contrastive, gluon_syncbn.parallel, gluon_syncbn.symbol]
NAMES = {
    gluon_syncbn: sorted({*gluon_syncbn.__all__} - {"contrastive", "parallel", "symbol", "__version__"}),
    **{module: module.__all__ for module in MODULES},
}
PAGED = [block for page in pages.PAGES for block in pages.of_page(page)]
SHOWN = [block for module, names in NAMES.items() for block in pages.of_docstrings(module, names)]
PYTHON = [block for block in [*PAGED, *SHOWN, *pages.of_the_index()] if block.language == "python"]

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")


def named(blocks):
    return pytest.mark.parametrize("block", blocks, ids=[block.name for block in blocks])


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit code and output of each block that runs in one process."""
    folder = tmp_path_factory.mktemp("pasted")
    blocks = [block for block in PYTHON if not block.elsewhere and not block.text.startswith(LAUNCHED)]
    pasted([sys.executable], folder, blocks, folder / "answers.json").check_returncode()
    return dict(zip(blocks, json.loads((folder / "answers.json").read_text(encoding="utf-8"))))


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What a job of two processes prints, which run all those blocks."""
    blocks = [block for block in PYTHON if block.text.startswith(LAUNCHED)]
    job = pasted([BIN / "mpiexec", "-n", 2, sys.executable], tmp_path_factory.mktemp("pasted"), blocks)
    return job.stdout


def pasted(launcher, folder, blocks, *answered):
    (folder / "blocks.json").write_text(json.dumps([block._asdict() for block in blocks]), encoding="utf-8")
    command = [*launcher, SUPPORT / "pasted.py", folder / "blocks.json", *answered]
    done = ended(command, PACKAGE.parent, timeout=280, OMP_NUM_THREADS=1)
    done.stdout += done.stderr
    return done


@named([block for block in PYTHON if not block.text.startswith(LAUNCHED)])
def test_a_block_of_python_runs_when_it_is_pasted(block, answers):
    if block.elsewhere:
        pytest.skip(block.elsewhere)
    code, output = answers[block]
    assert code == 0, output


@named([block for block in PYTHON if block.text.startswith(LAUNCHED)])
def test_a_block_of_python_runs_in_two_processes(block, launched):
    assert launched.count(f"{block.name} has run") == 2, launched


@named([block for block in PAGED if block.language == "sh"])
def test_what_a_command_names_is_there(block):
    lost = [option for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", block.text) if option not in pages.OPTIONS]
    lost += [extra for extras in EXTRAS.findall(block.text) for extra in extras.split(",") if extra not in pages.EXTRAS]
    assert not lost + absent(block.text, r"^ *make ([a-z][\w-]*)", [ROOT])


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    """Links and their anchors, and what stands between backticks and looks like a file of the checkout or a target."""
    text = without_blocks(page)
    links = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    lost = [link for link in links if "://" not in link and not link.startswith("mailto:") and not leads(page, link)]
    lost += absent(text, r"`make ([a-z][\w-]*)", [ROOT, page.parent])
    assert not lost, f"{page.name}: {lost}"


EXTRAS = re.compile(r"\[([a-z][\w,]+)\]")
FILES = re.compile(r"(?<![\w/.])((?:tests|gluon_syncbn|tools|benchmarks|examples|docs|requirements)/[\w/.]+\.\w+)")


def absent(text, targets, folders):
    """The files and targets of make that are named."""
    lost = [name for name in FILES.findall(text) if not any((folder / name).exists() for folder in folders)]
    return lost + [target for target in re.findall(targets, text, re.MULTILINE) if target not in pages.TARGETS]


def without_blocks(page):
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def leads(page, link):
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page):
    """Of the headings, as GitHub and MyST make them."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def test_each_block_says_what_it_is():
    """``python`` runs, as what a ``diff`` leads to does; ``sh`` is looked through, ``text`` is neither."""
    assert not [block.name for block in PAGED if block.language not in ("python", "sh", "text")]


def test_a_docstring_has_an_example_and_what_is_returned():
    shown = {block.page for block in SHOWN}
    with_example = "SyncBatchNorm broadcast_parameters configure convert freeze kvstore only_on revert"
    assert {f"gluon_syncbn.{name}" for name in with_example.split()} <= shown
    for name in NAMES[gluon_syncbn]:
        one = getattr(gluon_syncbn, name)
        if inspect.isfunction(one) and inspect.signature(one).return_annotation not in ("None", "Iterator[None]"):
            text = inspect.getdoc(one)
            assert text.startswith("Returns") or "\nReturns\n" in text, name


def test_the_reference_has_all_public_names():
    text = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. auto(?:class|exception|function):: (\w+)$", text, re.MULTILINE)
    assert set(shown) == {name for names in NAMES.values() for name in names}


def test_one_screen_has_all_public_names():
    """In the docstring of the module, and with links in a page of the same words."""
    listed = re.findall(r"^    (\S+) +(.+)$", gluon_syncbn.__doc__, re.MULTILINE)
    page = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
    assert listed == re.findall(r"^\| \[(.+)\]\(\S+\) \| (.+) \|$", page.replace("`", ""), re.MULTILINE)
    public = {f"{module.__name__}.{name}".replace("gluon_syncbn.", "") for module in NAMES for name in NAMES[module]}
    assert sorted(name for name, _ in listed) == sorted(public - {"assert_synchronized"})
    assert len(gluon_syncbn.__doc__.splitlines()) <= 50
