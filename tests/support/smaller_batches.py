"""A program for ranks: trains models with a last batch that is smaller, which a lazy device would like to fill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepmark import Trainer, TrainingArguments
from tests.support.label_models import Case, make

SAMPLES = 5


class OwnModule(nn.Module):
    """Its labels have a name that nobody knows, and its loss knows no label to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}


class OwnRegression(nn.Module):
    """Integer labels that are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layer(x).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Knows no label to ignore: one of -100 is taken for class 0."""
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    return ((1 - chosen.exp()) ** 2 * -chosen).mean()


def focal_function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return focal(outputs["logits"], labels)


class FocalTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = focal(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class FocalSteps(Trainer):
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            logits = model(**inputs)["logits"]
        return focal(logits, inputs["labels"]), logits, inputs["labels"]


def shallow(name: str) -> Case:
    """`label_models.make` with one layer: compiling takes most of the time."""
    made = make(name)
    for module in made.model.modules():
        for child, layers in module.named_children():
            if isinstance(layers, nn.ModuleList):
                setattr(module, child, layers[:1])
    return made


def of_own_losses() -> Iterator[tuple[str, nn.Module, list[dict[str, Any]], type[Trainer], Any]]:
    """transformers' models with losses that are not theirs."""
    made = shallow("BertForSequenceClassification")
    rows = [made.samples[index % len(made.samples)] for index in range(SAMPLES)]
    data = [{**row, "labels": torch.tensor(index % 2)} for index, row in enumerate(rows)]
    for kind in (FocalTrainer, FocalSteps):
        yield kind.__name__, shallow("BertForSequenceClassification").model, data, kind, None
    yield "function", shallow("BertForSequenceClassification").model, data, Trainer, focal_function
    causal = shallow("GPT2LMHeadModel")
    causal.model.loss_function = lambda logits, labels, **_: focal(logits[:, -1], labels[:, -1])  # type: ignore[assignment]
    tokens = [causal.samples[index % len(causal.samples)] for index in range(SAMPLES)]
    yield "loss_function", causal.model, tokens, Trainer, None


def cases() -> Iterator[tuple[str, nn.Module, list[dict[str, Any]], type[Trainer], Any]]:
    yield from ((*case, Trainer, None) for case in of_other_labels())
    yield from of_own_losses()


def of_other_labels() -> Iterator[tuple[str, nn.Module, list[dict[str, Any]]]]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 4, generator=generator)
    numbers = torch.arange(SAMPLES) % 3
    yield "own", OwnModule(), [{"x": x, "y": y} for x, y in zip(features, numbers, strict=True)]
    yield "own regression", OwnRegression(), [{"x": x, "labels": y} for x, y in zip(features, numbers, strict=True)]
    made = shallow("BertForSequenceClassification")
    model: Any = made.model
    model.config.num_labels, model.config.problem_type, model.num_labels = 1, None, 1
    model.classifier = nn.Linear(model.config.hidden_size, 1)
    rows = [made.samples[index % len(made.samples)] for index in range(SAMPLES)]
    yield "BERT regression", model, [{**row, "labels": y} for row, y in zip(rows, numbers.float(), strict=True)]


def losses_of(folder: str, device: str) -> dict[str, list[float]]:
    """The losses of the steps and evaluations of two epochs, of each case."""
    found = {}
    for name, model, samples, kind, function in cases():
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        args = TrainingArguments(
            output_dir=str(Path(folder) / name),
            device=device,
            num_train_epochs=2,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=1,
            learning_rate=0.1,
            optim="sgd",
            disable_tqdm=True,
        )
        trainer = kind(model, args, train_dataset=samples, eval_dataset=samples, compute_loss_func=function)  # type: ignore[arg-type]
        trainer.train()
        logs = [log.get("loss", log.get("eval_loss")) for log in trainer.state.log_history]
        found[name] = [float(loss) for loss in logs if loss is not None]
    return found
