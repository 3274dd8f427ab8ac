"""Reads and writes all variables of the environment that the package uses; docs/state.md has their defaults."""

from __future__ import annotations

import os

#: Only this module reads them. The native core reads ``MXNET_ENGINE_TYPE``.
READ = (
    "DMLC_NUM_SERVER",
    "DMLC_NUM_WORKER",
    "DMLC_PS_ROOT_PORT",
    "DMLC_PS_ROOT_URI",
    "DMLC_ROLE",
    "GLUON_SYNCBN_ANY_ARCHITECTURE",
    "GLUON_SYNCBN_LOG",
    "GLUON_SYNCBN_OPERATOR",
    "GLUON_SYNCBN_SHARED_MEMORY",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_SIZE",
    "LD_LIBRARY_PATH",
    "MXNET_LIBRARY_PATH",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_NTASKS",
    "SLURM_STEP_ID",
    "XDG_CACHE_HOME",
)
#: Settings of MXNet, which it reads when it first needs them.
WRITTEN = ("MXNET_CPU_PARALLEL_RAND_COPY", "MXNET_EXEC_INPLACE_GRAD_SUM_CAP")


def read(variable: str) -> str:
    """Returns a variable's value, empty if it is not set."""
    if variable not in READ + WRITTEN:
        raise KeyError(f"{variable} is missing in gluon_syncbn/system/environment.py")
    return os.environ.get(variable, "")


def at_least(variable: str, value: int) -> bool:
    """Raises a variable to ``value``; a larger value stays. Returns whether it was raised."""
    current = read(variable)
    if current.isdigit() and int(current) >= value:
        return False
    os.environ[variable] = str(value)
    return True
