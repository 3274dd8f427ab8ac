"""Two hosts on one machine: network namespaces with an interface and an address each, joined by a cable.

What the processes share is this kernel's clock and files; everything that they tell each other crosses the cable.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environments import shell
from mpi_job import BIN
from places import PACKAGE, SUPPORT

ADDRESSES = ("10.213.77.1", "10.213.77.2")
LIMIT = 100  # seconds for a job
# What `ip netns add` says of a container without the right to it, and of a kernel without namespaces (EINVAL, ENOSYS).
REFUSED = re.compile("not permitted|denied|Read-only|Invalid argument|not implemented|not supported")
pytestmark = pytest.mark.timeout(200)

# In place of ssh, for mpiexec: enters the namespace of that name. Host name, /etc/hosts, System V memory
# and /dev/shm are its own too, so that no library can take the two for one machine.
SSH = """#!/bin/sh
host=
while :; do
    case $1 in -o|-p|-i) shift 2 ;; -*) shift ;; *) [ -n "$host" ] && break; host=$1; shift ;; esac
done
exec ip netns exec $host unshare --uts --ipc sh -c "hostname $host && mount -t tmpfs tmpfs /dev/shm \\
    && mount --bind {folder}/hosts /etc/hosts && $*"
"""


def ip(*arguments):
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=60, env=shell()
    ).stdout


class Hosts:
    """Two namespaces, and a job with a process in each."""

    def __init__(self, folder):
        self.folder, self.job = folder, None
        self.names = [f"syncbn-{os.getpid()}-{i}" for i in (1, 2)]
        known = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, self.names))
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + known)
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH.format(folder=folder))
        self.ssh.chmod(0o755)

    def build(self):
        for name in self.names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                if not REFUSED.search(error.stderr):
                    raise
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            # Without IPv6, whose search for duplicate addresses keeps a new interface busy for seconds.
            self.inside(name, "sh", "-c", "echo 1 | tee /proc/sys/net/ipv6/conf/*/disable_ipv6")
        first, second = self.names
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(self.names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            # A network that ends in its host and looks the same in both, as docker0 does. eth0 has to be named.
            ip("-n", name, "link", "add", "docker0", "type", "veth", "peer", "name", "container")
            ip("-n", name, "address", "add", "172.17.0.1/16", "dev", "docker0")
            for device in ("lo", "eth0", "docker0", "container"):
                ip("-n", name, "link", "set", device, "up")
        end = time.monotonic() + 60  # the kernel tells of a new cable within a second or so, and MPICH asks once
        while any(self.inside(name, "cat", "/sys/class/net/eth0/operstate") != "up\n" for name in self.names):
            assert time.monotonic() < end, "eth0 does not come up"
            time.sleep(0.02)

    def remove(self):
        """Whatever runs there ends, too."""
        for name in self.names:
            if Path("/run/netns", name).exists():
                for pid in ip("netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):  # it has ended since it was listed
                        os.kill(int(pid), signal.SIGKILL)
                ip("netns", "delete", name)  # the cable goes with it
        if self.job:
            self.job.wait(60)

    def inside(self, name, *command):
        return ip("netns", "exec", name, *command)

    def traffic(self):
        """Bytes that the second host has received and sent."""
        folder = "/sys/class/net/eth0/statistics"
        return [int(n) for n in self.inside(self.names[1], "cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes").split()]

    def start(self, *arguments):
        """Scenarios on both hosts, started on the first."""
        program = [sys.executable, str(SUPPORT / "gradients_worker.py"), *arguments]
        command = [BIN / "mpiexec", "-n", "2", "-hosts", ",".join(self.names), "-launcher-exec", self.ssh]
        own = {
            "PATH": os.pathsep.join([str(self.folder), str(BIN), os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",
            "UCX_NET_DEVICES": "eth0",  # for MPICH's messages; its option -iface is not
            "MPI_WORKER_REPORTS": str(self.folder),
        }
        with open(self.folder / "output", "w") as output:
            self.job = subprocess.Popen(
                [self.ssh, self.names[0], *command, *program],
                env=shell(SUPPORT, PACKAGE.parent, **own),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.job

    def output(self):
        return (self.folder / "output").read_text()


@pytest.fixture
def hosts(tmp_path):
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip (iproute2) and unshare")
    hosts = Hosts(tmp_path)
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.remove()


def test_two_hosts(hosts):
    """What crosses are statistics, gradients and features; an image of each batch alone would be 720,000 bytes."""
    before = hosts.traffic()
    job = hosts.start("trains_two_nets+shuffled_keys")
    assert job.wait(LIMIT) == 0, hosts.output()
    said = hosts.output()
    assert "OK 0" in said and "OK 1" in said
    crossed = [after - first for after, first in zip(hosts.traffic(), before)]
    assert min(crossed) > 55_000 and max(crossed) < 450_000, crossed
