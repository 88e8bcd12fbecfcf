"""The names of optimizers, and what they agree with."""

from __future__ import annotations

import importlib.util

import pytest

from stepmark.config.optimizers import OPTIMIZERS, check_optimizer
from stepmark.config.refusals import refusals
from stepmark.errors import UsageError


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit"])
def test_a_library_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda key: None if key == "bitsandbytes" else find(key))
    with pytest.raises(UsageError, match=f"optim: {name} needs bitsandbytes, .* pip install bitsandbytes"):
        check_optimizer(name)
    check_optimizer("adafactor")


@pytest.mark.parametrize("name", refusals("optim"))
def test_another_optimizer_of_transformers_says_which_to_use(name: str) -> None:
    with pytest.raises(UsageError, match=f"^optim: '{name}' is not supported; use adamw_"):
        check_optimizer(name)
    assert refusals("optim")[name].partition(",")[0] in OPTIMIZERS
