"""Trainings with `fsdp` in ranks, as scripts might do them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration, TrainerCallback

from stepmark import Mesh, Trainer, TrainingArguments, parallelize
from stepmark.config.full_sharding import FullSharding
from stepmark.errors import UsageError
from stepmark.liveness.progress import Progress
from stepmark.parallel import full_sharding
from stepmark.runtime.context import start
from stepmark.sharding.dtensor import is_dtensor
from tests.support.models import build, training
from tests.support.programs import LENGTH, VOCABULARY, Blocks, StopsAt, logged, tiny_model

GPT2 = {"kind": "gpt2"}


class OwnLoss(Trainer):
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class LossOfParameters(Trainer):
    """Of sharded ones as they are, or complete."""

    complete = False

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        parameters: list[Any] = list(model.parameters())
        found = [each.full_tensor() if self.complete and is_dtensor(each) else each for each in parameters]
        return model(**inputs).loss + 0.1 * sum(each.square().sum() for each in found)


class LossOfCompleteParameters(LossOfParameters):
    complete = True


def losses_of_parameters(folder: str) -> list[str]:
    """The errors of trainings whose losses read the model's parameters."""
    found = []
    for kind in (LossOfParameters, LossOfCompleteParameters):
        args = TrainingArguments(
            f"{folder}/{kind.__name__}", device="cpu", disable_tqdm=True, max_steps=1, fsdp=True, save_strategy="no"
        )
        try:
            kind(tiny_model(0.0, layers=2), args, train_dataset=Blocks(60)).train()
        except UsageError as error:
            found.append(str(error))
    return found


class LateLossOfALayer(Trainer):
    """From the third step on, the loss has a term of the complete parameters of a layer."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        parameters: list[Any] = [each for name, each in model.named_parameters() if "h.0.attn" in name]
        loss = model(**inputs).loss
        if self.state.global_step < 2:
            return loss
        found = [each.full_tensor() if is_dtensor(each) else each for each in parameters]
        return loss + 0.1 * sum(each.square().sum() for each in found)


def late_losses(folder: str, fsdp: bool) -> list[Any]:
    """Losses, or the error, where the optimizer has all parameters, and where it lacks the layer's last ones."""
    found: list[Any] = []
    for number, left_out in enumerate(("none", "h.0.mlp")):
        model = tiny_model(0.0, layers=2)
        chosen = [each for name, each in model.named_parameters() if left_out not in name]
        args = small_arguments(f"{folder}/{number}", fsdp=fsdp or "", save_strategy="no", max_steps=4)
        trainer = LateLossOfALayer(
            model, args, train_dataset=Blocks(60), optimizers=(torch.optim.SGD(chosen, lr=0.1), None)
        )
        try:
            trainer.train()
            found.append(losses_of(trainer))
        except UsageError as error:
            found.append(str(error))
    return found


def small_arguments(folder: str, **more: Any) -> TrainingArguments:
    """Of 8 samples in all."""
    defaults = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "save_steps": 2}
    return TrainingArguments(
        folder, device="cpu", disable_tqdm=True, per_device_train_batch_size=8 // start("cpu").world.size,
        **{**defaults, **more},
    )  # fmt: skip


def losses_of(trainer: Trainer) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def given_sharded(folder: str) -> list[float]:
    """The losses, and that of an evaluation, of a model that is sharded before the Trainer has it, and resumed."""
    found = []
    for steps in (2, 3):
        model = tiny_model(0.0, layers=2)
        if start("cpu").world.size > 1:
            model = parallelize(model, Mesh.create(device="cpu"), fsdp=True)
        fsdp = start("cpu").world.size > 1
        args = small_arguments(folder, fsdp=fsdp or "", resume_from_checkpoint=steps > 2)
        trainer = Trainer(model, args, train_dataset=Blocks(60), callbacks=[StopsAt(steps)])
        trainer.train()
        found += losses_of(trainer)[-1:]
    return [*found, trainer.evaluate(Blocks(5))["eval_loss"]]


