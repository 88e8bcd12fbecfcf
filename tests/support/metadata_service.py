"""A stand-in for the metadata service of an EC2 instance (IMDSv2), which announces the instance's end when told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACTION = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}


class Service(ThreadingHTTPServer):
    """Announces the end once `begun` is set, which a request for /begun does, to whoever has a token of version 2."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.announces, self.begun = True, True, threading.Event()
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
            status = 200 if self.server.announces and self.server.begun.is_set() else 404
            self.server.statuses.append(status)
            self.answer(status, json.dumps(ACTION))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def metadata_service() -> Iterator[Service]:
    with Service() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
