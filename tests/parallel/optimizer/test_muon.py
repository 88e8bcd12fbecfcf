"""Muon in a run: which parameters it updates, torch's own as the reference, resuming, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from stepmark.runtime.eager import EagerRuntime
from stepmark.training.optimizer import build_optimizer, decays_by_default, parameter_kinds
from tests.support.programs import Blocks, tiny_model
from tests.trainer.test_training_loop import StopsAt

CPU = EagerRuntime(torch.device("cpu"))
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder), optim="muon", optim_args="momentum=0.9,ns_steps=4", max_steps=4, learning_rate=1e-2,
        save_steps=2, per_device_train_batch_size=2, disable_tqdm=True, device="cpu", resume_from_checkpoint=True,
        weight_decay=0.1, max_grad_norm=0.0, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    model = tiny_model(dropout=0.0).to(getattr(torch, args.dtype))
    return Trainer(model, args, train_dataset=Blocks(8), callbacks=list(callbacks))


def test_a_run_is_a_loop_with_torchs_muon_and_adamw(tmp_path: Path) -> None:
    made, expected = trainer(tmp_path), tiny_model(dropout=0.0)
    batches: list[dict[str, Any]] = []
    made.model.register_forward_pre_hook(lambda _, __, given: batches.append(given), with_kwargs=True)
    made.train()
    assert len(batches) == 4
    decays = decays_by_default(expected)
    blocks = {name: each for name, each in expected.named_parameters() if ".h." in name and each.dim() == 2}
    others = {name: each for name, each in expected.named_parameters() if name not in blocks}
    assert len(blocks) == 4
    muon = torch.optim.Muon(
        blocks.values(), lr=1e-2, weight_decay=0.1, momentum=0.9, ns_steps=4, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [each for name, each in others.items() if decays(name) == kind], "weight_decay": decay}
        for kind, decay in ((True, 0.1), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    for batch in batches:
        expected(**batch).loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(made.model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stopped_run_is_resumed_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    whole = trainer(tmp_path / "whole", dtype=dtype)
    whole.train()
    trainer(tmp_path / "parts", StopsAt(2), dtype=dtype).train()
    resumed = trainer(tmp_path / "parts", dtype=dtype)
    resumed.train()
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bert"])
def test_the_matrices_of_hidden_layers(name: str) -> None:
    config = AutoConfig.for_model(name, **SIZES)
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        model = kind.from_config(config)
        base = getattr(model, model.base_model_prefix)
        expected = {
            id(module.weight) for module in base.modules() if isinstance(module, nn.Linear)
        }  # fmt: skip
        matrices = parameter_kinds(model).hidden_matrices
        assert {id(each) for key, each in model.named_parameters() if key in matrices} == expected


class WithoutBase(nn.Module):
    """As T5: layers and head side by side."""

    base_model_prefix = "transformer"

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_a_head_beside_the_layers_is_no_hidden_matrix() -> None:
    kinds = parameter_kinds(WithoutBase())
    assert kinds.hidden_matrices == {"layer.weight"}
    assert kinds.embeddings == {"table.weight"}


def test_what_is_refused() -> None:
    model = tiny_model()
    named, kinds = list(model.named_parameters()), parameter_kinds(model)
    lazy: Any = SimpleNamespace(lazy=True, name="xla")
    with pytest.raises(UsageError, match="optim: muon changes its graph with every step, so xla cannot use it"):
        build_optimizer("muon", named, lazy, kinds=kinds)
    with pytest.raises(UsageError, match=r"kinds: muon .* pass kinds=parameter_kinds\(model\)"):
        build_optimizer("muon", named, CPU)
    with pytest.raises(UsageError, match="optim_args: muon does not accept {'moment': 0.9}"):
        build_optimizer("muon", named, CPU, kinds=kinds, options={"moment": 0.9})
