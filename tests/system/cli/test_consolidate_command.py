"""`stepmark consolidate` as a user calls it: what transformers makes of the folder, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from stepmark.checkpoint import Checkpointer
from stepmark.cli.main import run
from stepmark.liveness.host_group import HostGroup
from stepmark.sharding.layout import Layout, annotate


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":  # tied embeddings
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes)).bfloat16()


def save_cut(rank: int, folder: str, kind: str, ranks: int) -> None:
    """Every matrix is cut in two, by rows or by columns in turn."""
    model = make(kind)
    for number, parameter in enumerate(model.parameters()):
        if parameter.dim() == 2 and ranks > 1:
            shape, dim = tuple(parameter.shape), number % 2
            half = shape[dim] // ranks
            lengths = tuple(half if d == dim else size for d, size in enumerate(shape))
            parameter.data = parameter.data.narrow(dim, rank * half, half).clone()
            annotate(parameter, Layout.box(shape, tuple(rank * half if d == dim else 0 for d in range(2)), lengths))

    def files(target: Path) -> None:
        model.config.save_pretrained(target)
        model.generation_config.save_pretrained(target)

    with Checkpointer(folder, group=HostGroup.of_processes()) as checkpointer:
        checkpointer.save(1, {"model": model}, files=files, block=True)


def test_what_goes_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_cut(0, str(tmp_path / "run"), "gpt2", 1)
    out = tmp_path / "out"
    for arguments, code, words in (
        ([str(tmp_path / "nowhere"), str(out)], 2, "neither a checkpoint"),
        ([str(tmp_path / "run"), str(tmp_path / "run")], 2, "is not an empty folder"),
        ([str(tmp_path / "run"), str(out), "--max-shard-size", "much"], 2, "--max-shard-size: 'much' is not a size"),
        ([str(tmp_path / "run"), str(out), "-f", "onnx"], 2, "invalid choice: 'onnx'"),
    ):
        assert run(["consolidate", *arguments]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert words in line
    weights = tmp_path / "run" / "checkpoint-1" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert run(["consolidate", str(tmp_path / "run"), str(out)]) == 1
    told = capsys.readouterr().err
    assert "model.safetensors: tensor" in told
    assert "does not match its checksum" in told
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_progress_and_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepmark.cli.progress.LINE_SECONDS", 0.0)
    save_cut(0, str(tmp_path / "run"), "gpt2", 1)
    assert (
        run(["consolidate", str(tmp_path / "run" / "checkpoint-1"), str(tmp_path / "out"), "--max-shard-size", "9KB"])
        == 0
    )
    assert " MB\n" in capsys.readouterr().err
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]  # tied: stored once, as transformers does
    assert "transformer.wte.weight" in index["weight_map"]