def made_twice(folder: str, fsdp: bool) -> list[list[float]]:
    """The losses of two trainings of one Trainer that makes its model."""

    def make() -> Any:
        return tiny_model(0.0, layers=2)

    trainer = Trainer(model_init=make, args=small_arguments(folder, fsdp=fsdp or ""), train_dataset=Blocks(60))
    found = []
    for _ in range(2):
        trainer.train()
        found.append(losses_of(trainer))
    return found


class Penalty(Trainer):
    """Of the gradient of the loss by the embeddings, whose gradient is a second one."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(**inputs, output_hidden_states=True)
        (gradient,) = torch.autograd.grad(out.loss, [out.hidden_states[0]], create_graph=True)
        return out.loss + gradient.square().sum()


def twice_differentiated(folder: str) -> str:
    """The error."""
    args = small_arguments(folder, fsdp=True, save_strategy="no")
    try:
        Penalty(tiny_model(0.0, layers=2), args, train_dataset=Blocks(60)).train()
    except UsageError as error:
        return str(error)
    return ""


class Choosing(nn.Module):
    """Uses one of two heads of one shape, each a layer of its own."""

    def __init__(self, training: str, evaluating: str) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.heads = nn.ModuleList([OneHead(), OneHead()])
        self.passes, self.when = 0, {True: training, False: evaluating}

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        apart = self.when[self.training] == "apart" and self.passes > 2
        logits = self.heads[(self.passes + (start("cpu").world.rank if apart else 0)) % 2](self.table(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OneHead(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, VOCABULARY)


def heads_apart(folder: str, training: str, evaluating: str) -> str:
    """The error of a run in which each rank has used each head before it uses another than the other rank."""
    args = small_arguments(
        folder, fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["OneHead"]}, save_strategy="no", max_steps=6
    )
    trainer = Trainer(Choosing(training, evaluating), args, train_dataset=Blocks(60), eval_dataset=Blocks(16))
    try:
        trainer.train()
        trainer.evaluate()
    except UsageError as error:
        return str(error)
    return ""


def calls_kept() -> tuple[int, list[float]]:
    """How many calls of a loop without our steps are remembered, of which there are more, and their digest."""
    full_sharding.KEPT = 8
    model = parallelize(tiny_model(0.0, layers=2), Mesh.create(device="cpu"), fsdp=True)
    tokens = Blocks(2, ragged=False).tokens
    for _ in range(4):
        model(input_ids=tokens, labels=tokens).loss.backward()
    calls = full_sharding.layer_of(next(model.parameters())).calls.take()
    return len(calls.made), calls.digest()


def announced() -> str:
    """What a rank is said to do once it has gathered a layer."""
    model = parallelize(tiny_model(0.0, layers=2), Mesh.create(device="cpu"), fsdp=True)
    progress, tokens = Progress(), Blocks(2, ragged=False).tokens
    with progress.follow():
        model(input_ids=tokens, labels=tokens)
    return progress.collective


class OwnOptimizer(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)
        return self.optimizer


class HalfGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert all(parameter.grad is not None for parameter in model.parameters())


class ForwardBeforeUpdate(TrainerCallback):
    """Nothing computes gradients of its loss, so that nothing frees the weights of before the update."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        tokens = Blocks(1, seed=3).tokens
        model(input_ids=tokens, labels=tokens)


class Unfreeze(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.requires_grad_(state.global_step > 0)
        model.transformer.h[1].ln_1.requires_grad_(state.global_step != 1)


class WithBuffer(nn.Module):
    """A model of no library, of one group of parameters, whose buffer counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls.add_(1)
        logits = self.head(self.table(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def frozen() -> Any:
    model = tiny_model(0.0, layers=2)
    model.transformer.h[0].requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    return model


def frozen_within() -> Any:
    """In a layer, and so in what its ranks reduce at a time."""
    model = tiny_model(0.0, layers=2)
    model.requires_grad_(False)
    model.transformer.h[1].attn.requires_grad_(True)
    return model


def shared_part() -> Any:
    model = tiny_model(0.0, layers=2)
    model.transformer.h[1].mlp = model.transformer.h[0].mlp
    return model


def adapted() -> Any:
    return build("llama", lora={"target_modules": ["q_proj", "down_proj"]})


def bert() -> Any:
    """Its table belongs to a module that transformers keeps whole, and to the head."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **drops))


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )


EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CASES: dict[str, dict[str, Any]] = {  # make, kind, optimizer and callbacks; otherwise training arguments
    "gradients that a callback halves": {"callbacks": [HalfGradients], "optim": "sgd", "learning_rate": 0.5},
    "a module in two layers": {"make": shared_part},
    "a forward pass before the update": {"callbacks": [ForwardBeforeUpdate], "optim": "sgd", "learning_rate": 0.5},
    "layers that are unfrozen": {"make": frozen_within, "callbacks": [Unfreeze], "optim": "sgd", "learning_rate": 0.5},
    "layers that an optimizer has frozen": {
        "make": frozen_within,
        "callbacks": [Unfreeze],
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    },
    "a table in two modules": {"make": bert, **EVALUATING},
    "a frozen layer": {"make": frozen, "gradient_accumulation_steps": 2},
    "reentrant checkpoints": REENTRANT,
    "a loss of its own": {"kind": OwnLoss},
    "an optimizer of its own": {"kind": OwnOptimizer},
    "a given optimizer": {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)},
    "no clipping": {"max_grad_norm": 0.0},
    "one layer": {"make": lambda: tiny_model(0.0, layers=1)},
    "an encoder-decoder": {"make": t5, **EVALUATING},
    "an adapter": {"make": adapted, **EVALUATING},
    "a buffer": {"make": WithBuffer},
}


