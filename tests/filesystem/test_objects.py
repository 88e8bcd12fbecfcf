"""Objects of a real store: what is there, what is made once, and what its errors say."""

from __future__ import annotations

import os
from typing import Any

import boto3
import pytest

from stepmark.errors import UsageError
from stepmark.filesystem import objects
from stepmark.filesystem.objects import PART, Bucket
from tests.support.buckets import SECRET, Proxy, Request, make_bucket

BLOCK = b"x" * (PART // 2 + 3)


@pytest.fixture
def bucket(proxy: Proxy) -> Bucket:
    return Bucket(f"{make_bucket(proxy)}/team/run/")


def names(bucket: Bucket, folder: str = "") -> list[tuple[str, int]]:
    return [(each.name, each.size) for each in bucket.objects(folder)]


def test_objects_are_there_with_all_of_their_bytes(bucket: Bucket) -> None:
    bucket.put("a/large", (BLOCK for _ in range(5)))
    bucket.put("a/small", iter([b"1", b"", b"2"]))
    bucket.put("a/none", iter([]))
    bucket.put("top", b"top")
    assert names(bucket) == [("a/large", 5 * len(BLOCK)), ("a/none", 0), ("a/small", 2), ("top", 3)]
    assert names(bucket, "a") == names(bucket)[:3]
    folders, beside = bucket.inside()
    assert (folders, [each.name for each in beside]) == (["a"], ["top"])
    assert b"".join(map(bytes, bucket.blocks("a/large", 5 * len(BLOCK)))) == 5 * BLOCK
    assert bucket.read("a/small") == b"12"
    found = bucket.stat("a/large")
    assert found is not None
    assert found.size == 5 * len(BLOCK)
    assert bucket.stat("a/larg") is None


def test_an_object_is_created_once(bucket: Bucket) -> None:
    bucket.create("manifest", b"first")
    bucket.create("manifest", b"first")
    with pytest.raises(FileExistsError, match="is there already"):
        bucket.create("manifest", b"second")
    assert bucket.read("manifest") == b"first"


@pytest.mark.parametrize("fault", ["cut before", "cut after", "twice", 500, 503, 409, "late"])
def test_an_object_is_created_where_its_request_fails(proxy: Proxy, bucket: Bucket, fault: Any) -> None:
    proxy.requests.clear()
    proxy.fault = lambda number, _: fault if number == 0 else None
    bucket.create("manifest", b"first")
    assert bucket.read("manifest") == b"first"


@pytest.mark.parametrize("fault", ["cut before", "cut after", "twice", 500, 503])
def test_every_request_of_a_large_object_may_fail_once(proxy: Proxy, bucket: Bucket, fault: Any) -> None:
    blocks = [os.urandom(len(BLOCK)) for _ in range(5)]
    seen: set[Request] = set()

    def once(_: int, request: Request) -> Any:
        first = request not in seen
        seen.add(request)
        return fault if first and not ("uploadId" in request[1] and request[0] == "POST") else None

    proxy.fault = once
    bucket.put("large", iter(blocks))
    assert b"".join(map(bytes, bucket.blocks("large", 5 * len(BLOCK)))) == b"".join(blocks)


def test_a_request_ends_at_its_deadline(proxy: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "REQUEST", 0.2)
    monkeypatch.setattr(objects, "REPEATED", 0.5)
    impatient = Bucket(bucket.url)
    proxy.fault = lambda *_: "late"
    with pytest.raises(OSError, match=r"http://127.0.0.1:\d+ does not answer \(GET\); check the network") as raised:
        impatient.read("any")
    assert raised.value.filename == f"{bucket.url}/any"


@pytest.mark.parametrize(("status", "kind"), [(403, PermissionError), (401, PermissionError), (400, OSError)])
def test_errors_name_the_object_and_no_secret(proxy: Proxy, bucket: Bucket, status: int, kind: type) -> None:
    proxy.fault = lambda *_: status
    with pytest.raises(kind, match=rf"on purpose \(Fault{status}\)") as raised:
        bucket.objects("folder")
    assert raised.value.filename == f"{bucket.url}/folder"
    assert SECRET not in f"{raised.value!r}"


def test_a_list_that_fails_is_never_empty(proxy: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "REPEATED", 0.3)
    impatient = Bucket(bucket.url)
    proxy.fault = lambda *_: 503
    for ask in (impatient.objects, impatient.inside):
        with pytest.raises(OSError, match="503"):
            ask()


def test_objects_that_stand_for_folders_are_none(proxy: Proxy) -> None:
    """Consoles and other tools make them, empty and with a slash at the end."""
    proxy.fault = lambda *_: None
    place = make_bucket(proxy)
    client = boto3.client("s3", endpoint_url=f"http://{proxy.store}", region_name="us-east-1")
    for name in ("run/", "run/logs/", "run/logs/deep/"):
        client.put_object(Bucket=place.removeprefix("s3://"), Key=name, Body=b"")
    bucket = Bucket(f"{place}/run")
    for name in ("logs/deep/a", "logs/deep-b", "logs/empty"):
        bucket.put(name, b"")
    for prefix in ("", "logs"):
        assert [each.name for each in bucket.objects(prefix)] == ["logs/deep-b", "logs/deep/a", "logs/empty"]


def test_a_missing_bucket_is_named(proxy: Proxy, bucket: Bucket) -> None:
    missing = Bucket("s3://no-such-bucket/run")
    for ask in (missing.objects, missing.inside, lambda: missing.create("a", b"1")):
        with pytest.raises(OSError, match="bucket does not exist"):
            ask()


@pytest.mark.parametrize("url", ["ftp://a/b", "s3://", "s3:", "/a/b", "s3:///a", "s3://a b/c", "s3://me:pw@a/b"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"no address of object storage: s3://BUCKET, gs://BUCKET, az:"):
        Bucket(url)


def test_a_setting_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match="^az://container/run: .*Account must be specified$"):
        Bucket("az://container/run")


@pytest.mark.parametrize("path", ["run#1", "a?b", "a%20b", "a//b", "a/../b", "./a", "a\\b", "a\nb"])
def test_a_name_that_would_be_changed_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="has a part that addresses do not mean literally"):
        Bucket(f"s3://bucket/{path}")


def test_other_names_are_literal(proxy: Proxy) -> None:
    place = make_bucket(proxy)
    for path in ("with space", "grün/日本", "a+b=c&d", "a:b", "~a"):
        Bucket(f"{place}/{path}").put("here", path.encode())
        assert Bucket(f"{place}/{path}").read("here") == path.encode()
    assert len(Bucket(f"{place}/x").objects()) == 0
