# `make` lists the targets. Each sets up .venv by itself, with the first suitable Python of this machine
# (or `make PYTHON=/path/to/python ...`); a repetition finds it ready. ARGS="..." goes to the program.

SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo demo-contrastive demo-distributed test test-horovod test-gpu-emulated test-cu112 setup-horovod lint format bench compare soak clean core setup-run setup-dev

VENV ?= .venv
PYTHON ?=
ARGS ?=
PY := $(VENV)/bin/python
NATIVE := $(shell find src tests -name "*.cc" -o -name "*.h")

# The user's own settings of these would mix other packages into .venv or install past it.
unexport PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX
export PIP_USER := 0
export VENV PYTHON

help:
	@cat <<'END'
	make demo     train a segmentation network with SyncBatchNorm on 2 CPU devices (at most 10 minutes)
	make demo-contrastive  MoCo with batch statistics that leak, and with the cures (about 6 minutes)
	make demo-distributed  the segmentation job in two processes beside the same in one (about 10 minutes)
	make test     lint, then the tests
	make test-horovod  compiles Horovod into .venv-horovod, then its tests (about 15 minutes)
	make test-gpu-emulated  the GPU path of the unchanged mxnet-cu112 on stand-ins for CUDA (about 5 minutes)
	make test-cu112  fetches the CUDA libraries of mxnet-cu112 (2 GB) and starts it with them
	make lint     ruff, mypy, clang-format
	make format   let ruff and clang-format rewrite the sources
	make bench    speed of the layer and of whole models, against plain BatchNorm and contrib's SyncBatchNorm
	make compare  plain BatchNorm against SyncBatchNorm: accuracy over several seeds (long)
	make soak     the slow tests
	make clean    remove what was built and .venv; results in runs/ stay

	ARGS="..." is passed on:       make test ARGS="-k layer"
	PYTHON=... chooses the Python: make test PYTHON=/usr/bin/python3.9
	END

demo: core
	@$(PY) examples/segmentation/demo.py $(ARGS)

demo-contrastive: core
	@$(PY) examples/contrastive/demo.py $(ARGS)

demo-distributed: core
	@$(PY) examples/segmentation/distributed.py $(ARGS)

test: lint core
	@$(PY) -m pytest -q --durations=15 $(ARGS)

test-horovod:
	@$(MAKE) --no-print-directory VENV=.venv-horovod core setup-horovod
	.venv-horovod/bin/python -m pytest -q --durations=15 -k horovod tests/test_horovod.py \
	    tests/test_segmentation_distributed.py tests/test_namespaces.py $(ARGS)

test-gpu-emulated: setup-dev core
	@$(PY) tests/cuda_emulator/build.py --out build/cuda_emulator
	export CUDA_EMULATOR="$$PWD/build/cuda_emulator" MXNET_GPU_MEM_POOL_TYPE=Unpooled
	export PYTHONPATH="$$CUDA_EMULATOR" LD_LIBRARY_PATH="$$CUDA_EMULATOR/lib"
	$(PY) -m pytest -q --durations=15 tests/test_cuda_emulator.py tests/test_kernels_cuda.py tests/test_gpu.py $(ARGS)

test-cu112: setup-dev core
	@$(PY) -m pytest -v -m cuda_packages --timeout 3600 tests/test_cuda_libraries.py $(ARGS)

lint: setup-dev
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(NATIVE)

format: setup-dev
	@$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(NATIVE)

bench: core
	@$(PY) benchmarks/layers.py $(ARGS)
	$(PY) benchmarks/models.py $(ARGS)
	$(PY) benchmarks/modes.py $(ARGS)
	$(PY) benchmarks/shuffle.py $(ARGS)
	$(PY) benchmarks/exchange.py $(ARGS)

compare: core
	@$(PY) examples/segmentation/compare.py $(ARGS)

soak: setup-dev core
	@$(PY) -m pytest -q --durations=15 -m slow --timeout 3600 $(ARGS)

clean:
	@if [ -e "$$VENV/.made-by-make" ]; then rm -rf "$$VENV"; fi
	rm -rf build dist src/*.egg-info src/gluon_syncbn/_core.so src/gluon_syncbn/.core-*
	rm -rf .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

core: setup-run
	@$(PY) setup.py -q build_core --inplace

# ---- setting up .venv -------------------------------------------------------------------------------

# Run by every candidate, Python 2 and 3.13 included: it prints the version, or ends with the reason why not.
define PROBE
import sys
version = sys.version.split()[0]
if not (3, 8) <= sys.version_info[:2] < (3, 12):
    sys.exit("is Python " + version)
if sys.maxsize < 2**32:
    sys.exit("is a 32-bit Python")
missing = []
for name in ("ensurepip", "venv", "ssl", "zlib", "bz2", "ctypes"):
    try:
        __import__(name)
    except ImportError:
        missing.append(name)
if missing:
    hint = " (apt-get install python%d.%d-venv)" % sys.version_info[:2] if "ensurepip" in missing else ""
    sys.exit("is Python " + version + " without " + ", ".join(missing) + hint)
print(version)
endef
export PROBE

# Shell functions, shared by the two set-up recipes below.
define FUNCTIONS
die() { echo "make: $$*" >&2; exit 1; }

candidates() {
    local minor path
    if [ -n "$$PYTHON" ]; then echo "$$PYTHON"; return; fi
    for minor in 11 10 9 8; do
        type -aP "python3.$$minor" || true
        for path in "$${PYENV_ROOT:-$${HOME:-}/.pyenv}/versions/3.$$minor".*/bin/python; do
            if [ -x "$$path" ]; then echo "$$path"; fi
        done
    done
    type -aP python3 python || true
}

