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
from mpi_job import BIN, Programs
from places import SUPPORT

ADDRESSES = ("10.213.77.1", "10.213.77.2")
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
    && mount --bind {folder}/.hosts /etc/hosts && $*"
"""


def ip(*arguments):
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=60, env=shell()
    ).stdout


def inside(name, *command):
    return ip("netns", "exec", name, *command)


def build(names):
    for name in names:
        try:
            ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            if not REFUSED.search(error.stderr):
                raise
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        # Without IPv6, whose search for duplicate addresses keeps a new interface busy for seconds.
        inside(name, "sh", "-c", "echo 1 | tee /proc/sys/net/ipv6/conf/*/disable_ipv6")
    ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
    for name, address in zip(names, ADDRESSES):
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        # A network that ends in its host and looks the same in both, as docker0 does. eth0 has to be named.
        ip("-n", name, "link", "add", "docker0", "type", "veth", "peer", "name", "container")
        ip("-n", name, "address", "add", "172.17.0.1/16", "dev", "docker0")
        for device in ("lo", "eth0", "docker0", "container"):
            ip("-n", name, "link", "set", device, "up")
    end = time.monotonic() + 60  # the kernel tells of a new cable within a second or so, and MPICH asks once
    while any(inside(name, "cat", "/sys/class/net/eth0/operstate") != "up\n" for name in names):
        assert time.monotonic() < end, "eth0 does not come up"
        time.sleep(0.02)


@pytest.fixture
def hosts():
    """The names of two namespaces. Whatever runs there ends with them."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip (iproute2) and unshare")
    names = [f"syncbn-{os.getpid()}-{i}" for i in (1, 2)]
    try:
        build(names)
        yield names
    finally:
        for name in [name for name in names if Path("/run/netns", name).exists()]:
            for pid in ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):  # it has ended since it was listed
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "delete", name)  # the cable goes with it


def traffic(host):
    """Bytes that it has received and sent."""
    folder = "/sys/class/net/eth0/statistics"
    return [int(n) for n in inside(host, "cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes").split()]


def test_two_hosts(hosts):
    """What crosses are statistics, gradients and features; an image of each batch alone would be 720,000 bytes."""
    before = traffic(hosts[1])
    with Programs() as programs:
        known = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, hosts))
        Path(programs.folder, ".hosts").write_text("127.0.0.1 localhost\n" + known)
        ssh = programs.folder / ".ssh"
        ssh.write_text(SSH.format(folder=programs.folder))
        ssh.chmod(0o755)
        mpiexec = [BIN / "mpiexec", "-n", 2, "-hosts", ",".join(hosts), "-launcher-exec", ssh]
        program = [sys.executable, SUPPORT / "gradients_worker.py", "trains_two_nets+shuffled_keys"]
        # For MPICH's messages; its option -iface is not.
        settings = {"UCX_NET_DEVICES": "eth0", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        codes = programs.wait([programs.start("job", [ssh, hosts[0], *mpiexec, *program], settings)], 100)
        said = programs.output()
    assert codes == [0] and "OK 0" in said and "OK 1" in said, said
    crossed = [after - first for after, first in zip(traffic(hosts[1]), before)]
    assert min(crossed) > 55_000 and max(crossed) < 450_000, crossed
