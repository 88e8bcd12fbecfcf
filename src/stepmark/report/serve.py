"""Serves the report of a run to browsers on this machine, where it loads itself again while the run goes on."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from stepmark.errors import StepmarkError, UsageError
from stepmark.report.history import find_runs
from stepmark.report.page import make_page, read_histories
from stepmark.trainer.run_folder.status import RUNNING, STATUS, RunStatus

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # what a browser may call this server
ASK_EVERY = 3  # seconds after which a page asks whether there is a newer one
ANYWAY_AFTER = 60  # seconds: liveness changes without any file's doing so
WATCHED = ("metrics.jsonl", "events.jsonl", "evaluations.jsonl", STATUS, "checkpoint-*", "system/*.jsonl")


class LivePage:
    """The newest page of the runs in some folders, made again when their files have changed.

    Raises UsageError where a folder is not a run's and contains none.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None
        self.page()

    def version(self) -> str:
        """Changes when the page would."""
        found = [str(int(time.time()) // ANYWAY_AFTER)] if self._says_running() else []
        for folder in self._runs():
            for path in sorted(path for pattern in WATCHED for path in folder.glob(pattern)):
                try:
                    stat = path.stat()
                except OSError:  # deleted in the meantime
                    continue
                found.append(f"{path} {stat.st_mtime_ns} {stat.st_size}")
        return hashlib.blake2b("\n".join(found).encode(), digest_size=12).hexdigest()

    def _runs(self) -> list[Path]:
        return [run for folder in self._folders for run in find_runs(folder)]

    def _says_running(self) -> bool:
        """Whether a run's last status is that it trains, which is so of one that was killed as well."""
        return any(RunStatus.read(folder).state == RUNNING for folder in self._runs())

    def page(self) -> bytes:
        """The page as it is now."""
        version = self.version()
        with self._lock:
            if self._made is None or self._made[0] != version:
                histories = read_histories(self._folders[0], self._folders[1:])
                live = {"version": version, "seconds": ASK_EVERY}
                self._made = version, make_page(histories, self._folders, live).encode()
            return self._made[1]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A browser that has gone is none of the server's business."""


def open_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server on the loopback interface; port 0 is any free one.

    Raises UsageError for a folder that is not a run's, or a port that is not one, and StepmarkError for one in use.
    """
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port: should be from 0 to 65535, and is {port}")
    live = LivePage(folders)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", HOST).partition(":")[0] not in NAMES:
                self.send_error(403)  # a name that a foreign page has made to lead here
            elif self.path == "/":
                self._page()
            elif self.path == "/version":
                self._answer(live.version().encode(), "text/plain")
            else:
                self.send_error(404)

        def _page(self) -> None:
            try:
                self._answer(live.page(), "text/html; charset=utf-8")
            except StepmarkError as error:  # the folder is gone, for instance
                self.send_error(500, explain=str(error))

        def _answer(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(content))),
                ("Cache-Control", "no-store"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Says nothing of requests."""

    try:
        return _Server((HOST, port), Handler)
    except OSError as error:
        raise StepmarkError(f"--port: {port} cannot be used ({error.strerror}); give another, or 0 for any") from error


def serve(folders: Sequence[Path], port: int) -> None:
    """Serves until Ctrl-C."""
    with open_server(folders, port) as server:
        print(f"http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
