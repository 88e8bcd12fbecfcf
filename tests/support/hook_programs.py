"""Programs for ranks: callbacks that change gradients, parameters and what is trained, at every event of a step, and
calls of the model between steps."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.errors import StepmarkError
from stepmark.model_folder.consolidate import consolidate
from stepmark.sharding.dtensor import is_dtensor, shard_of, with_local
from tests.support.real_model import SILENT

VOCABULARY, LENGTH, BATCH, STEPS = 32, 8, 8, 4
AT = 2  # the step, or its end, at which a callback acts
TARGETS = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight")

EVENTS = (
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_evaluate",
    "on_save",
)
ACTIONS = (
    "new gradient",
    "no gradient",
    "no gradients",
    "gradients of zeros",
    "gradient in place",
    "new data",
    "data in place",
    "frozen",
    "thawed",
    "clipped",
    "added to the optimizer",
    "added to the model",
)
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp": (2, {}),
    "zero_1": (2, {"zero_1": True}),
    "full_shard": (2, {"fsdp": "full_shard"}),
    "shard_grad_op": (2, {"fsdp": "shard_grad_op"}),
    "tp": (2, {"tensor_parallel_size": 2}),
    "pp": (2, {"pipeline_parallel_size": 2}),
    "masters": (1, {"dtype": "bfloat16"}),
    "masters, zero_1": (2, {"dtype": "bfloat16", "zero_1": True, "reduce_dtype": "float32"}),
    "masters, fsdp": (2, {"dtype": "bfloat16", "fsdp": "full_shard"}),
}


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config)


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


class Acting(TrainerCallback):
    """Does one thing at one event of one step, on all ranks."""

    def __init__(self, event: str, action: str) -> None:
        self.acted = False
        self._action = action
        # before a step `global_step` is the number of those that are done
        self._step = AT - 1 if event in EVENTS[:4] else AT
        setattr(self, event, self._hear)

    def _hear(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        if state.global_step != self._step or self.acted:
            return
        self.acted = True
        if self._action in ("no gradients", "gradients of zeros"):
            optimizer.zero_grad(set_to_none=self._action == "no gradients")
            return
        if self._action == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            return
        if self._action == "added to the optimizer":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            return
        if self._action == "added to the model":
            model.register_parameter("extra", nn.Parameter(torch.ones(2)))
            return
        for name, parameter in model.named_parameters():
            if name in TARGETS:
                act(self._action, parameter)


def act(action: str, parameter: Any) -> None:
    if action == "new gradient":
        before = parameter.grad if parameter.grad is not None else _like(parameter, 0.02)
        parameter.grad = before * 2
    elif action == "no gradient":
        parameter.grad = None
    elif action == "gradient in place":
        if parameter.grad is not None:
            parameter.grad.mul_(-1)
    elif action == "new data":
        parameter.data = parameter.data * 0.5
    elif action == "data in place":
        with torch.no_grad():
            parameter.mul_(0.5)
    elif action in ("frozen", "thawed"):
        parameter.requires_grad_(action == "thawed")


def _like(parameter: Any, value: float) -> Tensor:
    if is_dtensor(parameter):
        return with_local(parameter, torch.full_like(shard_of(parameter).tensor, value))
    return torch.full_like(parameter, value).detach()


def arguments(folder: Path, ranks: int, **options: Any) -> TrainingArguments:
    replicas = ranks // options.get("tensor_parallel_size", 1) // options.get("pipeline_parallel_size", 1)
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "device": "cpu",
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // 2 // replicas,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.5,
        "adam_epsilon": 1e-3,
        "max_grad_norm": 0,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**given, **options})


def cell(folder: str, form: str, event: str, action: str) -> dict[str, Any]:
    """A cell whose error ends the ranks."""
    ranks, options = FORMS[form]
    return _cell(Path(folder), ranks, options, Acting(event, action))


def cells(folder: str, form: str, chosen: list[tuple[str, str]]) -> list[Any]:
    """Of each cell, an event and an action: the losses and the final model, in a few numbers a tensor, or the error of
    all ranks."""
    ranks, options = FORMS[form]
    found = []
    for number, (event, action) in enumerate(chosen):
        try:
            found.append(_cell(Path(folder, str(number)), ranks, options, Acting(event, action)))
        except StepmarkError as error:
            found.append(str(error))
        shutil.rmtree(Path(folder, str(number)), ignore_errors=True)
    return found


def _cell(folder: Path, ranks: int, options: dict[str, Any], callback: Acting) -> dict[str, Any]:
    model = small_llama()
    given: dict[str, Any] = {}
    if callback._action == "thawed":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in TARGETS)
        given["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1), None)
    args = arguments(folder, ranks, **options)
    trainer = Trainer(model, args, train_dataset=Blocks(), eval_dataset=Blocks(), callbacks=[callback], **given)
    trainer.train()
    assert callback.acted
    return outcome(trainer, folder)


def outcome(trainer: Trainer, folder: Path) -> dict[str, Any]:
    trainer.save_model(str(folder / "final"))
    trainer.context.host.barrier()
    history = trainer.state.log_history
    losses = [log[name] for log in history for name in ("loss", "eval_loss") if name in log]
    found = {"losses": losses, "weights": in_few_numbers(folder / "final")}
    trainer.context.host.barrier()  # before the folder is removed
    return found


def in_few_numbers(folder: Path) -> dict[str, list[float]]:
    """Of each tensor of a model folder, its product with two random vectors, over the root of its size: how much it
    moves on average."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        draws = torch.randn(2, tensor.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found[name] = (draws @ tensor.double().flatten() / tensor.numel() ** 0.5).tolist()
    return found


def calls(folder: str, form: str, chosen: list[tuple[str, str]]) -> list[Any]:
    """Of each cell, how a callback calls the model and what it does then: the outcome, or the error."""
    ranks, options = FORMS[form]
    found = []
    for number, (call, then) in enumerate(chosen):
        own = Path(folder, str(number))
        callback = Calling(call, then)
        trainer = Trainer(
            small_llama(),
            arguments(own, ranks, **options),
            train_dataset=Blocks(),
            eval_dataset=Blocks(),
            callbacks=[callback],
        )
        callback.trainer = trainer
        try:
            trainer.train()
            result = outcome(trainer, own)
            if then == "save" and trainer.is_world_process_zero():
                consolidate(own / "checkpoint-1", own / "written", "safetensors", 10**9, SILENT)
            trainer.context.host.barrier()
            if then != "step":
                result["written"] = in_few_numbers(own / "written")
            trainer.context.host.barrier()
            found.append(result)
        except StepmarkError as error:
            found.append(str(error))
        with suppress(OSError):
            shutil.rmtree(own)
    return found


class Calling(TrainerCallback):
    """Calls the model after a step, and then does something that reads it."""

    trainer: Trainer

    def __init__(self, call: str, then: str) -> None:
        self._call, self._then = call, then

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step != 1:
            return
        inputs = torch.stack([Blocks()[index]["input_ids"] for index in range(2)])
        if self._call == "forward":
            model(input_ids=inputs, labels=inputs)
        elif self._call == "no_grad":
            with torch.no_grad():
                model(input_ids=inputs, labels=inputs)
        elif self._call == "generate":
            model.generate(input_ids=inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
        elif self._call == "evaluate":
            self.trainer.evaluate()
        if self._then == "save":
            control.should_save = True
        elif self._then == "save_model":
            self.trainer.save_model(str(Path(args.output_dir, "written")))


CALLS = ("forward", "no_grad", "generate", "evaluate")
THEN = ("save", "save_model", "step")
