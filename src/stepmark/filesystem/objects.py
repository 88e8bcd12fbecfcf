"""Objects in a bucket (S3; by the same client Google Cloud Storage and Azure), through obstore.

An object is there with all of its bytes, or not at all; nothing is renamed. Every request has a deadline, and is
repeated after errors that may pass, with growing pauses. What fails is raised as an OSError that names the object.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate, chain
from typing import Any, NamedTuple

from stepmark.errors import UsageError
from stepmark.filesystem.error_advice import explained, first_line
from stepmark.filesystem.local_paths import SCHEMES

REQUEST = 60.0  # seconds that a request may take, of at most PART bytes
REPEATED = 180.0  # seconds in which a request that fails is repeated
PART = 8 << 20  # bytes of a request; a larger object is sent in several
IN_FLIGHT = 4  # of them at a time, for each object
AWAY = "STEPMARK_BUCKET_AWAY"  # names a file of `stepmark drill`: while it exists, every request fails

_ERRORS = {  # by the answer's status
    "401": (errno.EACCES, "renew the credentials, or set them"),
    "403": (errno.EACCES, "see to the permissions of these credentials"),
    "404": (errno.ENOENT, ""),
    "409": (errno.EEXIST, ""),
    "412": (errno.EEXIST, ""),
}
_KINDS = {"FileNotFoundError": "404", "AlreadyExistsError": "409", "PreconditionError": "412"}  # of the client's errors
_STATUS = re.compile(r"status code: (\d+)")
_UNANSWERED = re.compile(r"performing (\w+) (\w+://[^/?\s]+).*HTTP error: error sending request", re.S)
_SAID = re.compile(r"<Code>(\w+)</Code>\s*<Message>([^<]*)")


class Stored(NamedTuple):
    """An object: its name, size in bytes, and when it was written, in seconds since the Unix epoch."""

    name: str
    size: int
    time: float


class Bucket:
    """The objects whose names begin with the path of `url`, such as `s3://bucket/run`; names are relative to it.

    Credentials, region and endpoint are those that the client finds: environment variables (`AWS_REGION`,
    `AWS_ENDPOINT_URL`, …), or the machine's or the container's role.
    """

    def __init__(self, url: str) -> None:
        """Sends nothing. Raises UsageError for what is no address or lacks a setting, and where obstore is missing."""
        self.url = url.rstrip("/")
        scheme, _, rest = url.partition("://")
        if scheme not in SCHEMES or not re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*(/|$)", rest):
            raise UsageError(f"{url}: is no address of object storage: {'://BUCKET, '.join(SCHEMES)}://BUCKET")
        if not rest.isprintable() or re.search(r"[#?%\\]|//|(^|/)\.{1,2}(/|$)", rest):
            raise UsageError(f"{url}: has a part that addresses do not mean literally: #, ?, %, \\, //, . or ..")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise UsageError(f"{url}: object storage needs the package obstore; pip install 'stepmark[s3]'") from None
        pause, most = timedelta(seconds=0.1), timedelta(seconds=10)
        self._client = obstore
        with explained(lambda error: UsageError(f"{url}: {first_line(error)}")):  # such as an account that is missing
            self._store: Any = from_url(
                self.url,
                client_options={
                    "timeout": timedelta(seconds=REQUEST),
                    "connect_timeout": timedelta(seconds=10),
                    "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
                },
                retry_config={
                    "backoff": {"init_backoff": pause, "max_backoff": most, "base": 2},
                    "max_retries": 10,
                    "retry_timeout": timedelta(seconds=REPEATED),
                },
            )

    def address(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @contextmanager
    def _request(self, name: str) -> Iterator[None]:
        """Turns the client's errors into OSErrors."""
        if os.path.exists(os.environ.get(AWAY, "")):
            raise OSError(errno.ENETUNREACH, "a drill has taken the bucket away", self.address(name))
        try:
            yield
        except (self._client.exceptions.BaseError, FileNotFoundError) as error:
            status, answer = (each.search(str(error)) for each in (_STATUS, _SAID))
            kind = _KINDS.get(type(error).__name__, "")
            number, advice = _ERRORS.get(status[1] if status else kind, (errno.EREMOTEIO, ""))
            said = f"{answer[2].rstrip('.')} ({answer[1]})" if answer else str(error).split("Debug source:")[0]
            if "//169.254." in said:  # where a machine of the cloud would have told its role's
                number, said = errno.EACCES, "no credentials were found"
                advice = "set them, or give this machine a role"
            if not answer and (sent := _UNANSWERED.search(said)):
                said, advice = f"{sent[2]} does not answer ({sent[1]})", "check the network, and AWS_ENDPOINT_URL"
            words = "; ".join(filter(None, (" ".join(said.split()), advice)))
            raise OSError(number, words, self.address(name)) from None

    def create(self, name: str, data: bytes) -> str:
        """Makes an object, all of it in one request, and returns its tag. Raises FileExistsError where another one has
        the name; its own, where the answer to an earlier request was lost, is recognised by its bytes."""
        return self._put_if(name, data, None)

    def replace(self, name: str, data: bytes, tag: str) -> str:
        """Replaces the object that has this tag, and returns the new one. Raises FileExistsError where it is another
        one by now, FileNotFoundError where it is gone. `data` are bytes that nobody else writes."""
        return self._put_if(name, data, tag)

    def _put_if(self, name: str, data: bytes, tag: str | None) -> str:
        mode: Any = "create" if tag is None else {"e_tag": tag}
        for pause in (0.1, 0.4, 1.6, 6.4, 0.0):
            with suppress(FileExistsError), self._request(name):
                return str(self._client.put(self._store, name, data, mode=mode, use_multipart=False)["e_tag"])
            with suppress(FileNotFoundError):
                found, now = self.read_tagged(name)
                if found == data:
                    return now
                if now != tag:
                    break
            time.sleep(pause)  # 409: another request for it is under way
        raise FileExistsError(errno.EEXIST, "another object is there already", self.address(name))

    def put(self, name: str, data: bytes | Iterable[Any]) -> None:
        """Makes or replaces an object, of bytes, or of blocks that are sent in parts; a single one in one request."""
        blocks = iter([data] if isinstance(data, bytes) else data)
        first, second = next(blocks, b""), next(blocks, None)
        with self._request(name):
            if second is None:
                self._client.put(self._store, name, first, use_multipart=False)
            else:
                parts = chain([first, second], blocks)
                self._client.put(self._store, name, parts, chunk_size=PART, max_concurrency=IN_FLIGHT)

    def read(self, name: str) -> bytes:
        """A small object. Raises FileNotFoundError."""
        return self.read_tagged(name)[0]

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """A small object, and the tag that it has until it is replaced. Raises FileNotFoundError."""
        with self._request(name):
            found = self._client.get(self._store, name)
            return bytes(found.bytes()), str(found.meta["e_tag"])

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; one that is gone is no error."""
        if names:
            with self._request(names[0]):
                self._client.delete(self._store, list(names))

    def check(self) -> None:
        """Tries what a run needs, on a small object of its own. Raises OSError for what does not work."""
        name = f".stepmark/check-{secrets.token_hex(8)}"
        tag = self.create(name, b"created")
        try:
            try:
                self.replace(name, b"replaced", self.replace(name, b"changed", tag))
                self.replace(name, b"replaced again", tag)
            except FileExistsError:
                if self.read(name) == b"replaced":
                    self.objects(name)
                    return
            raise OSError(errno.ENOTSUP, "this store ignores the conditions of writes", self.url)
        finally:
            self.delete([name])

    def blocks(self, name: str, size: int) -> Iterator[Any]:
        """An object of `size` bytes, in order, a few requests ahead: buffers of at most PART bytes."""

        def fetch(begin: int) -> Any:
            with self._request(name):
                return self._client.get_range(self._store, name, start=begin, end=min(begin + PART, size))

        ahead: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="stepmark-download") as pool:
            try:
                for begin in range(0, size, PART):
                    ahead.append(pool.submit(fetch, begin))
                    if len(ahead) > IN_FLIGHT:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for each in ahead:
                    each.cancel()

    def stat(self, name: str) -> Stored | None:
        """An object without its bytes; None where there is none."""
        try:
            with self._request(name):
                return _stored(self._client.head(self._store, name))
        except FileNotFoundError:
            return None

    def objects(self, prefix: str = "") -> list[Stored]:
        """All objects whose names begin with a folder's name, in order; a list that fails raises."""
        with self._request(prefix):
            found = sorted(_stored(each) for some in self._client.list(self._store, prefix or None) for each in some)
        # Consoles and tools make objects for folders, of whose names the client drops the slash.
        folders = {prefix, *(path for each in found for path in accumulate(each.name.split("/")[:-1], "{}/{}".format))}
        return [each for each in found if each.size or each.name not in folders]

    def inside(self) -> tuple[list[str], list[Stored]]:
        """The names of folders, and the objects that are in none."""
        with self._request(""):
            listed = self._client.list_with_delimiter(self._store)
        return sorted(each.rsplit("/", 1)[-1] for each in listed["common_prefixes"]), [*map(_stored, listed["objects"])]


def _stored(found: Any) -> Stored:
    return Stored(found["path"], found["size"], found["last_modified"].timestamp())
