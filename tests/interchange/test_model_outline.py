"""The outline of a model, as transformers' class has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepmark.errors import CheckpointMismatch
from stepmark.interchange import model_outline
from stepmark.interchange.model_outline import outline_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}


def test_another_process_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has a file with the name of a module that it imports: that must not run."""
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 1, "hidden_size": 24}
    (tmp_path / "transformers.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    assert model_outline._from_process(config, 30) == model_outline._outline(config, 30)


QWEN2 = {**SIZES, "model_type": "qwen2"}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 1, "hidden_size": 24}
QWEN3_MOE = {**SIZES, "model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 4}


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN2, "max_window_layers": 80},  # from which layer on a window is used
        {**QWEN3_MOE, "num_experts_per_tok": 2},  # whose experts are one tensor
        {**BERT, "num_depth_bins": 256, "hidden_size_per_layer_input": 512},
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_fields_that_count_no_tensors(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert outline_of(tmp_path / "config.json", 30).parameters


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"num_hidden_layers": 60_000}])
def test_a_model_of_very_many_layers_is_not_built(change: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BERT, **change}))
    with pytest.raises(CheckpointMismatch, match=r"config\.json.*(30 tensors|more than 4600 modules)"):
        outline_of(tmp_path / "config.json", 30)


def test_a_model_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "hidden_size": 7, "num_attention_heads": 2})
    )
    program = (
        "import sys; from pathlib import Path; from stepmark.interchange.model_outline import outline_of\n"
        "try: outline_of(Path(sys.argv[1]), 100)\nexcept Exception as error: print(type(error).__name__, error)\n"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "config.json")], capture_output=True, text=True, check=True
    )
    message, imported = found.stdout.splitlines()
    assert message.startswith(CheckpointMismatch.__name__)
    assert "config.json" in message
    assert imported == "False"
