"""docs/state.md against a real process: before the import, after it, after a first step, and after all else."""

import ast
import json
import re
import sys

import pytest
from environments import ended
from places import ROOT, SUPPORT
from sources import PYTHON, TREES, unparsed

PAGE = (ROOT / "docs" / "state.md").read_text(encoding="utf-8")

CHILD = """
import gluon_syncbn_first, signal, sys, types
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import contrib

def functions():
    found = {("_LIB." + name, "mxnet.base"): id(getattr(mx.base._LIB, name)) for name in C_FUNCTIONS}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "mxnet" and isinstance(module, types.ModuleType):
            for key, value in [item for item in vars(module).items() if callable(item[1])]:
                found[name.split(".")[-1] + "." + key, name] = id(value)
                if isinstance(value, type) and value.__module__.startswith("mxnet"):
                    found.update({(value.__name__ + "." + k, value.__module__): id(v) for k, v in vars(value).items()})
    return found

def state():
    threads = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    return {"threads": threads, "environment": {name: os.environ[name] for name in os.environ},
            "excepthook": id(sys.excepthook), "hooks": len(sys.meta_path),
            "interrupt": id(signal.getsignal(signal.SIGINT)),
            "filters": len(warnings.filters),
            "command": [name for name in sys.modules if name.startswith("gluon_syncbn.command.run")],
            "files": sorted(os.listdir())}

import json, logging, os, threading, warnings
C_FUNCTIONS = ("MXNDArraySave", "MXSymbolRemoveAmpCast")
plain, stages = functions(), {}
classes = {(key.split(".")[0], name) for key, name in plain}

def stage(name):
    now = functions()
    there = {key: i for key, i in now.items() if key in plain or (key[0].split(".")[0], key[1]) in classes}
    changed = {key[0] for key, i in there.items() if i != plain.get(key)}
    own = ("__annotations__", "__weakref__", "__slotnames__")  # Python's
    changed = sorted(name for name in changed if not name.endswith(own))
    stages[name] = {"functions": changed, **state()}

stage("before")
import gluon_syncbn
stage("import")
contexts = gluon_syncbn.cpu_devices(2)

def trained(net):
    net.initialize(ctx=contexts, force_reinit=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    xs = [mx.nd.random.normal(shape=(2, 3, 4, 4), ctx=context) for context in contexts]
    with autograd.record():
        ys = [net(x) for x in xs]
    autograd.backward(ys)
    trainer.step(4)
    mx.nd.waitall()

layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
trained(layer)
stage("step")

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(3, 1), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"))
gluon_syncbn.convert(net, fuse=True)
gluon_syncbn.recompute(net)
trained(net)
symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), name="bn")
mx.mod.Module(symbol, label_names=None, context=contexts).bind([("data", (4, 3))])
gluon_syncbn.install(convert=True)
stage("everything")

gluon_syncbn.uninstall()
stage("uninstalled")
print(json.dumps(stages))
"""


