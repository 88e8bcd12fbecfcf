"""Programs for ranks: Trainer runs on meshes that return plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, EvalPrediction

from stepmark import Mesh, Trainer, TrainingArguments, parallelize
from stepmark.errors import UsageError
from tests.support.models import build
from tests.support.programs import Blocks, KillAt, StopsAt, logged

SHIFT = 1  # a causal model's label is the next token


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    guesses = prediction.predictions.argmax(-1)[:, :-SHIFT]
    labels = prediction.label_ids[:, SHIFT:]
    counted = labels != -100
    return {"accuracy": float((guesses == labels)[counted].mean())}


def make_trainer(options: dict[str, Any]) -> Trainer:
    """`options`: kind (of model), changes of it, num_hidden_layers, eval_samples, stop_at (a step before the last),
    kill_at (a step), and TrainingArguments."""
    options = dict(options)
    stop_at, kill_at = options.pop("stop_at", None), options.pop("kill_at", None)
    kind, eval_samples = options.pop("kind", "llama"), options.pop("eval_samples", 7)
    layers, changes = options.pop("num_hidden_layers", 2), options.pop("changes", {})
    defaults = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3}
    args = TrainingArguments(**{**defaults, "save_strategy": "no", "disable_tqdm": True, **options})
    return Trainer(
        build(kind, num_hidden_layers=layers, **changes),
        args,
        train_dataset=Blocks(30),
        eval_dataset=Blocks(eval_samples, seed=1),
        compute_metrics=accuracy,
        callbacks=[StopsAt(stop_at), *([] if kill_at is None else [KillAt(kill_at, None)])],
    )


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Losses, evaluations, and the logits of the saved model."""
    trainer = make_trainer(options)
    trainer.train()
    metrics = trainer.evaluate()
    predicted = trainer.predict(Blocks(5, seed=2))
    trainer.save_model()
    model = AutoModelForCausalLM.from_pretrained(trainer.args.output_dir)
    with torch.no_grad():
        logits = model(input_ids=Blocks(2, seed=3).tokens).logits
    return {
        **logged(Path(trainer.args.output_dir)),
        "loss": metrics["eval_loss"],
        "accuracy": metrics["eval_accuracy"],
        "predictions": list(predicted.predictions.shape),
        "mean": float(np.abs(predicted.predictions).mean()),
        "logits": logits[0, -1].tolist(),
        "left": sorted(path.name for path in Path(trainer.args.output_dir).glob(".model*")),
    }


def train_each(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    return [train(options) for options in runs]


def refused(options: dict[str, Any]) -> str:
    """The error that making the Trainer ends with."""
    try:
        make_trainer(options)
    except UsageError as error:
        return str(error)
    return ""


def given_parallelized(folder: str) -> list[str]:
    """The errors of Trainers whose arguments differ from the model's parallelization, and one whose arguments match."""
    model = parallelize(build("llama"), Mesh.create(tensor_parallel_size=2, device="cpu"))
    found = []
    for size, sequence in ((1, False), (2, True), (2, False)):
        args = TrainingArguments(
            output_dir=folder, tensor_parallel_size=size, sequence_parallel=sequence, device="cpu", max_steps=1,
            save_strategy="no", disable_tqdm=True, per_device_train_batch_size=2,
        )  # fmt: skip
        try:
            Trainer(model, args, train_dataset=Blocks(4)).train()
            found.append("trained")
        except UsageError as error:
            found.append(str(error))
    return found


class OwnPredictions(Trainer):
    def prediction_step(self, *args: Any, **options: Any) -> Any:
        return super().prediction_step(*args, **options)


def refused_pipelines(options: dict[str, Any]) -> list[str]:
    """The errors of Trainers that a pipeline cannot serve."""
    interleaved = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
    args = TrainingArguments(**options)
    found = []
    for make in (
        lambda: make_trainer({**options, **interleaved}),
        lambda: setattr(Trainer(build("llama"), args), "compute_loss", lambda *_, **__: None),
        lambda: OwnPredictions(build("llama"), args),
    ):
        try:
            make()
            found.append("")
        except UsageError as error:
            found.append(str(error))
    return found


def sums_of_ranks(meshes: list[dict[str, int]], device: str = "cpu") -> list[list[float]]:
    """On each of these meshes, one after the other, the sum of rank numbers over every axis, the ends of the pipeline,
    and, in the first two ranks alone, two neighbours on a tensor parallel axis of four."""
    found = []
    for sizes in meshes:
        mesh = Mesh.create(**sizes, device=device)
        axes = [mesh.pipeline, mesh.data_parallel, mesh.tensor_parallel, mesh.ends]
        rank = mesh.context.world.rank
        if mesh.tensor_parallel.size == 4 and rank < 2:
            axes.append(mesh.replicas(2))
        sums = [axis.all_reduce([mesh.runtime.place(torch.tensor([float(rank)]))])[0] for axis in axes]
        found.append([float(each) for each in mesh.runtime.to_host(sums)])
    return found
