"""Programs for ranks: models, and layers of them, that return values of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from stepmark import Trainer
from stepmark.errors import StepmarkError
from tests.support.hook_programs import BATCH, VOCABULARY, Blocks, arguments, outcome, small_llama

FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "fsdp, layers": (2, {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Layer"]}}),
    "fsdp, one group": (2, {"fsdp": "full_shard"}),
    "shard_grad_op": (2, {"fsdp": "shard_grad_op"}),
    "compile": (1, {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "pp": (2, {"pipeline_parallel_size": 2}),
    "ep": (2, {"expert_parallel_size": 2}),
}
KINDS = ("dict", "tuple", "dataclass", "ModelOutput", "object", "scalar")


@dataclass
class AsDataclass:
    loss: Tensor
    logits: Tensor


class AsObject:
    """No pytree."""

    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


def returned(kind: str, loss: Tensor, logits: Tensor) -> Any:
    if kind == "scalar":
        return loss
    makers: dict[str, Any] = {
        "dict": lambda loss, logits: {"loss": loss, "logits": logits},
        "tuple": lambda *both: both,
        "dataclass": AsDataclass,
        "ModelOutput": lambda loss, logits: CausalLMOutput(loss=loss, logits=logits),
        "object": AsObject,
    }
    return makers[kind](loss, logits)


class Layer(nn.Module):
    """A residual layer that takes and returns a value of the kind; there a scalar is a plain tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 30), nn.Linear(30, 16)

    def forward(self, value: Any) -> Any:
        hidden = _hidden(value)
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden if self.kind == "scalar" else returned(self.kind, hidden, hidden.detach())


def _hidden(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        return value["loss"]
    return value[0] if isinstance(value, tuple) else value.loss


class Net(nn.Module):
    """Of no library; its layers and itself return values of the kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList([Layer(kind) for _ in range(2)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        value = self.table(input_ids)
        for layer in self.layers:
            value = layer(value)
        logits = self.head(_hidden(value))
        return returned(self.kind, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class _OfKind:
    """Makes the outputs of a model of transformers values of the kind."""

    kind: str

    def forward(self, *args: Any, **inputs: Any) -> Any:
        out = super().forward(*args, **inputs)  # type: ignore[misc]
        return returned(self.kind, out.loss, out.logits)


def made(form: str, kind: str) -> nn.Module:
    if form not in ("pp", "ep"):
        return Net(kind)
    base: Any = LlamaForCausalLM if form == "pp" else MixtralForCausalLM
    if form == "pp":
        config = small_llama().config
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 4}
        config = MixtralConfig(vocab_size=VOCABULARY, num_attention_heads=2, num_key_value_heads=2, **sizes)
    torch.manual_seed(3)
    return type(base.__name__, (_OfKind, base), {"kind": kind, "__module__": __name__})(config)


def outputs(folder: str, form: str, of: str, kinds: list[str]) -> list[Any]:
    """Of each kind: the losses and the final model of a training with the model that `of` needs, in a few numbers, or
    the error of all ranks."""
    ranks, options = FORMS[form]
    found = []
    for number, kind in enumerate(kinds):
        own = Path(folder, str(number))
        args = arguments(own, ranks, **{"save_strategy": "no", "max_steps": 3, **options})
        try:
            trainer = Trainer(made(of, kind), args, train_dataset=Blocks(), eval_dataset=Blocks())
            trainer.train()
            found.append(outcome(trainer, own))
        except StepmarkError as error:
            found.append(str(error))
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps <= BATCH
    return found