def first_column(heading, column="`"):
    """What stands in code in the first column of the tables below a heading, or of that whose head is ``column``."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = section[section.index(f"| {column}") :] if column != "`" else section
    rows = re.findall(r"^\|(.+?)\|", table.split("\n\n")[0] if column != "`" else section, re.MULTILINE)
    return {code for row in rows for code in re.findall(r"`([^`]+)`", row)}


#: How variables of the environment begin.
PREFIXES = "DMLC|GLUON_SYNCBN|HOROVOD|LD|MXNET|OMPI|PMI|SLURM|XDG"
AT_IMPORT = first_column("Functions of MXNet that the import wraps")
LATER = first_column("Functions that the package wraps later")


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    run = ended([sys.executable, "-W", "ignore", "-c", CHILD], SUPPORT, code=0, cwd=tmp_path_factory.mktemp("empty"))
    return json.loads(run.stdout)


def test_functions(stages):
    assert stages["before"]["functions"] == []
    assert set(stages["import"]["functions"]) == AT_IMPORT
    assert stages["import"]["command"] == [], "the import has loaded the command line"
    assert set(stages["step"]["functions"]) == AT_IMPORT | {
        "Block.__call__",
        "_LIB.MXSymbolRemoveAmpCast",
        "Parameter._init_impl",
    }
    replaced = {"nn.SyncBatchNorm", "basic_layers.SyncBatchNorm"}  # what `install` puts there, as the page says
    replaced |= {"base.create", "kvstore.create", "kvstore_server.create"}
    assert set(stages["everything"]["functions"]) - replaced == AT_IMPORT | LATER


def found(pattern):
    """What matches in the package, by file."""
    hits = {file: [hit.group() for hit in re.finditer(pattern, text)] for file, text in PYTHON.items()}
    return {file: some for file, some in hits.items() if some}


OTHERS_CLASS = {"nets/convert.py": 2, "nets/graphs.py": 2}
HANDLERS = {
    "mxnet_side/lifetime.py": 2,
    "system/locks.py": 1,
    "exchange/dist_sync.py": 2,
    "command/replacements.py": 1,
    "command/run.py": 1,
    "mxnet_side/compatibility/__init__.py": 1,
}


@pytest.mark.parametrize(
    "pattern, where",
    [
        (r"\.__class__\b.*=", OTHERS_CLASS),  # these change their class, as the page says: a layer and a graph
        (r"\.(environ|getenv|putenv)\b", {"system/environment.py": 1}),
        (r"atexit\.register\(|register_at_fork\(|signal\.signal\(|excepthook ?=|meta_path\.insert", HANDLERS),
    ],
    ids=["classes", "environment", "handlers that outlive a call"],
)
def test_what_few_places_do(pattern, where):
    assert {name: len(hits) for name, hits in found(pattern).items()} == where


def test_state_of_modules():
    """These alone hold what changes, in modules and classes. Names in capitals stay as they are made."""
    made = r"(\w+)(?:: .*)? = (?:[{\[]|(?!functools.partial|property|logging|_Core)[\w.]+\()", r"@.*cache.*\ndef (\w+)"
    places = {}
    for file, tree in TREES.items():
        names = set(re.findall(r"^ +global (\w+)$", PYTHON[file], re.MULTILINE))
        for node in [*tree.body, *(one for part in tree.body if isinstance(part, ast.ClassDef) for one in part.body)]:
            names.update(hit[1] for hit in (re.match(pattern, unparsed(node)) for pattern in made) if hit)
        for name in names:
            if name.strip("_").islower() and name not in ("__all__", "_fields_"):
                places.setdefault(file, set()).add(name)
    assert places == {
        "_native.py": {"_functions"},
        "symbol.py": {"_written"},
        "command/replacements.py": {"_installed"},
        "exchange/named.py": {"_adding", "stores"},
        "exchange/agreement.py": {"numbered"},
        "mxnet_side/patches.py": {"_changes"},
        "nets/recompute.py": {"_forwards"},
        "training/replicas.py": {"_in_symbols", "_layers", "_of_thread", "by_id"},
        "training/session.py": {"session"},
        "training/steps.py": {"_steps", "training_threads"},
    }


def test_the_session_is_written_by_its_own_module():
    """Fields of an object of a module's are its module's to write, and their lists and dictionaries too."""
    fields = r"\b(?:session|_steps)\.\w+"
    writes = (
        rf"{fields}(\[[^\]]*\])? [-+|]?= |{fields}\.(add|append|clear|extend|insert|pop|remove|setdefault|update)\("
    )
    hits = found(writes)
    assert not hits.keys() - {"training/session.py", "training/steps.py"}, hits
    assert not any(hit.startswith("session.") for hit in hits.get("training/steps.py", ()))


def test_what_install_changes_is_taken_back(stages):
    assert set(stages["uninstalled"]["functions"]) == AT_IMPORT | LATER
    for unchanged in ("hooks", "excepthook", "interrupt", "filters", "files"):
        assert stages["uninstalled"][unchanged] == stages["before"][unchanged], unchanged


def test_threads(stages):
    named = first_column("Threads")
    assert stages["before"]["threads"] == []
    assert stages["import"]["threads"] == stages["step"]["threads"] == ["gluon_syncbn-log"]
    assert {re.sub(r"\d+", "0", name) for name in stages["everything"]["threads"]} <= named
    started = found(r'(?:name(?:_prefix)? ?= ?f?|made[(,] ?)"(gluon_syncbn-[^"{]+)')
    started = {hit.split('"')[1] for hits in started.values() for hit in hits}
    assert {name.replace("cpu(0)_0", "") for name in named} == started


def test_the_environment(stages):
    read = first_column("Environment variables", "Read")
    names = found(rf'"(?:{PREFIXES})_[A-Z_]+"')
    assert read == {name.strip('"') for hits in names.values() for name in hits}
    assert stages["before"]["environment"] == stages["import"]["environment"] == stages["everything"]["environment"]
