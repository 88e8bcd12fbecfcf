"""Two machines for tests: network, host name and /etc/hosts of their own in namespaces of this one, with a link."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "fabric0"


def available() -> bool:
    """Whether this process may make namespaces."""
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    return tools and subprocess.run(["unshare", "-n", "-u", "-m", "true"], capture_output=True).returncode == 0


@dataclass(frozen=True)
class Node:
    """One machine; `process` holds its namespaces open."""

    name: str
    process: subprocess.Popen[bytes]

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, run on this machine."""
        return ["nsenter", "-t", str(self.process.pid), "-n", "-u", "-m", *command]

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
        """Starts a process on this machine, in a session of its own."""
        return subprocess.Popen(
            self.command(command),
            env=dict(environment),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@contextlib.contextmanager
def two_nodes(folder: Path, hosts: Mapping[str, str]) -> Iterator[tuple[Node, Node]]:
    """The machines `node-a` and `node-b`; `hosts` is what each one's /etc/hosts says."""
    with contextlib.ExitStack() as stack:
        nodes = tuple(_node(stack, name, folder, hosts[name]) for name in ("node-a", "node-b"))
        first, second = nodes
        _ip("link", "add", "name", "smv0", "netns", str(first.process.pid), "type", "veth", "peer", "name", "smv1",
            "netns", str(second.process.pid))  # fmt: skip
        for node, link, address in zip(nodes, ("smv0", "smv1"), ADDRESSES, strict=True):
            for arguments in (
                ["link", "set", "lo", "up"],
                ["link", "set", link, "name", INTERFACE],
                ["addr", "add", f"{address}/24", "dev", INTERFACE],
                ["link", "set", INTERFACE, "up"],
            ):
                subprocess.run(node.command(["ip", *arguments]), check=True)
        yield first, second


def _node(stack: contextlib.ExitStack, name: str, folder: Path, hosts: str) -> Node:
    file = folder / f"hosts-{name}"
    file.write_text(hosts)
    ready = folder / f"ready-{name}"
    script = f"hostname {name} && mount --bind {file} /etc/hosts && touch {ready} && exec sleep 3600"
    process = subprocess.Popen(["unshare", "-n", "-u", "-m", "sh", "-c", script])
    stack.callback(_end, process)
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.01)
    return Node(name, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
