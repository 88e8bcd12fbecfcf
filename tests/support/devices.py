"""Which devices the tests run on."""

from __future__ import annotations

import importlib.util

import pytest

HAS_XLA = importlib.util.find_spec("torch_xla") is not None


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def devices(*xla_marks: pytest.MarkDecorator) -> list[object]:
    """Parameters for a test that runs eagerly on the CPU and on a GPU, and lazily on XLA's CPU client. `xla_marks` are
    more marks of the last."""
    return [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.cuda),
        pytest.param("xla", marks=[pytest.mark.xla, *xla_marks]),
    ]
