"""Programs in the shape of scripts that many people start from, with random data, small models and either library.

`run(kind, folder, options)` runs one in this process; with `plain` on transformers' own Trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, HfArgumentParser
from transformers.trainer_utils import get_last_checkpoint

import stepmark
from tests.support.models import build
from tests.support.programs import LENGTH, VOCABULARY, KillAt
from tests.support.seq2seq_programs import small_t5

ROWS = 20


def rows(**columns: Callable[[int], Any]) -> Any:
    return Dataset.from_dict({name: [make(index) for index in range(ROWS)] for name, make in columns.items()})


def tokens(index: int, length: int = LENGTH) -> list[int]:
    return torch.randint(3, VOCABULARY - 7, (length,), generator=torch.Generator().manual_seed(index)).tolist()


def bert(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **options)
    return kind(config)


def finished(trainer: Any, result: Any) -> None:
    """The end of the examples' scripts."""
    trainer.save_model()
    metrics = {**result.metrics, "train_samples": len(trainer.train_dataset)}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(trainer.eval_dataset)
    if "eval_accuracy" in metrics:
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def resumed(trainer: Any) -> Any:
    folder = trainer.args.output_dir
    return trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).is_dir() else None)


def clm(library: Any, args: Any, **options: Any) -> Any:
    data = rows(input_ids=tokens, attention_mask=lambda _: [1] * LENGTH, labels=tokens)

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions[:, :-1] == found.label_ids[:, 1:]).mean())}

    trainer = library.Trainer(
        model=build("gpt2", dropout=0.1), args=args, train_dataset=data, eval_dataset=data.select(range(7)),
        data_collator=transformers.default_data_collator, compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1), **options,
    )  # fmt: skip
    finished(trainer, resumed(trainer))
    trainer.create_model_card(tasks="text-generation")
    return trainer


def glue(library: Any, args: Any, **options: Any) -> Any:
    """With columns that the model does not take, and predictions in a file."""
    data = rows(sentence=str, idx=lambda index: index, input_ids=tokens, label=lambda index: index % 3)
    model = bert(BertForSequenceClassification, num_labels=3)
    trainer = library.Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)), data_collator=None,
        compute_metrics=lambda found: {"hits": float((found[0].argmax(1) == found[1]).mean())}, **options,
    )  # fmt: skip
    finished(trainer, resumed(trainer))
    found = np.argmax(trainer.predict(data.remove_columns("label"), metric_key_prefix="predict").predictions, axis=1)
    (Path(args.output_dir) / "predict_results.txt").write_text("\n".join(map(str, found)))
    return trainer


def answering(base: Any) -> Any:
    """The trainer that question answering's script has beside it."""

    class QuestionAnswering(base):  # type: ignore[misc]
        def __init__(self, *args: Any, eval_examples: Any = None, post_process: Any = None, **options: Any) -> None:
            super().__init__(*args, **options)
            self.eval_examples, self.post_process = eval_examples, post_process

        def evaluate(self, *_: Any, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
            compute, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(
                    self.get_eval_dataloader(self.eval_dataset), description="Evaluation",
                    prediction_loss_only=None, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix,
                )  # fmt: skip
            finally:
                self.compute_metrics = compute
            found = compute(self.post_process(self.eval_examples, output.predictions))
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()} | output.metrics
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return QuestionAnswering


def qa(library: Any, args: Any, **options: Any) -> Any:
    position = {name: lambda index, shift=shift: (index + shift) % LENGTH for name, shift in (("start", 0), ("end", 2))}
    data = rows(input_ids=tokens, **{f"{name}_positions": made for name, made in position.items()})
    trainer = answering(library.Trainer)(
        model=bert(BertForQuestionAnswering), args=args, train_dataset=data, eval_dataset=data.select(range(6)),
        data_collator=transformers.default_data_collator, eval_examples=data.select(range(6)),
        post_process=lambda examples, logits: (examples["start_positions"], logits[0].argmax(-1)),
        compute_metrics=lambda pair: {"exact": float(np.mean(np.array(pair[0]) == pair[1]))}, **options,
    )  # fmt: skip
    finished(trainer, resumed(trainer))
    return trainer


