"""A real object store on this machine (moto's server), and a proxy before it that fails requests in every way.

A service decides about conditional writes one after another. moto looks first and writes later, so that of two requests
at once both may win: the proxy passes on one of them at a time."""

from __future__ import annotations

import http.client
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import boto3
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler

SECRET = "a-secret-that-nobody-may-see"
Request = tuple[str, str]  # method, and path with query


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the store. `fault` says what happens to one: None, a status to answer in its place, or

    - `cut before`, `cut after`: the connection ends before the store gets it, or after that, without an answer;
    - `twice`: the store gets it twice;
    - `late`: it is answered after `delay` seconds.
    """

    daemon_threads = True
    delay = 2.0

    def __init__(self, store: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self.requests: list[Request] = []
        self.fault: Callable[[int, Request], str | int | None] = lambda number, request: None
        self.lock = threading.Lock()
        self.conditional = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """A client that has given up is no error of the test."""


WSGIRequestHandler.disable_nagle_algorithm = True  # else each answer, sent in two pieces, takes 40 ms


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = (self.command, self.path)
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(request)
            fault = self.server.fault(number, request)
        if fault == "cut before":
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._answer(fault, [], f"<Error><Code>Fault{fault}</Code><Message>on purpose</Message></Error>".encode())
            return
        for _ in range(2 if fault == "twice" else 1):
            answer = self._pass_on(body)
        if fault == "late":
            time.sleep(self.server.delay)
        if fault == "cut after":
            self.close_connection = True
            return
        self._answer(*answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _pass_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.store, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        under_condition = any(name.lower() in ("if-match", "if-none-match") for name in headers)
        with self.server.conditional if under_condition else nullcontext(), closing(connection):
            connection.request(self.command, self.path, body, headers)
            with connection.getresponse() as answer:
                return answer.status, answer.getheaders(), answer.read()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(body)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def object_store() -> Iterator[Proxy]:
    """A store, behind a proxy, with the environment in which clients find it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = Proxy(f"{host}:{port}")
    found = {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    with mock.patch.dict("os.environ", found):
        yield proxy
    proxy.shutdown()
    proxy.server_close()
    server.stop()


def failing_each_once(fault: str | int, seen: set[Request]) -> Callable[[int, Request], str | int | None]:
    """Each request fails once, whatever a save's name is; `seen` gets them."""

    def once(_: int, sent: Request) -> str | int | None:
        request = sent[0], re.sub(r"[0-9a-f]{8}-\d{6}", "SAVE", sent[1].partition("uploadId")[0])
        if request in seen or (fault == 409 and request[0] != "PUT") or (fault == "late" and len(seen) > 6):
            return None
        seen.add(request)
        return fault

    return once


def make_bucket(proxy: Proxy) -> str:
    """The address of a new, empty bucket."""
    name = f"runs-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=f"http://{proxy.store}", region_name="us-east-1")
    client.create_bucket(Bucket=name)
    return f"s3://{name}"
