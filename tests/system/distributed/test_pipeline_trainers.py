"""Trainers of many kinds give with pipeline stages what they give without: losses, logs, evaluations, predictions, the
best model, the saved one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, EvalPrediction, TrainerCallback

from stepmark import Mesh, PadTo, Trainer, TrainingArguments, evaluate, load_for_parallelism
from stepmark.cli.main import run as cli
from tests.support.mesh_programs import accuracy
from tests.support.models import build, configuration
from tests.support.programs import LENGTH, VOCABULARY, Blocks, StopsAt
from tests.support.ranks import Ranks

TWO = {"pipeline_parallel_size": 2}
GPIPE = {**TWO, "pipeline_schedule": "gpipe"}
INTERLEAVED = {**TWO, "pipeline_schedule": "interleaved", "pipeline_chunks": 2}
HALVES = {**TWO, "pipeline_layers": [2, 2]}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
BEST = {**EVALUATING, "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
EARLY = {**EVALUATING, "eval_steps": 1, "max_steps": 8, "save_strategy": "best", "load_best_model_at_end": True}
FROZEN_START = r"embed_tokens|layers\.[01]\."


def model(kind: str, **changes: Any) -> dict[str, Any]:
    return {"kind": kind, "num_hidden_layers": 4, **changes}


Case = tuple[dict[str, Any], dict[str, Any]]  # what is trained, and the mesh
CASES: dict[str, Case] = {
    "a loss of the user's, uneven samples": (
        {"model": model("llama"), "loss": "own", "data": "uneven", **EVALUATING},
        INTERLEAVED,
    ),
    "the best model, tied, recomputed": (
        {"model": model("gpt2", dropout=0.1), "gradient_checkpointing": True, "learning_rate": 0.05, **BEST},
        GPIPE,
    ),
    "an optimizer made by a subclass": ({"model": model("gpt2"), "optimizer": "created"}, INTERLEAVED),
}
MORE: dict[str, Case] = {
    "a first stage that is frozen": ({"model": model("llama"), "frozen": FROZEN_START}, {**HALVES, "zero_1": True}),
    "an optimizer of the user's": ({"model": model("gpt2"), "optimizer": "given", "max_grad_norm": 0}, TWO),
    "random numbers that nothing shows, recomputed": (
        {"model": model("llama"), "hooked": True, "gradient_checkpointing": True},
        TWO,
    ),
    "smoothing, predictions without labels": (
        {"model": model("gemma2"), "label_smoothing_factor": 0.1, "data": "uneven", "unlabelled": True},
        TWO,
    ),
    "early stopping": (
        {"model": model("llama"), "metric_for_best_model": "accuracy", "patience": 2, **EARLY},
        INTERLEAVED,
    ),
    "epochs": (
        {"model": model("llama"), "max_steps": -1, "num_train_epochs": 2, **EVALUATING, "eval_strategy": "epoch"},
        INTERLEAVED,
    ),
    "a last stage that is frozen": ({"model": model("llama"), "frozen": r"norm|lm_head|layers\.[23]\."}, HALVES),
    "a tied table that is frozen": ({"model": model("gpt2"), "frozen": "wte"}, TWO),
    "one layer that is trained": ({"model": model("gpt2"), "frozen": r"^(?!.*h\.0\.)"}, INTERLEAVED),
    "frozen and recomputed": ({"model": model("llama"), "frozen": FROZEN_START, "gradient_checkpointing": True}, TWO),
    "SGD": ({"model": model("gpt2"), "optim": "sgd", "optim_args": "momentum=0.9"}, TWO),
    "metrics by batch": ({"model": model("llama"), "prediction_loss_only": True, **EVALUATING}, INTERLEAVED),
    "losses and inputs for metrics": (
        {"model": model("llama"), "include_for_metrics": ["loss", "inputs"], **EVALUATING},
        TWO,
    ),
    "a schedule and decay": (
        {"model": model("gpt2"), "lr_scheduler_type": "cosine", "weight_decay": 0.1, "warmup_steps": 2},
        TWO,
    ),
}
THREE: dict[str, Case] = {
    "three stages, sliding windows": (
        {"model": model("gemma2", sliding_window=4), "gradient_accumulation_steps": 6, "data": "uneven"},
        {"pipeline_parallel_size": 3},
    )
}
FOUR: dict[str, Case] = {
    "four stages, dropout": (
        {"model": model("gpt2", dropout=0.1), "data": "uneven", "gradient_checkpointing": True},
        {"pipeline_parallel_size": 4, "zero_1": True},
    ),
    "frozen, data parallel": (
        {"model": model("llama"), "frozen": FROZEN_START},
        {**HALVES, "zero_1": True, "gradient_accumulation_steps": 2},
    ),
    "tensor parallel, uneven samples": (
        {"model": model("llama"), "data": "uneven", "gradient_checkpointing": True, **EVALUATING},
        {**TWO, "tensor_parallel_size": 2},
    ),
    "data parallel, tied, uneven samples": (
        {"model": model("gpt2"), "data": "uneven", "loss": "own", **EVALUATING, "per_device_eval_batch_size": 1},
        {**INTERLEAVED, "gradient_accumulation_steps": 2, "zero_1": True},
    ),
}


def compare(ranks: Ranks, folder: Path, cases: dict[str, Case], count: int) -> None:
    """With stages on `count` ranks as on one."""
    trained, meshes = zip(*cases.values(), strict=True)
    (expected,) = ranks.run(runs, str(folder / "one"), list(trained), timeout=600).check()
    staged = [{**options, **mesh} for options, mesh in zip(trained, meshes, strict=True)]
    for rank, found in enumerate(ranks.run(runs, str(folder / "many"), staged, nproc=count, timeout=900).check()):
        for name, ours, theirs in zip(cases, found, expected, strict=True):
            same(ours, theirs, f"{name}, rank {rank}")


def same(ours: Any, theirs: Any, where: str) -> None:
    """Numbers to 1e-5 of the largest of their array, logits to 1e-4, everything else exactly."""
    if where.endswith("flos") and ours is None:
        return
    if where.endswith("micro-batches"):  # at the end of an epoch a pipeline also runs those that no sample is left for
        assert theirs <= ours <= 1.2 * theirs, where
        return
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name, value in theirs.items():
            same(ours[name], value, f"{where}, {name}")
    elif isinstance(theirs, list) and not _is_array(theirs):
        assert len(ours) == len(theirs), where
        for index, value in enumerate(theirs):
            same(ours[index], value, f"{where}, {index}")
    elif isinstance(theirs, (list, float)):
        wanted = np.array(theirs, float)
        tolerance = 1e-4 if "logits" in where or "predictions" in where else 1e-5
        limit = tolerance * max(float(np.abs(wanted).max(initial=0)), 1e-12)
        np.testing.assert_allclose(np.array(ours, float), wanted, rtol=0, atol=limit, err_msg=where)
    else:
        assert ours == theirs, where


def _is_array(values: list[Any]) -> bool:
    try:
        return np.array(values, float).ndim > 0
    except (TypeError, ValueError):
        return False


def test_two_stages(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(ranks, tmp_path, CASES, 2)
    best = list(CASES).index("the best model, tied, recomputed")
    shown_by_inspect(tmp_path / "many" / str(best), capsys)


def shown_by_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which stage wrote what of GPT-2's four layers, of which the first stage has two."""
    checkpoint = max(run.glob("checkpoint-*"))
    assert cli(["inspect", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    (first,), (last,) = ([line for line in text.splitlines() if f"  stage {stage}: " in line] for stage in (0, 1))
    assert "transformer.h.0-1" in first
    assert "transformer.wpe" in first
    assert "transformer.h.2-3, transformer.ln_f" in last
    assert cli(["inspect", str(checkpoint), "--json"]) == 0
    stages = {each["name"]: each["stages"] for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert stages["transformer.wpe.weight"] == [0]
    assert stages["transformer.ln_f.weight"] == [1]
    assert set(stages["transformer.wte.weight"]) <= {0, 1}  # both have it, so either may write it
    assert stages["transformer.wte.weight"]


def test_tied_tables_that_ranks_made_apart_become_equal(ranks: Ranks, tmp_path: Path) -> None:
    first, last = ranks.run(made_apart, str(tmp_path), nproc=2).check()
    assert first == last


@pytest.mark.prove
@pytest.mark.parametrize(("cases", "count"), [(MORE, 2), (THREE, 3), (FOUR, 4)], ids=["two", "three", "four"])
def test_more(ranks: Ranks, tmp_path: Path, cases: dict[str, Case], count: int) -> None:
    compare(ranks, tmp_path, cases, count)


# What ranks run


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
    """Makes the optimizer once the model is on its mesh, with a rate for each parameter by its position."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        groups = [{"params": [each], "lr": 1e-3 * 0.9**index} for index, each in enumerate(self.model.parameters())]
        self.optimizer = torch.optim.NAdam(groups)
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
        callbacks=[seen, *([EarlyStoppingCallback(patience)] if patience else []), StopsAt(stop_at)],
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
    mesh.context.host.all_gather(None)  # rank 0 serves the store, and stays until the other has used it
    return [float(trainer.model.transformer.wte.weight.double().sum())]


def runs(folder: str, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several, each in a folder of its own."""
    return [run({**each, "output_dir": f"{folder}/{number}"}) for number, each in enumerate(options)]
