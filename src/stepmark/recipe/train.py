"""`stepmark train` in one rank: from a recipe to a trained model in the output folder."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from stepmark.errors import DataError
from stepmark.recipe.quiet import quiet_libraries
from stepmark.recipe.recipe import Recipe
from stepmark.runtime.context import Context, start


def train(recipe: Recipe) -> None:
    """Runs the recipe as one of the ranks; collective."""
    args = recipe.training
    quiet_libraries()
    context = start(args.device)
    _say(context, f"device: {context.runtime.name}, {context.world.size} rank{'s' if context.world.size > 1 else ''}")
    from stepmark.recipe.model import build_model, build_tokenizer
    from stepmark.trainer.output import prepare_output
    from stepmark.trainer.trainer import Trainer

    prepare_output(Path(args.output_dir), context.host)
    tokenizer = build_tokenizer(recipe.model)
    data = prepare_data(recipe, tokenizer, context)
    if args.eval_strategy != "no" and data.validation is None:
        raise DataError("eval_strategy: there is no validation data; give validation_file, or set eval_strategy: no")
    model = build_model(recipe.model, tokenizer, args.seed)
    _check_block_size(model, data.train)
    data.train.fingerprint = data.fingerprint
    trainer = Trainer(
        model, args, train_dataset=data.train, eval_dataset=data.validation, processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model()
    if args.eval_strategy != "no":
        metrics = {**trainer.final_evaluation(), "eval_samples": len(data.validation)}
        trainer.journal.results("eval", metrics)


def prepare_data(recipe: Recipe, tokenizer: Any, context: Context) -> Any:
    """Tokenized and packed data; one rank of each node prepares it, while the others wait, and then finds it cached."""
    from stepmark.data.prepared import prepare

    with context.leader_first("preparing data") as leads:
        config = recipe.data if leads else dataclasses.replace(recipe.data, overwrite_cache=False)
        return prepare(config, tokenizer, progress=lambda text: _say(context, text))


def _check_block_size(model: Any, dataset: Any) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    length = len(dataset[0]["input_ids"])
    if longest is not None and length > longest:
        raise DataError(
            f"block_size: {length} tokens are more than the model's {longest} positions; lower block_size, or raise "
            "the positions in config_overrides"
        )


def _say(context: Context, text: str) -> None:
    if context.host.rank == 0:
        print(text, file=sys.stderr, flush=True)
