"""Ranks on two hosts with a slow network between them: network namespaces of this machine with a limited link."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # the namespaces are those of the tests

from tests.support import two_nodes  # noqa: E402

PORT = 29517
QUEUE = ["burst", "256kb", "latency", "50ms"]  # of the token bucket: what an Ethernet adapter keeps


def run_on_two_hosts(command: Sequence[str], ranks: int, gigabits: float, environment: dict[str, str]) -> int:
    """Runs a Python program (its file and arguments) with half of the ranks on each of two hosts, which are connected
    by `gigabits` per second in each direction; the exit code. Needs the right to make network namespaces."""
    hosts = "".join(
        f"{address} {name}\n" for address, name in zip(two_nodes.ADDRESSES, ("node-a", "node-b"), strict=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        everywhere = dict.fromkeys(("node-a", "node-b"), f"127.0.0.1 localhost\n{hosts}")
        with two_nodes.two_nodes(Path(folder), everywhere) as nodes:
            for node in nodes:
                limit = ["tc", "qdisc", "add", "dev", two_nodes.INTERFACE, "root", "tbf", "rate", f"{gigabits}gbit"]
                subprocess.run(node.command([*limit, *QUEUE]), check=True)
            started = [
                subprocess.Popen(node.command(_launch(number, ranks // 2, command)), env=environment)
                for number, node in enumerate(nodes)
            ]
            codes = [process.wait() for process in started]
    return next((code for code in codes if code), 0)


def _launch(node: int, ranks: int, command: Sequence[str]) -> list[str]:
    address = f"--master_addr={two_nodes.ADDRESSES[0]}"
    count = ["--nnodes=2", f"--node_rank={node}", f"--nproc_per_node={ranks}"]
    script, *arguments = command  # a command on another host begins in the root folder
    program = [str(Path(script).resolve()), *arguments]
    return [sys.executable, "-m", "torch.distributed.run", *count, address, f"--master_port={PORT}", *program]


def bytes_sent(interface: str) -> int:
    """Bytes that the interface of this process's network namespace has sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (found,) = [line.partition(":")[2].split() for line in lines if line.partition(":")[0].strip() == interface]
    return int(found[8])
