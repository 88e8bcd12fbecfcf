"""Programs for ranks: Trainer runs of cases that are unlike each other, which give the same with stages as without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, EvalPrediction, TrainerCallback

from stepmark import Mesh, PadTo, Trainer, TrainingArguments, evaluate, load_for_parallelism
from tests.support.mesh_programs import accuracy
from tests.support.models import build, configuration
from tests.support.programs import LENGTH, VOCABULARY, Blocks

TIMES = ("runtime", "per_second", "time", "seconds", "memory", "mfu", "utilization", "flos")


class Uneven(torch.utils.data.Dataset):
    """Samples of 3 to 16 tokens, whose labels are ignored in places, in some everywhere."""

    def __init__(self, samples: int, seed: int = 0, labels: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, LENGTH + 1, (samples,), generator=generator).tolist()
        self.samples: list[dict[str, Tensor]] = []
        for index, length in enumerate(lengths):
            tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
            sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            if labels:
                sample["labels"] = torch.full_like(tokens, -100) if index % 5 == 3 else tokens.clone()
                sample["labels"][: index % 3] = -100
            self.samples.append(sample)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


class SeenLogs(TrainerCallback):
    """What callbacks are told, on this rank."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.substeps = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(timeless(logs))

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.substeps += 1


def timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not any(part in name for part in TIMES)}


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Position t predicts label t: the first label counts too."""
    logits = outputs.logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class OwnOptimizer(Trainer):
    """Makes the optimizer once the model is on its mesh."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=1e-3)
        return self.optimizer


def dropped(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return nn.functional.dropout(output, 0.2, layer.training)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """One run. `options`: those of TrainingArguments, and model (see `models.build`), frozen (a pattern of names), data
    ("uneven"), hooked (layers draw random numbers that neither they nor the configuration show), loss ("own"),
    optimizer ("given", "created"), patience, unlabelled (predict without labels), resume."""
    options = dict(options)
    model = build(**options.pop("model"))
    frozen = options.pop("frozen", None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not re.search(frozen, name))
    if options.pop("hooked", False):
        for layer in model.model.layers:
            layer.register_forward_hook(dropped)
    data = Uneven if options.pop("data", None) == "uneven" else Blocks
    patience, optimizer = options.pop("patience", None), options.pop("optimizer", None)
    loss, unlabelled = options.pop("loss", None), options.pop("unlabelled", False)
    resume, stop_at = options.pop("resume", False), options.pop("stop_at", None)
    seen = SeenLogs()
    defaults = {"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "logging_steps": 1}
    defaults |= {"learning_rate": 1e-3, "save_strategy": "no", "disable_tqdm": True, "device": "cpu"}
    args = TrainingArguments(**{**defaults, **options})
    made = torch.optim.NAdam(model.parameters(), lr=1e-3) if optimizer == "given" else None
    kind = OwnOptimizer if optimizer == "created" else Trainer
    padding = PadTo() if data is Uneven else None
    trainer = kind(
        model,
        args,
        padding,
        train_dataset=data(30),
        eval_dataset=data(7, seed=1),
        compute_metrics=own_metrics,
        compute_loss_func=own_loss if loss == "own" else None,
        callbacks=[seen, *([EarlyStoppingCallback(patience)] if patience else []), StopAt(stop_at)],
        optimizers=(made, None),
    )
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    predicted = trainer.predict(data(5, seed=2, **({"labels": False} if unlabelled else {})))
    trainer.save_model()
    saved = AutoModelForCausalLM.from_pretrained(args.output_dir)
    with torch.no_grad():
        logits = saved(input_ids=Blocks(2, seed=3).tokens).logits.float()
    return {
        "logs": seen.logs,
        "micro-batches": (seen.substeps + trainer.state.global_step) * trainer.mesh.data_parallel.size,
        "history": [timeless(each) for each in trainer.state.log_history],
        # counted from this rank's samples, padding included, which differ among data parallel ranks
        "flos": trainer.state.total_flos if trainer.mesh.data_parallel.size == 1 else None,
        "step": trainer.state.global_step,
        "best": [trainer.state.best_metric, Path(trainer.state.best_model_checkpoint or "").name],
        "metrics": timeless(metrics),
        "alone": evaluate(trainer.model, data(7, seed=1), batch_size=3, data_collator=padding)["eval_loss"]
        if loss is None
        else None,
        "predictions": None if predicted.predictions is None else unpadded(predicted.predictions).tolist(),
        "labels": None if predicted.label_ids is None else predicted.label_ids.tolist(),
        "logits": logits[:, -1].tolist(),
    }


def unpadded(predictions: Any) -> np.ndarray:
    return np.where(predictions == -100, 0, predictions).astype(float)


class StopAt(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def own_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return accuracy(prediction) if prediction.label_ids is not None else {}


def made_apart(folder: str) -> list[float]:
    """The checksum of the tied table on each rank of a Trainer, whose model each rank has made with its own seed."""
    mesh = Mesh.create(pipeline_parallel_size=2, device="cpu")
    torch.manual_seed(mesh.context.host.rank)
    with load_for_parallelism(mesh):
        model = AutoModelForCausalLM.from_config(configuration("gpt2"))
    args = TrainingArguments(
        output_dir=folder, device="cpu", pipeline_parallel_size=2, gradient_accumulation_steps=2, disable_tqdm=True
    )
    trainer = Trainer(model, args, train_dataset=Blocks(4))
    return [float(trainer.model.transformer.wte.weight.double().sum())]


def runs(folder: str, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several, each in a folder of its own."""
    return [run({**each, "output_dir": f"{folder}/{number}"}) for number, each in enumerate(options)]
