"""Programs for ranks: LoRA adapters on meshes, with the Trainer and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import AutoModelForCausalLM, TrainerCallback

from stepmark import Checkpointer, Mesh, Trainer, TrainingArguments, parallelize
from stepmark.errors import StepmarkError, UsageError
from stepmark.sharding.layout import layout_of
from tests.support.models import build, with_lora
from tests.support.programs import Blocks, StopsAt, checksum, logged


class SavesWhatWasRestored(TrainerCallback):
    """Saves the adapter and the optimizer's state again, in `again`, before the first step."""

    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        found, folder = self.trainer, Path(args.output_dir) / "again"
        with Checkpointer(
            folder, group=found.context.host, runtime=found.context.runtime, async_save=False, mesh=found.mesh.shape
        ) as checkpointer:
            checkpointer.save(state.global_step, {"model": found._saved.module, "optimizer": found._optimizers.named})


def make_trainer(options: dict[str, Any]) -> Trainer:
    """`options`: base (a folder), lora (of with_lora), stop_at (a step before the last), and TrainingArguments."""
    options = dict(options)
    stop_at = options.pop("stop_at", None)
    model = AutoModelForCausalLM.from_pretrained(options.pop("base"))
    torch.manual_seed(5)
    adapted = with_lora(model, options.pop("lora"))
    defaults = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3}
    args = TrainingArguments(**{**defaults, "disable_tqdm": True, "device": "cpu", "save_strategy": "no", **options})
    data: dict[str, Any] = {"train_dataset": Blocks(30), "eval_dataset": Blocks(3, seed=1)}
    return Trainer(adapted, args, callbacks=[StopsAt(stop_at)], **data)


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and writes the adapter: losses, evaluations, the logits of the live model, and the base's digest."""
    options = dict(options)
    resume = options.pop("resume", False)
    trainer = make_trainer(options)
    if resume:
        trainer.add_callback(again := SavesWhatWasRestored())
        again.trainer = trainer
    trainer.train(resume_from_checkpoint=resume, save_model=True)
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=torch.arange(8)[None]).logits
    return {
        **logged(Path(options["output_dir"])),
        "weights": checksum(trainer),
        "logits": logits.tolist(),
        "identity": trainer.identity()["weights of the frozen base model"],
        "evaluation": trainer.evaluate()["eval_loss"],
    }


def several(options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several trainings, one after the other, in one launch."""
    return [train(each) for each in options]


def refusal(model: dict[str, Any], options: dict[str, Any]) -> str:
    """The error of `parallelize`, before which nothing has changed; empty if there is none."""
    sizes = {name: options.pop(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    mesh = Mesh.create(device="cpu", **sizes)
    made = build(**model)
    before = [parameter.shape for parameter in made.parameters()]
    try:
        parallelize(made, mesh, **options)
    except UsageError as error:
        assert [parameter.shape for parameter in made.parameters()] == before
        return str(error)
    return ""


def drawn_apart(model: dict[str, Any]) -> list[str]:
    """The checksums of the replicated parts of adapters that each rank has drawn for itself."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    made = build(**model)
    torch.manual_seed(mesh.context.world.rank)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    parallelize(made, mesh)
    found = [each for _, each in made.named_parameters() if each.requires_grad and layout_of(each) is None]
    return [xxhash.xxh3_64_hexdigest(each.detach().numpy().tobytes()) for each in found]


def _added(sharded: Any, lora: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {"peft": lambda: with_lora(sharded, lora), "transformers": lambda: _mixin(sharded, lora)}


def _mixin(model: Any, lora: dict[str, Any]) -> Any:
    import peft

    model.add_adapter(peft.LoraConfig(**lora))
    return model


def added_afterwards(kind: str, lora: dict[str, Any], how: str, folder: str) -> dict[str, str]:
    """What is said of an adapter that is added to a sharded model: when it is called, given to the Trainer, and passed
    to `parallelize` again."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    adapted = _added(parallelize(build(kind), mesh), lora)[how]()
    args = TrainingArguments(output_dir=folder, device="cpu", tensor_parallel_size=2)
    calls: dict[str, Callable[[], Any]] = {
        "called": lambda: adapted(input_ids=torch.arange(8)[None]),
        "trainer": lambda: Trainer(adapted, args, train_dataset=Blocks(4)).train(),
        "parallelize": lambda: parallelize(adapted, mesh),
    }
    return {name: _error(call) for name, call in calls.items()}


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except StepmarkError as error:
        return str(error)
    return ""


def dropped(model: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Which units LoRA's dropouts keep in a forward pass, by layer, after a first one with another seed."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    made = parallelize(build(**model), mesh, **options).train()
    kept: dict[str, list[bool]] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            kept[name] = (output == 0).flatten()[:64].tolist()

        return hook

    for name, module in made.named_modules():
        if "lora_dropout.default" in name:
            module.register_forward_hook(watch(name))
    tokens = torch.arange(16).reshape(2, 8)
    found = []
    for seed in (5, 6):
        mesh.runtime.seed(seed)
        made(input_ids=tokens, labels=tokens).loss.backward()
        found.append(dict(kept))
    return {"first": found[0], "second": found[1]}
