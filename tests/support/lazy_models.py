"""What a lazy device does in the steps and evaluation batches of a model: compilations, executions, transfers."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

from stepmark import Trainer, TrainingArguments
from stepmark.trainer.telemetry import progress

VOCABULARY, LENGTH, FIRST_TOKEN = 67, 16, 3
STEPS, WARM_UP, BATCHES = 6, 2, 3
Counts = list[int]  # compilations, executions, transfers to the host
READS = "every step reads values"  # in the warning of trainer/telemetry/telemetry.py


class Samples(torch.utils.data.Dataset):
    """Random samples: `make(generator, index)` gives each."""

    def __init__(self, count: int, make: Callable[[torch.Generator, int], dict[str, torch.Tensor]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = [make(generator, index) for index in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def packed(generator: torch.Generator, index: int) -> dict[str, torch.Tensor]:
    """A block without padding and without an attention mask, as recipes make them."""
    tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded(generator: torch.Generator, index: int) -> dict[str, torch.Tensor]:
    """Padded on the right by 0 to 6 tokens, with an attention mask."""
    sample = packed(generator, index)
    mask = torch.ones(LENGTH, dtype=torch.long)
    mask[LENGTH - index % 7 :] = 0
    padding = mask == 0
    return {
        "input_ids": sample["input_ids"].masked_fill(padding, 0),
        "attention_mask": mask,
        "labels": sample["labels"].masked_fill(padding, -100),
    }


def classified(generator: torch.Generator, index: int) -> dict[str, torch.Tensor]:
    return {**padded(generator, index), "labels": torch.tensor(index % 2)}


def picture(generator: torch.Generator, index: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(3, 16, 16, generator=generator), "labels": torch.tensor(index % 2)}


NARROW: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS: dict[str, tuple[Callable[[], Any], Any]] = {  # beside causal language models: the model and its samples
    "bert, masked tokens": (lambda: BertForMaskedLM(BertConfig(**NARROW, vocab_size=VOCABULARY)), padded),
    "bert, no mask given": (lambda: BertForMaskedLM(BertConfig(**NARROW, vocab_size=VOCABULARY)), packed),
    "bert, classes": (lambda: BertForSequenceClassification(BertConfig(**NARROW, vocab_size=VOCABULARY)), classified),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        ),
        padded,
    ),
    "vit": (lambda: ViTForImageClassification(ViTConfig(**NARROW, image_size=16, patch_size=8)), picture),
}


def causal(model_type: str) -> Any:
    from scripts.small_models import narrow_model

    return narrow_model(model_type)


class CountDevice(TrainerCallback):
    """Counts, with the device drained, what each step and each evaluation batch but an evaluation's first adds."""

    def __init__(self) -> None:
        self.steps: list[Counts] = []
        self.batches: list[Counts] = []
        self.trainer: Any = None
        self._before: Counts | None = None

    def _now(self) -> Counts:
        runtime = self.trainer.context.runtime
        counters = runtime.counters()
        return [counters.compilations, counters.executions, runtime.transfers_to_host()]

    def _since(self) -> Counts:
        assert self._before is not None
        return [now - before for now, before in zip(self._now(), self._before, strict=True)]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._before = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self._since())
        self._before = None

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._before is not None:
            self.batches.append(self._since())
        self._before = self._now()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._before = None


class Warnings(logging.Handler):
    """Keeps what Stepmark warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("stepmark").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(model: Any, sample: Any, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    """A trainer that has trained STEPS steps. No line of progress, which fetches losses, falls due meanwhile, however
    busy the machine is."""
    progress.LINE_SECONDS = float("inf")
    batch = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-4, "optim": "sgd"}
    quiet = {"logging_steps": 100, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**{"output_dir": folder, "max_steps": STEPS, **batch, **quiet, **options})
        data = Samples(2 * STEPS * args.gradient_accumulation_steps, sample), Samples(2 * BATCHES, sample)
        trainer = Trainer(model, args, train_dataset=data[0], eval_dataset=data[1], callbacks=[*callbacks])
        for callback in callbacks:
            callback.trainer = trainer  # type: ignore[attr-defined]
        trainer.train()
    return trainer


def run(model: Any, sample: Any, **options: Any) -> dict[str, Any]:
    """Trains with an evaluation of BATCHES batches after the second step and the fourth."""
    count, warnings = CountDevice(), Warnings()
    train(model, sample, count, **{"device": "xla", "eval_strategy": "steps", "eval_steps": 2, **options})
    return {
        "steps": count.steps,
        "batches": count.batches,
        "warnings": [text for text in warnings.messages if READS in text],
    }


def count(name: str) -> dict[str, Any]:
    """The worst step after warm-up ("1": without accumulation, "2": with two micro-batches), the worst evaluation batch
    ("evaluation"), and the lines that the run's warning names ("lines").

    `name` is a model type, or one of OTHERS. A causal model gets packed blocks, and padded batches with two
    micro-batches.
    """
    found: dict[str, Any] = {"lines": []}
    for accumulation, more in (("1", {}), ("2", {"eval_strategy": "no"})):
        if name in OTHERS:
            model, sample = OTHERS[name][0](), OTHERS[name][1]
        else:
            model, sample = causal(name), padded if accumulation == "2" else packed
        result = run(model, sample, gradient_accumulation_steps=int(accumulation), **more)
        found[accumulation] = worst(result["steps"][WARM_UP:])
        if result["batches"]:
            found["evaluation"] = worst(result["batches"])
        found["lines"] += [line for text in result["warnings"] for line in lines_of(text) if line not in found["lines"]]
    return found


def worst(counts: list[Counts]) -> Counts:
    """The largest of each number."""
    return [max(column) for column in zip(*counts, strict=True)]


def lines_of(warning: str) -> list[str]:
    """The lines that the warning about reads names."""
    return re.findall(r"[\w/.-]+:\d+ \([\w.]+\)|the backward pass \([\w.]+\)", warning)