# Sets python and version to the first candidate that really runs and has what is needed.
find_python() {
    local tried="" answer
    while read -r python; do
        if version=$$("$$python" -c "$$PROBE" 2>"$$reasons" </dev/null); then return; fi
        answer=$$(tail -n 1 "$$reasons")
        if ! command -v "$$python" >/dev/null; then answer="is not a program"; fi
        case $$answer in "is "*) ;; *) answer="does not run: $$answer" ;; esac
        tried+="    $$python $$answer"$$'\n'
    done < <(candidates)
    echo "make: no suitable Python: MXNet 1.9.1 needs Python 3.8, 3.9, 3.10 or 3.11 (64 bit, with venv and pip)." >&2
    printf '%s' "$$tried" >&2
    die "install one (apt-get install python3.11 python3.11-venv, dnf install python3.11, pyenv install 3.11)" \
        "or name one: make PYTHON=/path/to/python"
}

# A stamp holds what its stage was made from; a stage under way has none and leaves .busy.
stamped() { [ "$$(cat "$$VENV/.stamp-$$1" 2>/dev/null)" = "$$2" ]; }
stamp() { printf '%s\n' "$$2" >"$$VENV/.stamp-$$1"; }
identity() { "$$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null </dev/null; }

# Another make may be setting up the same .venv: wait for it. The lock goes when this shell ends, however it ends.
lock() {
    exec 9<Makefile
    if ! command -v flock >/dev/null || flock -n 9; then return; fi
    echo "another make is setting up $$VENV; waiting for it ..."
    flock 9
}

pip_install() {
    if ! "$$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        --no-deps "$$@" >>"$$VENV/setup.log" 2>&1 </dev/null 9<&-; then
        grep -E "^ *(ERROR|error)" "$$VENV/setup.log" | tail -n 5 >&2 || true
        die "pip install $$* failed; is the package index reachable? All of its messages: $$VENV/setup.log"
    fi
}
endef

setup-run:
	@$(FUNCTIONS)
	packages="$$PWD $$(cat requirements/build.txt requirements/run.txt | cksum)"
	package=$$(cat setup.py pyproject.toml src/gluon_syncbn/_version.py | cksum)
	whole() {
	    [ ! -e "$$VENV/.busy" ] && stamped packages "$$packages" && "$$VENV/bin/python" -c '' 2>/dev/null &&
	        { [ -z "$$PYTHON" ] || stamped python "$$(identity "$$PYTHON")"; }
	}
	if whole && stamped package "$$package"; then exit 0; fi
	lock
	if whole && stamped package "$$package"; then exit 0; fi
	start=$$SECONDS
	if ! whole; then
	    if [ -e "$$VENV" ] && [ ! -e "$$VENV/.made-by-make" ]; then
	        die "$$VENV exists and was not made by this Makefile: remove it, or choose another: make VENV=.venv-make"
	    fi
	    reasons=$$(mktemp)
	    trap 'rm -f "$$reasons"' EXIT
	    find_python
	    echo "setting up $$VENV with Python $$version from $$python (about 1 minute) ..."
	    rm -rf "$$VENV"
	    mkdir -p "$$VENV"
	    touch "$$VENV/.made-by-make" "$$VENV/.busy"
	    if ! "$$python" -m venv "$$VENV" >>"$$VENV/setup.log" 2>&1 </dev/null 9<&-; then
	        tail -n 5 "$$VENV/setup.log" >&2
	        die "$$python -m venv failed: install what it misses (apt-get install python3-venv) or name another PYTHON"
	    fi
	    pip_install -r requirements/build.txt
	    echo "    compiling the native core ..."
	    $(PY) setup.py -q build_core --inplace
	    echo "    installing MXNet, GluonCV and what they need ..."
	    pip_install -r requirements/run.txt
	    stamp python "$$(identity "$$python")"
	fi
	touch "$$VENV/.busy"
	$(PY) setup.py -q build_core --inplace
	pip_install --no-build-isolation -e .
	stamp packages "$$packages"
	stamp package "$$package"
	rm "$$VENV/.busy"
	echo "    $$VENV is ready ($$((SECONDS - start)) s)"

setup-dev: setup-run
	@$(FUNCTIONS)
	tools=$$(cksum <requirements/dev.txt)
	if stamped tools "$$tools"; then exit 0; fi
	lock
	if stamped tools "$$tools"; then exit 0; fi
	echo "    installing pytest, ruff, mypy and clang-format ..."
	touch "$$VENV/.busy"
	pip_install -r requirements/dev.txt
	stamp tools "$$tools"
	rm "$$VENV/.busy"

setup-horovod: setup-dev
	@$(FUNCTIONS)
	packages=$$(cksum <requirements/horovod.txt)
	if stamped horovod "$$packages"; then exit 0; fi
	lock
	if stamped horovod "$$packages"; then exit 0; fi
	echo "    compiling Horovod (2 to 8 minutes) ..."
	pip_install -r requirements/horovod.txt
	export CMAKE_POLICY_VERSION_MINIMUM=3.5 HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1
	export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1
	export PATH="$$PWD/$$VENV/bin:$$PATH"  # cmake
	pip_install --no-build-isolation horovod==0.28.1
	stamp horovod "$$packages"
