#!/usr/bin/env bash
# Compiles Horovod 0.28.1 with MXNet and MPI, for its DistributedTrainer beside kvstore='mpi', into the Python that has
# MXNet, mpi4py and the mpich of requirements/run.txt:
#     tools/install_horovod.sh PYTHON [further arguments of pip install]
# It takes the place of one that is there or in pip's cache, which may be compiled otherwise. 2 to 8 minutes; needs g++
# and what requirements/horovod.txt lists, of which it installs what is missing.
set -euo pipefail
python=$1
shift
"$python" -m pip install "$@" -r "${BASH_SOURCE[0]%/*}/../requirements/horovod.txt"
bin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))') # where pip puts cmake and mpicxx
PATH="$bin:$PATH" CMAKE_POLICY_VERSION_MINIMUM=3.5 HOROVOD_WITH_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 \
    HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    "$python" -m pip install "$@" --no-cache-dir --force-reinstall --no-build-isolation --no-deps horovod==0.28.1
