from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest import mock

from tests.support.xla_flags import FASTER

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("XLA_FLAGS", FASTER)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background job; what tests start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import hypothesis
import pytest

from stepmark.runtime.versions import refused_peft
from tests.support import native
from tests.support.devices import HAS_XLA, has_cuda
from tests.support.nightly import mark_nightly
from tests.support.parameter_ids import parameter_id
from tests.support.ranks import EAGER_MODULES, Ranks, Zygote


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks nightly tests, skips those that lack a device, and lets each process of xdist begin with long ones."""
    mark_nightly(items)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    parts = [[item for item in items if ("tests/system/" in item.nodeid) is long] for long in (True, False)]
    shares = (
        (part[len(part) * n // workers : len(part) * (n + 1) // workers] for part in parts) for n in range(workers)
    )
    items[:] = [item for share in shares for part in share for item in part]
    for mark, available, reason in (
        ("xla", lambda: HAS_XLA, "torch_xla is not installed"),
        ("cuda", has_cuda, "torch sees no CUDA device"),
    ):
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and not available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are imported
    if not hasattr(config, "workerinput"):  # those of xdist have this process's
        zygote = Zygote(*EAGER_MODULES, *(["torch_xla"] if HAS_XLA else []))
        os.environ[ZYGOTE] = zygote.address
        config.add_cleanup(zygote.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without torch_xla, which transformers' Trainer would import: tests use it in ranks."""
    with mock.patch.dict(os.environ, USE_TORCH_XLA="0"):
        yield


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # what was imported stays: collecting need not look at it again, in this process and in forks of it


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which packages do not work together, where that explains failures of `make test-latest`."""
    if (refused := refused_peft()) is not None:
        terminalreporter.write_line(refused)


def pytest_make_parametrize_id(val: object) -> str | None:
    return parameter_id(val)


ZYGOTE = "STEPMARK_TESTS_ZYGOTE"

hypothesis.settings.register_profile("no deadlines", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("no deadlines")


@pytest.fixture(autouse=True)
def transformers_may_import_torch_xla() -> Iterator[None]:
    """Commands that run in this process tell transformers not to, which processes of later tests would inherit."""
    before = os.environ.get("USE_TORCH_XLA")
    yield
    if before is None:
        os.environ.pop("USE_TORCH_XLA", None)
    else:
        os.environ["USE_TORCH_XLA"] = before


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks for any device. torch_xla is imported in their parent if it is installed, but only started in the ranks."""
    with closing(Ranks(os.environ[ZYGOTE])) as started:
        yield started


@pytest.fixture(scope="session")
def native_ranks() -> Iterator[Ranks]:
    """Ranks whose torch has the simulated native device; they are skipped where it cannot be."""
    zygote = Zygote(*EAGER_MODULES, variables=native.environment())
    with closing(zygote), closing(Ranks(zygote.address)) as started:
        yield started


_PROXIES: list[Any] = []


@pytest.fixture(scope="module")
def proxy() -> Iterator[Any]:
    """A real object store on this machine, behind a proxy that fails requests: tests/support/buckets.py."""
    from tests.support.buckets import object_store  # which imports moto

    with object_store() as found:
        _PROXIES.append(found)
        yield found
        _PROXIES.remove(found)


@pytest.fixture(autouse=True)
def no_fault_is_left() -> Iterator[None]:
    """Whatever the order of tests."""
    yield
    for found in _PROXIES:
        found.fault = lambda *_: None
        found.requests.clear()
