"""examples/spot_notice.py, with a server in place of AWS's metadata service."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ACTION = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}
AGENT = "import sys; from examples import spot_notice as it; it.EVERY = 0.05; sys.exit(it.main(sys.argv[1:]))"
# Says that it has begun, by asking the server, and ends as an interrupted run.
COMMAND = """
import signal, sys, urllib.request
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1] + "/begun").read()
signal.pause()
"""


class Service(ThreadingHTTPServer):
    """Announces the end once the command has begun, to whoever has a token of version 2."""

    def __init__(self, *, answers: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.begun = answers, threading.Event()
        self.statuses: list[int] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        asked = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
        self.answer(200 if asked and self.server.answers else 500, "a token")

    def do_GET(self) -> None:
        if self.path == "/begun":
            self.server.begun.set()
            self.answer(200, "")
        elif self.path != "/latest/meta-data/spot/instance-action":
            self.answer(500, "")
        elif self.headers["X-aws-ec2-metadata-token"] != "a token":
            self.answer(401, "")
        else:
            status = 200 if self.server.begun.is_set() else 404
            self.server.statuses.append(status)
            self.answer(status, json.dumps(ACTION))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def agent(service: Service, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address, "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run(
        [sys.executable, "-c", AGENT, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_a_notice_becomes_a_signal(service: Service) -> None:
    done = agent(service, sys.executable, "-c", COMMAND, service.address)
    assert (done.returncode, done.stderr) == (75, f"spot notice: {json.dumps(ACTION)}\n")
    assert service.statuses[-1] == 200
    assert set(service.statuses[:-1]) <= {404}


def test_without_a_notice_or_a_service_the_command_ends_by_itself(service: Service) -> None:
    done = agent(service, sys.executable, "-c", "import sys, time; time.sleep(0.3); sys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "")
    assert set(service.statuses) == {404}
    service.answers = False
    assert agent(service, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)").returncode == 137
