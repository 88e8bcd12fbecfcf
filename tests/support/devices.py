"""Which devices the tests run on."""

from __future__ import annotations

import importlib.util

import pytest

HAS_XLA = importlib.util.find_spec("torch_xla") is not None


def devices() -> list[object]:
    """Parameters for a test that runs eagerly on the CPU and lazily on XLA's CPU client."""
    return ["cpu", pytest.param("xla", marks=pytest.mark.xla)]
