"""A recipe with a `task`: its model, data and fields for one of TRL's trainers."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash

from stepmark.config.data_arguments import STDLIB
from stepmark.config.recipe import Recipe, all_fields
from stepmark.config.transformers_defaults import known_fields
from stepmark.config.yaml_file import parse_options
from stepmark.data.prepared_data import choose_block_size
from stepmark.data.sources.corpus import Corpus
from stepmark.data.sources.sources import open_sources, stdlib_texts
from stepmark.errors import DataError, UsageError
from stepmark.filesystem.error_advice import explained
from stepmark.recipe.model import build_model, build_tokenizer, check_makeable, config_of
from stepmark.trainer.compat.transformers_arguments import converted
from stepmark.trainer.run import Run
from stepmark.trainer.training_arguments import TrainingArguments

logger = logging.getLogger("stepmark")

PIECE = 80  # characters of a built-in prompt, and of an answer
_OTHER_NAMES = {  # fields of TRL's, and the recipe's that say the same
    "max_length": "block_size",
    "dataset_num_proc": "preprocessing_num_workers",
    "dataset_text_field": "text_column",
    "model_init_kwargs": "model_name_or_path",
    "ref_model_init_kwargs": "model_name_or_path",
}
_KINDS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}


def build_task_trainer(recipe: Recipe, run: Run, callbacks: Sequence[Any] = ()) -> Any:
    """TRL's trainer of the recipe's task, on Stepmark's. Collective.

    Raises:
        UsageError: Fields of the recipe do not fit together, or TRL rejects them.
        DataError: There is no data, or it does not fit the task.
    """
    from datasets import Dataset

    import stepmark.trl

    args, task = recipe.training, str(recipe.model.task)
    config = getattr(stepmark.trl, f"{_KINDS[task]}Config")
    tokenizer = build_tokenizer(recipe.model)
    model_config = config_of(recipe, tokenizer)
    options = _options(recipe, config)
    length = choose_block_size(recipe.data.block_size, tokenizer.model_max_length)
    train, validation = _rows(recipe)
    if not train:
        raise DataError("task: there are no training rows; give dataset_name or train_file with some")
    if args.eval_strategy != "no" and not validation:
        raise UsageError("eval_strategy: there is no validation data; give validation_file, or set eval_strategy: no")
    check_makeable(recipe.model, model_config, None, args.dtype, run.context)
    model = build_model(recipe.model, model_config, args.seed, None, getattr(torch, args.dtype))
    made = converted(args, config)
    more: dict[str, Any] = {"callbacks": list(callbacks), "processing_class": tokenizer}
    if task in ("dpo", "kto") and recipe.model.peft is None:
        more["ref_model"] = copy.deepcopy(model)

    def explain(error: Exception) -> UsageError:
        what, columns = " ".join(f"{type(error).__name__}: {error}".split()), ", ".join(train[0])
        return UsageError(f"task: {task} with columns {columns}: {what}; see TRL's {_KINDS[task]}Trainer")

    with explained(explain, (KeyError, ValueError)):  # as TRL rejects values, and rows without its columns
        held_out = Dataset.from_list(validation) if validation else None
        made = dataclasses.replace(made, max_length=length, **options)
        trainer = getattr(stepmark.trl, f"{_KINDS[task]}Trainer")(
            model=model, args=made, train_dataset=Dataset.from_list(train), eval_dataset=held_out, run=run, **more
        )
    kept = len(trainer.train_dataset)
    if not kept:
        raise DataError(f"block_size: TRL leaves out what is longer than {length} tokens, which is every row; raise it")
    if kept < len(train):
        logger.warning("%d of %d rows are longer than block_size and left out by TRL", len(train) - kept, len(train))
    chosen = [recipe.data.text_column, recipe.data.assistant_only_loss]
    content = json.dumps([task, length, chosen, train], sort_keys=True, default=str)
    trainer.train_dataset.fingerprint = xxhash.xxh3_128_hexdigest(content.encode())
    return trainer


def _options(recipe: Recipe, config: type) -> dict[str, Any]:
    """The fields of TRL's config that the recipe sets. Raises UsageError for one that it lacks, or the recipe has."""
    options, data = parse_options("task_options", recipe.model.task_options), recipe.data
    own = {name: name for name in (*known_fields(TrainingArguments), *all_fields())} | _OTHER_NAMES
    names = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name in own:
            raise UsageError(f"task_options: {name} is the recipe's {own[name]}; set that field")
        if name not in names:
            close = "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(name, names, n=1))
            raise UsageError(f"task_options: {config.__name__} has no {name}{close}")
    options["dataset_num_proc"] = data.preprocessing_num_workers
    if recipe.model.task == "sft":
        options |= {"assistant_only_loss": data.assistant_only_loss, "dataset_text_field": data.text_column or "text"}
    return options


def _rows(recipe: Recipe) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of training and validation, with TRL's names for the columns that the recipe names."""
    data, task = recipe.data, str(recipe.model.task)
    if data.dataset_name == STDLIB:
        splits = stdlib_texts(data.validation_split_percentage)
        train, validation = ([*_built_in(task, each)] if each is not None else [] for each in splits)
    else:
        sources = open_sources(replace(data, text_column=None, messages_column=data.messages_column or "messages"))
        name = data.messages_column
        train, validation = (
            [{("messages" if key == name else key): row[key] for key in row} for _, row in each.read()] if each else []
            for each in sources.divided()
        )
    return train[: data.max_train_samples], validation[: data.max_eval_samples]


def _built_in(task: str, texts: Corpus) -> Iterator[dict[str, Any]]:
    """Rows of built-in texts. The preferred answer to the beginning of a text is how it goes on, the other one has the
    same words in another order."""
    for number, text in enumerate(texts.read()):
        if text is None or len(text) < 2 * PIECE:
            continue
        prompt, chosen = text[:PIECE], text[PIECE : 2 * PIECE]
        words = chosen.split(" ")
        random.Random(number).shuffle(words)
        answers = {"chosen": chosen, "rejected": " ".join(words)}
        if task == "kto":
            answers = {"completion": answers["rejected" if number % 2 else "chosen"], "label": number % 2 == 0}
        yield {"prompt": prompt, **({"completion": chosen} if task == "sft" else answers)}
