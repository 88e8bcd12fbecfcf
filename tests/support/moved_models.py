"""Programs for ranks: models that come on another device than they are trained on, or wrapped."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepmark import Trainer, TrainingArguments, evaluate
from tests.support.programs import Blocks, tiny_model


def losses_of(model: nn.Module, folder: str, device: str = "cpu") -> dict[str, Any]:
    """The losses of four steps, and of an evaluation."""
    args = TrainingArguments(
        output_dir=folder,
        device=device,
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Blocks(30), eval_dataset=Blocks(4))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": losses,
        "evaluated": trainer.evaluate()["eval_loss"],
        "devices": sorted({tensor.device.type for tensor in trainer.model.state_dict().values()}),
        "class": type(trainer.model).__name__,
        "tied": trainer.model.lm_head.weight is trainer.model.transformer.wte.weight,
    }


def trained_elsewhere(folder: str, pending: bool) -> dict[str, Any]:
    """A model that is on `xla`, with operations that have not run yet, and is trained on the CPU."""
    expected = losses_of(tiny_model(), f"{folder}/expected")
    model = tiny_model().to("xla")
    parameters = list(model.transformer.parameters())
    if pending:
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(2).mul_(0.5)
    moved = losses_of(model, f"{folder}/moved")
    same = all(a is b for a, b in zip(parameters, model.transformer.parameters(), strict=True))
    data, untrained = Blocks(4), tiny_model().to("xla")
    evaluated = (
        evaluate(untrained, data, device="cpu")["eval_loss"],
        evaluate(tiny_model(), data, device="cpu")["eval_loss"],
    )
    return {"expected": expected, "moved": moved, "same": same, "evaluated": evaluated}


def wrapped(folder: str, device: str = "cpu") -> dict[str, Any]:
    """A model in DistributedDataParallel, and the same model without it."""
    import logging

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stepmark").addHandler(handler)
    expected = losses_of(tiny_model(), f"{folder}/expected", device)
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(tiny_model())
    found = losses_of(model, f"{folder}/found", device)
    again = evaluate(nn.parallel.DistributedDataParallel(tiny_model()), Blocks(4), device=device)["eval_loss"]
    return {"expected": expected, "found": found, "warnings": warnings, "again": again}
