"""Models and tokenizers that come with Python code: executed where the recipe says so, and never asked about."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.config.data_arguments import DataArguments
from stepmark.config.recipe import ModelArguments, Recipe
from stepmark.config.training_fields import TrainingFields
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import StepmarkError, UsageError
from stepmark.evaluation.restored_model import read_config
from stepmark.recipe.model import build_model, build_tokenizer, config_of
from tests.support.own_code import folder_with_own_code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a configuration, a model class and a tokenizer class of its own."""
    return folder_with_own_code(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def nobody_at_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked a question"))


def config_for(model: ModelArguments, tokenizer: Any = None) -> Any:
    data = DataArguments(dataset_name="python-stdlib", block_size=8)
    return config_of(Recipe(TrainingFields(), model, data), tokenizer or byte_tokenizer())


def refused(action: Any) -> str:
    with pytest.raises(StepmarkError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_code_that_comes_with_a_model_is_not_executed(folder: Path) -> None:
    name = str(folder)
    new = ModelArguments(config_name=name, tokenizer_name="bytes")
    loaded = ModelArguments(model_name_or_path=name, tokenizer_name="bytes")
    for arguments, field in ((new, "config_name"), (loaded, "model_name_or_path")):
        message = refused(lambda arguments=arguments: config_for(arguments))
        assert message.startswith(f"{field}: {name} comes with Python code of its own")
        assert "trust_remote_code: true" in message
    own = ModelArguments(model_name_or_path=name)
    assert refused(lambda: build_tokenizer(own)).startswith(f"tokenizer_name: {name} comes with Python code")
    with pytest.raises(UsageError, match="needs Python code that came with its model"):
        read_config(folder)


def test_code_that_is_trusted_is_executed(folder: Path) -> None:
    trusted = {"tokenizer_name": str(folder), "trust_remote_code": True}
    tokenizer = build_tokenizer(ModelArguments(config_name=str(folder), **trusted))
    assert type(tokenizer).__name__ == "TinyTokenizer"
    made = ModelArguments(config_name=str(folder), config_overrides={"n_layer": 2}, **trusted)
    new = build_model(made, config_for(made, tokenizer), 1)
    assert (type(new).__name__, len(new.transformer.h)) == ("TinyModel", 2)
    for source in ("config_name", "model_name_or_path"):
        arguments = ModelArguments(**{source: str(folder)}, **trusted)
        untrained = build_model(arguments, config_for(arguments, tokenizer), 1, reads_weights=False)
        assert type(untrained).__name__ == "TinyModel"  # there are no weights yet
    new.save_pretrained(folder)
    saved = ModelArguments(model_name_or_path=str(folder), **trusted)
    loaded = build_model(saved, config_for(saved, tokenizer), 1)
    assert type(loaded).__name__ == "TinyModel"
    assert torch.equal(loaded.transformer.wte.weight, new.transformer.wte.weight)


def test_a_hub_name_that_cannot_be_reached_is_an_error_of_one_line() -> None:
    for arguments in (
        ModelArguments(config_name="no-such-owner/no-such-model", tokenizer_name="bytes"),
        ModelArguments(model_name_or_path="no-such-owner/no-such-model", tokenizer_name="bytes"),
    ):
        with pytest.raises(UsageError, match="no-such-owner/no-such-model") as caught:
            config_for(arguments)
        assert "\n" not in str(caught.value)
