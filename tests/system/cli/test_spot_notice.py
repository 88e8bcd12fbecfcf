"""examples/spot_notice.py, with a server in place of AWS's metadata service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.metadata_service import ACTION, Service, metadata_service
from tests.support.ranks import ROOT

AGENT = "import sys; from examples import spot_notice as it; it.EVERY = 0.05; sys.exit(it.main(sys.argv[1:]))"
# Says that it has begun, by asking the server, and ends as an interrupted run.
COMMAND = """
import signal, sys, urllib.request
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda number, _: sys.exit(75 if number == signal.SIGTERM else int(number)))
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1] + "/begun").read()
signal.pause()
"""


@pytest.fixture
def service() -> Iterator[Service]:
    with metadata_service() as server:
        yield server


def start(service: Service, *command: str) -> subprocess.Popen[str]:
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address, "http_proxy": "http://127.0.0.1:9"}
    words = [sys.executable, "-c", AGENT, *command]
    return subprocess.Popen(words, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def agent(service: Service, *command: str) -> tuple[int, str]:
    """Its exit code, and what it wrote."""
    process = start(service, *command)
    _, written = process.communicate(timeout=60)
    return process.returncode, written


def test_a_notice_becomes_a_signal(service: Service) -> None:
    done = agent(service, sys.executable, "-c", COMMAND, service.address)
    assert done == (75, f"spot notice: {json.dumps(ACTION)}\n")
    assert service.statuses[-1] == 200
    assert set(service.statuses[:-1]) <= {404}


def test_without_a_notice_or_a_service_the_command_ends_by_itself(service: Service) -> None:
    done = agent(service, sys.executable, "-c", "import sys, time; time.sleep(0.3); sys.exit(3)")
    assert done == (3, "")
    assert set(service.statuses) == {404}
    service.answers = False
    assert agent(service, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)") == (137, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_signals_to_the_agent_reach_the_command(service: Service, number: signal.Signals) -> None:
    """Slurm sends SIGUSR1 to its tasks, Batch and Kubernetes send SIGTERM to the first process of a container."""
    service.announces = False
    process = start(service, sys.executable, "-c", COMMAND, service.address)
    assert service.begun.wait(60)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (75 if number == signal.SIGTERM else number)