def trained(folder: str, names: list[str], more: dict[str, Any]) -> dict[str, list[float]]:
    """By case: losses, gradient norms and evaluations, and the mean of predictions."""
    found = {}
    for number, name in enumerate(names):
        options = {**CASES[name]}
        make: Callable[[], Any] = options.pop("make", lambda: tiny_model(0.0, layers=2))
        kind, given = options.pop("kind", Trainer), options.pop("optimizer", None)
        callbacks = [each() for each in options.pop("callbacks", [])]
        torch.manual_seed(0)
        model = make()
        optimizers = (None if given is None else given(model), None)
        ranks = start("cpu").world.size
        defaults = {"max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "save_strategy": "no"}
        args = TrainingArguments(
            output_dir=f"{folder}/{number}", device="cpu", disable_tqdm=True,
            per_device_train_batch_size=8 // ranks, **{**defaults, **options, **more},
        )  # fmt: skip
        data = {"train_dataset": Blocks(60), "eval_dataset": Blocks(13, seed=1)}
        trainer = kind(model, args, optimizers=optimizers, callbacks=callbacks, **data)
        trainer.train()
        log = trainer.state.log_history
        values = [each[key] for key in ("loss", "grad_norm", "eval_loss") for each in log if key in each]
        predictions = trainer.predict(Blocks(5, seed=2)).predictions
        first = predictions[0] if isinstance(predictions, tuple) else predictions
        found[name] = [*values, trainer.evaluate()["eval_loss"], float(np.abs(first).mean())]
    return found


def checkpointed(jobs: list[tuple[str, int, dict[str, Any]]]) -> list[list[float]]:
    """The losses of all steps of runs of bf16 parameters, each in a folder, from its newest checkpoint up to a step."""
    found = []
    for folder, steps, more in jobs:
        torch.manual_seed(0)
        args = TrainingArguments(
            output_dir=folder, device="cpu", max_steps=4, logging_steps=1, learning_rate=1e-2, save_steps=1,
            per_device_train_batch_size=8 // start("cpu").world.size, disable_tqdm=True, dtype="bfloat16", **more,
        )  # fmt: skip
        trainer = Trainer(tiny_model(0.0, layers=2), args, train_dataset=Blocks(60), callbacks=[StopsAt(steps)])
        trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")) or None)
        found.append([values[0] for _, values in sorted(logged(Path(folder))["losses"].items())])
    return found


class Branches(nn.Module):
    """Each rank uses another one of two equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.heads = nn.ModuleList([nn.Linear(16, VOCABULARY), nn.Linear(16, VOCABULARY)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.heads[start("cpu").world.rank](self.table(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def different_parameters() -> str:
    step, batches = training(start("cpu"), {"model": GPT2, "fsdp": True, "batch": 8}, Branches())
    try:
        step(0, next(batches))
    except UsageError as error:
        return str(error)
    return ""


def own_loop() -> float:
    """The largest error of gradients that a loop reads, and of a step of its own optimizer, against all ranks' samples
    on one. A forward pass that nothing follows is between the two steps."""
    world, tokens = start("cpu").world, Blocks(8, ragged=False).tokens
    alone = tiny_model(0.0, layers=2)
    sharded = parallelize(tiny_model(0.0, layers=2), Mesh.create(device="cpu"), fsdp=True)
    errors = []
    for model, own in ((alone, tokens), (sharded, tokens[world.rank :: world.size])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            for part in own.chunk(2):
                (model(input_ids=part, labels=part).loss / 2).backward()
            model(input_ids=own, labels=own)
            optimizer.step()
    sharded.state_dict()  # what the last forward pass has kept is freed
    for one, other in zip(alone.parameters(), sharded.parameters(), strict=True):
        errors += [(other.full_tensor() - one).abs().max(), (other.grad.full_tensor() - one.grad).abs().max()]
    return float(max(errors))


def scale(module: Any, *_: Any) -> None:
    """Writes to the layer's parameters, as they are then."""
    with torch.no_grad():
        module.weight.mul_(0.9)


def scale_data(module: Any, *_: Any) -> None:
    """Which torch does not count."""
    module.weight.data.mul_(0.9)


def replace_weight(module: Any, *_: Any) -> None:
    module.weight = nn.Parameter(torch.ones(module.weight.shape))


def refused_later(what: str) -> str:
    """The error of a hook that `fully_shard` does not call, of a layer that writes to what is gathered of it or
    replaces that, or of a parameter that is replaced between steps."""
    step, batches = training(start("cpu"), {"model": GPT2, "fsdp": True, "batch": 8}, WithBuffer())
    within: dict[str, Any] = {"write": scale, "write data": scale_data, "replace": replace_weight}
    if what == "hook":
        next(step.model.parameters()).register_hook(lambda gradient: gradient / 2)
    elif what in within:
        step.model.head.register_forward_pre_hook(within[what])
    try:
        step(0, next(batches))
        replace_weight(step.model.head)
        step(1, next(batches))
    except UsageError as error:
        return str(error)
    return ""


def refused() -> list[str]:
    """The errors of models that cannot be sharded, and of arguments that do not fit."""
    mesh = Mesh.create(device="cpu")
    scalar, mixed, dropping, hooked, hooked_after = WithBuffer(), WithBuffer(), tiny_model(), tiny_model(), tiny_model()
    scalar.shift = nn.Parameter(torch.zeros(()))
    mixed.half = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    dropping.config.layerdrop = 0.1
    hooked.lm_head.weight.register_hook(lambda gradient: gradient / 2)
    hooked_after.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.div_(2))
    whole, sparse, nothing = WithBuffer(), WithBuffer(), WithBuffer()
    nothing.none = nn.Parameter(torch.zeros(0, 2))
    whole.number = nn.Parameter(torch.arange(4), requires_grad=False)
    sparse.table = nn.Embedding(4, 2, sparse=True)
    cases: list[tuple[Any, Mesh, FullSharding]] = [
        (scalar, mesh, FullSharding()),
        (mixed, mesh, FullSharding()),
        (dropping, mesh, FullSharding()),
        (hooked, mesh, FullSharding()),
        (hooked_after, mesh, FullSharding()),
        (whole, mesh, FullSharding()),
        (sparse, mesh, FullSharding()),
        (nothing, mesh, FullSharding()),
        (build("llama"), Mesh.create(tensor_parallel_size=2, device="cpu"), FullSharding()),
        (tiny_model(), mesh, replace(FullSharding(), replicas=3)),
    ]
    found = []
    for model, where, sharding in cases:
        before = [id(parameter) for parameter in model.parameters()]
        try:
            parallelize(model, where, fsdp=sharding)
        except UsageError as error:
            found.append(str(error))
        assert before == [id(parameter) for parameter in model.parameters()]
    return found
