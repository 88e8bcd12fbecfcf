"""A program for ranks that tells how many elements they send at a time."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from stepmark import Trainer, TrainingArguments
from stepmark.runtime.collectives import BridgeCollectives, GroupCollectives
from tests.support.programs import logged

SENDERS = {
    GroupCollectives: ("start_all_reduce", "start_reduce_scatter", "start_gather_in_place"),
    BridgeCollectives: ("all_reduce", "reduce_scatter", "all_gather"),
}
LENGTH, SAMPLES = 8, 8


def sent(options: dict[str, Any]) -> dict[str, Any]:
    """Trains 1.6 M parameters, none of which has more than a MiB. Returns the sizes of what was sent (elements), those
    of 1000 or more, and the losses. With `given`, the optimizer is the user's."""
    options = dict(options)
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=256, n_layer=2, n_head=4, vocab_size=64, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config)
    given = torch.optim.AdamW(model.parameters(), lr=1e-3) if options.pop("given", False) else None
    common: dict[str, Any] = {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3}
    args = TrainingArguments(**{**common, "per_device_train_batch_size": 2, "max_steps": 2, **options})
    tokens = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % 61
    trainer = Trainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens], optimizers=(given, None)
    )
    sizes: list[int] = []

    def counting(method: Any) -> Any:
        def call(self: Any, tensors: Any, *more: Any, **named: Any) -> Any:
            sizes.extend(each.numel() for each in ([tensors] if isinstance(tensors, Tensor) else tensors))
            return method(self, tensors, *more, **named)

        return call

    patches = [patch.object(kind, name, counting(getattr(kind, name))) for kind in SENDERS for name in SENDERS[kind]]
    for each in patches:
        each.start()
    trainer.train()
    for each in patches:
        each.stop()
    return {"sizes": [size for size in sizes if size >= 1000], "losses": logged(options["output_dir"])["losses"]}
