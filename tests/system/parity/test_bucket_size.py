"""`ddp_bucket_cap_mb`: how much ranks send at a time, whatever the optimizer and the device, with the same losses up to
the order in which squares are added for the gradient's norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from stepmark.runtime.collectives import BridgeCollectives, GroupCollectives
from tests.support.programs import logged
from tests.support.ranks import Ranks

MIB = 2**18  # float32 elements
CASES = [
    pytest.param({"device": "cpu"}, id="plain"),
    pytest.param({"device": "cpu", "zero_1": True}, id="ZeRO-1"),
    pytest.param({"device": "cpu", "given": True}, id="an optimizer of the user's"),
    pytest.param({"device": "cpu", "zero_1": True, "optim": "muon"}, id="whole parameters"),
    pytest.param({"device": "xla"}, id="lazy", marks=pytest.mark.xla),
    pytest.param({"device": "xla", "zero_1": True}, id="lazy ZeRO-1", marks=pytest.mark.xla),
]


@pytest.mark.parametrize("options", CASES)
def test_nothing_larger_is_sent(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    told = [{**options, "output_dir": str(tmp_path / name)} for name in ("default", "small")]
    told[1]["ddp_bucket_cap_mb"] = 1
    default, small = ranks.run("tests.system.parity.test_bucket_size:all_sent", told, nproc=2).check()[0]
    assert max(default["sizes"]) > 3 * MIB
    assert max(small["sizes"]) <= MIB
    assert list(small["losses"]) == list(default["losses"]) == ["1", "2"]
    rounding = 1e-5 if options.get("optim") == "muon" else 1e-6  # which orthogonalizes in bfloat16
    for step, values in default["losses"].items():
        assert small["losses"][step] == pytest.approx(values, rel=rounding)


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="^ddp_bucket_cap_mb: .* 0"):
        TrainingArguments(ddp_bucket_cap_mb=0)


# What ranks run


def all_sent(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [sent(options) for options in runs]


SENDERS = {
    GroupCollectives: ("start_all_reduce", "start_sum_in_order", "start_gather_in_place"),
    BridgeCollectives: ("all_reduce", "reduce_scatter", "all_gather"),
}
LENGTH, SAMPLES = 8, 8


def sent(options: dict[str, Any]) -> dict[str, Any]:
    """Trains 0.8 M parameters, none of which has more than a MiB. Returns the sizes of what was sent (elements), those
    of 1000 or more, and the losses. With `given`, the optimizer is the user's."""
    options = dict(options)
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=256, n_layer=1, n_head=4, vocab_size=64, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
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