def seq2seq(library: Any, args: Any, **options: Any) -> Any:
    data = rows(input_ids=lambda index: tokens(index, 7), labels=lambda index: tokens(index, 5))

    def lengths(found: Any) -> dict[str, float]:
        return {"gen_len": float(np.mean([np.count_nonzero(row > 0) for row in found.predictions]))}

    trainer = library.Seq2SeqTrainer(
        model=small_t5(), args=args, train_dataset=data, eval_dataset=data.select(range(5)),
        data_collator=transformers.default_data_collator, compute_metrics=lengths, **options,
    )  # fmt: skip
    finished(trainer, resumed(trainer))
    found = trainer.predict(data.select(range(3)), max_length=6).predictions
    (Path(args.output_dir) / "generated_predictions.txt").write_text("\n".join(map(str, found.tolist())))
    return trainer


class ByLength(Sampler[int]):
    """Long samples first, without random numbers."""

    def __init__(self, lengths: list[int]) -> None:
        self.order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def projecting(base: Any) -> Any:
    """A trainer of a projector alone: its order, its groups, and checkpoints that hold nothing else."""

    class Projecting(base):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return ByLength([len(each["input_ids"]) - index % 3 for index, each in enumerate(self.train_dataset)])

        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                kind, keywords = base.get_optimizer_cls_and_kwargs(self.args)
                named = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
                groups = [
                    {"params": [each for name, each in named if ("bias" in name) is bias], "weight_decay": rate}
                    for bias, rate in ((False, 0.1), (True, 0.0))
                ]
                self.optimizer = kind(groups, **keywords)
            return self.optimizer

        def _projector(self, folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            self.model.config.save_pretrained(folder)
            state = {name: each.cpu() for name, each in self.model.state_dict().items() if "mlp" in name}
            torch.save(state, folder / "mm_projector.bin")

        def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            if self.args.local_rank in (0, -1):
                self._projector(folder)

        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            self._projector(Path(output_dir))

    return Projecting


def llava(library: Any, args: Any, **options: Any) -> Any:
    data = rows(input_ids=tokens, labels=tokens)
    model = build("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    trainer = projecting(library.Trainer)(
        model=model, args=args, train_dataset=data, data_collator=transformers.default_data_collator, **options
    )
    found = list(Path(args.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True) if found and library is stepmark else trainer.train()
    trainer.save_state()
    trainer._save(args.output_dir)
    return trainer


def fastchat(library: Any, args: Any, **options: Any) -> Any:
    data = rows(input_ids=tokens, labels=tokens, attention_mask=lambda _: [1] * LENGTH)
    trainer = library.Trainer(
        model=build("llama"), args=args, train_dataset=data, data_collator=transformers.default_data_collator, **options
    )
    found = list(Path(args.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True) if found else trainer.train()
    trainer.model.config.use_cache = True
    trainer.save_state()
    state = trainer.model.state_dict()
    if trainer.args.should_save:
        trainer._save(args.output_dir, state_dict={key: value.cpu() for key, value in state.items()})
    return trainer


KINDS = {"clm": clm, "glue": glue, "qa": qa, "seq2seq": seq2seq, "llava": llava, "fastchat": fastchat}


def run(kind: str, folder: str, options: dict[str, Any]) -> list[dict[str, float]]:
    """The logs of a program, by step. `options` are arguments of the command line, and `plain` and `kill_at`."""
    library: Any = transformers if options.pop("plain", False) else stepmark
    kill_at = options.pop("kill_at", None)
    arguments = library.Seq2SeqTrainingArguments if kind == "seq2seq" else library.TrainingArguments
    given = {"output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_steps": 3}
    given |= {"max_steps": 8, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "seed": 3}
    given |= {"predict_with_generate": True, "generation_max_length": 8} if kind == "seq2seq" else {}
    line = [f"--{name}={value}" for name, value in {**given, **options}.items()]
    (args,) = HfArgumentParser(arguments).parse_args_into_dataclasses(line)
    callbacks = {} if kill_at is None else {"callbacks": [KillAt(kill_at, [0])]}
    KINDS[kind](library, args, **callbacks)
    history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [
        {key: log[key] for key in ("step", "loss", "grad_norm", "learning_rate")} for log in history if "loss" in log
    ]
