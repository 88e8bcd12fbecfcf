"""Configs of models from elsewhere: what they name as code needs consent, and what cannot be made is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepmark.checkpoint import host_memory
from stepmark.errors import CheckpointMismatch, FileRefused, UsageError
from stepmark.model_folder.model_config import check_counts, check_fits, few_modules, load_config, refuse_kernels

CONFIG: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8}
KERNELS = [
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
]


def folder_of(path: Path, **fields: Any) -> str:
    (path / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return str(path)


@pytest.mark.parametrize("field", KERNELS)
@pytest.mark.parametrize("nested", [False, True])
def test_an_implementation_on_the_hub_needs_consent(tmp_path: Path, field: str, nested: bool) -> None:
    value: Any = {"": "stranger/kernel"} if nested else "stranger/kernel"
    name = folder_of(tmp_path, **({"text_config": {field: value}} if nested else {field: value}))
    with pytest.raises(UsageError, match=f"{field}.*--trust_remote_code"):
        load_config(name, False)


@pytest.mark.parametrize("value", ["sdpa", "eager", None, "flash_attention_2"])
def test_implementations_of_transformers_need_none(tmp_path: Path, value: str | None) -> None:
    refuse_kernels({"_attn_implementation": value, "name": "stranger/model"}, tmp_path)


def test_a_config_is_read(tmp_path: Path) -> None:
    assert load_config(folder_of(tmp_path), False).n_embd == 16


@pytest.mark.parametrize("fields", [{"n_layer": 1 << 20}, {"a": {"num_experts": 1 << 30}}, {"layers": [0] * 5000}])
def test_counts_that_no_model_has(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointMismatch, match="tensors"):
        check_counts(Path("config.json"), fields, 0)
    check_counts(Path("config.json"), fields, 1 << 30)


def test_a_class_that_makes_too_many_modules_is_stopped() -> None:
    with pytest.raises(CheckpointMismatch, match="more than 5 modules"), few_modules(5):
        nn.Sequential(*(nn.Identity() for _ in range(6)))
    nn.Sequential(*(nn.Identity() for _ in range(6)))


def test_a_model_larger_than_the_memory_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fits(lambda: nn.Linear(16, 16), tmp_path)
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: {"machine": 1000})
    with pytest.raises(CheckpointMismatch, match=r"config.json describes a model of .* memory are free"):
        check_fits(lambda: nn.Linear(16, 16), tmp_path)


def test_what_a_constructor_raises_is_one_line(tmp_path: Path) -> None:
    def make() -> nn.Module:
        raise KeyError("no such\nactivation")

    state = torch.random.get_rng_state()
    with pytest.raises(CheckpointMismatch, match=r"config.json describes no model that can be made: KeyError"):
        check_fits(make, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_config_that_leads_out_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").symlink_to(folder_of(tmp_path) + "/config.json")
    with pytest.raises(FileRefused, match=r"config.json is a link that is not followed"):
        load_config(str(tmp_path / "folder"), False)
