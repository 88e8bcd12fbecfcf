"""`stepmark train` in one rank: from a recipe to a trained model in the output folder."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stepmark.checkpoint.downloads import local_model, models
from stepmark.config.data_arguments import columns_of
from stepmark.config.quiet_libraries import leave_out_torch_xla, quiet_libraries
from stepmark.config.recipe import Recipe
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.evaluation.metric_functions import load_metrics
from stepmark.filesystem.local_paths import is_address
from stepmark.liveness.gc_pause import quick_imports
from stepmark.recipe.early_checks import MODELS, check_early, work_offline_without_hub
from stepmark.runtime.context import Context
from stepmark.runtime.device import choose_device
from stepmark.runtime.xla_environment import extracting_graphs, prepare_environment
from stepmark.trainer.run import Run, check_device
from stepmark.trainer.run_folder.run_mirror import checkpoint_here

if TYPE_CHECKING:
    from stepmark.trainer.trainer import Trainer


def train(recipe: Recipe) -> None:
    """Runs the recipe as one of the ranks. Collective."""
    run = begin(recipe)
    with quick_imports():
        from stepmark.recipe.used_recipe import recipe_writer, write_used_recipe

    run.prepare_folder()
    if recipe.model.task is not None:
        from stepmark.recipe.task import build_task_trainer

        trainer = build_task_trainer(recipe, run, [recipe_writer(recipe)])
    else:
        trainer = build_trainer(
            recipe,
            run,
            prepare=lambda tokenizer: prepare_data(recipe, tokenizer, run.context),
            callbacks=[recipe_writer(recipe)],
        )
    trainer.checkpoint_files.append(lambda folder: write_used_recipe(folder, recipe))
    trainer.train(save_model=True)
    _say(run.context, _last_line(recipe, trainer.state))


def begin(recipe: Recipe) -> Run:
    """Makes the checks that need no data, and opens the run. Collective."""
    args = recipe.training
    quiet_libraries()
    prepare_environment()
    device = choose_device(args.device_name)
    if device != "xla":
        leave_out_torch_xla()
    unreachable = work_offline_without_hub(recipe)
    with quick_imports():
        _check_choices(recipe, device)
    run = Run.open(args)
    context = run.context
    named = [str(name) for field in MODELS if is_address(name := getattr(recipe.model, field))]
    models.update(context.ask_leader("downloading models", lambda: {each: local_model(each) for each in named}))
    if isinstance(args.resume_from_checkpoint, str) and is_address(args.resume_from_checkpoint):
        checkpoint_here(args.resume_from_checkpoint, context)
    ranks = f"{context.world.size} rank{'s' if context.world.size > 1 else ''}"
    _say(context, f"device: {context.runtime.name}, {ranks}")
    if unreachable:
        _say(context, "the Hugging Face hub does not answer; what was downloaded before is used")
    return run


def check_recipe(recipe: Recipe) -> None:
    """Makes all checks of a run that need neither data nor weights, on this machine, and that of a new model.

    Raises:
        StepmarkError: A run of the recipe would be refused.
    """
    from stepmark.recipe.model import build_tokenizer, config_of, make_model

    check_early(recipe)
    work_offline_without_hub(recipe)
    device = choose_device(recipe.training.device_name)
    _check_choices(recipe, device)
    check_device(recipe.training, device)
    config = config_of(recipe, build_tokenizer(recipe.model))
    if recipe.model.config_name is not None:
        with torch.device("meta"):
            make_model(recipe.model, config)


def build_trainer(
    recipe: Recipe,
    run: Run,
    *,
    prepare: Callable[[Any], Any],
    reads_weights: bool = True,
    callbacks: Sequence[Any] = (),
) -> Trainer:
    """The recipe's Trainer. Collective.

    Args:
        recipe: The recipe.
        run: The opened run.
        prepare: Maps the tokenizer to the data: `train`, `validation` or None, and `fingerprint`.
        reads_weights: See `build_model`. Default: True.
        callbacks: For the Trainer.

    Raises:
        UsageError: Fields of the recipe do not fit together.
        DataError: There is no data, or it does not fit the model.
    """
    with quick_imports():
        from stepmark.recipe.model import build_model, build_tokenizer, check_makeable, config_of
        from stepmark.trainer.trainer import Trainer

    args, functions = recipe.training, load_metrics(recipe.evaluation.metrics, "metrics")
    tokenizer = build_tokenizer(recipe.model)
    config = config_of(recipe, tokenizer)
    # An adapter is made over the complete model, and sharded with it.
    make = _model_factory(args, run.context) if recipe.model.peft is None else None
    check_makeable(recipe.model, config, make, args.dtype, run.context)
    data = prepare(tokenizer)
    if args.eval_strategy != "no" and data.validation is None:
        raise UsageError("eval_strategy: there is no validation data; give validation_file, or set eval_strategy: no")
    dtype = getattr(torch, args.dtype)
    model = build_model(recipe.model, config, args.seed, make, dtype, reads_weights=reads_weights)
    _check_vocabulary(model, tokenizer, recipe)
    data.train.fingerprint = data.fingerprint
    data.train.description = data.description
    for each in filter(None, (data.train, data.validation)):
        each.sample_columns = columns_of(recipe.data)
    return Trainer(
        model,
        args,
        train_dataset=data.train,
        eval_dataset=data.validation,
        processing_class=tokenizer,
        callbacks=callbacks,
        run=run,
        **functions,
    )


def _model_factory(args: TrainingFields, context: Context) -> Any:
    """Builds the model in shards, where several ranks hold it together; otherwise None."""
    from stepmark.parallel.loading.load import model_factory
    from stepmark.trainer.run_model import make_mesh, sharding_options
    from stepmark.training.model_options import enable_gradient_checkpointing

    if args.tensor_parallel_size == args.pipeline_parallel_size == args.expert_parallel_size == 1:
        return None
    factory = model_factory(make_mesh(args, context), **sharding_options(args))
    if not args.gradient_checkpointing:
        return factory

    def shard(model: Any) -> None:
        """What stages cost, and so how layers are divided among them, depends on it."""
        enable_gradient_checkpointing(model, context.runtime, args.checkpointing_options)
        factory.shard(model)

    return dataclasses.replace(factory, shard=shard)


def prepare_data(recipe: Recipe, tokenizer: Any, context: Context) -> Any:
    """Tokenized and packed data: one rank of each node prepares it, the others read the cache."""
    from stepmark.data.prepared_data import prepare

    with context.leader_first("preparing data") as leads:
        config = recipe.data if leads else dataclasses.replace(recipe.data, overwrite_cache=False)
        return prepare(config, tokenizer, progress=lambda text: _say(context, text))


def _check_choices(recipe: Recipe, device: str) -> None:
    """Raises UsageError for a schedule, reporter or metric that does not exist, and an attention that is not for the
    device, before anything is built."""
    from stepmark.recipe.model import check_device_has_attention
    from stepmark.trainer.callbacks import reporters
    from stepmark.training.learning_rate_schedule import check_schedule

    args = recipe.training
    check_schedule(args.lr_scheduler_type, args.learning_rate, args.parsed_options("lr_scheduler_kwargs"))
    reporters(args)
    load_metrics(recipe.evaluation.metrics, "metrics")
    check_device_has_attention(recipe, device)


def _check_vocabulary(model: Any, tokenizer: Any, recipe: Recipe) -> None:
    """Raises UsageError for tokens without an embedding, which crash the host or read arbitrary device memory."""
    embeddings = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > embeddings:
        raise UsageError(
            f"tokenizer_name: the tokenizer has {len(tokenizer)} tokens and the model only {embeddings} embeddings; "
            "use the tokenizer that belongs to the model"
        )
    if recipe.model.model_name_or_path and recipe.model.tokenizer_name == "bytes" and embeddings >= 2 * len(tokenizer):
        raise UsageError(
            f"tokenizer_name: bytes has {len(tokenizer)} tokens and the pretrained model {embeddings} embeddings, "
            "which belong to another tokenizer; leave tokenizer_name out, or name the model's own"
        )


def _last_line(recipe: Recipe, state: Any) -> str:
    args, adapted = recipe.training, recipe.model.peft is not None
    done = f"done: step {state.global_step}"
    if extracting_graphs():
        return f"{done}; nothing is saved"
    folder = args.place
    best = args.load_best_model_at_end and state.best_model_checkpoint is not None
    kind = "adapter" if adapted else "model"
    model = f"the best {kind}, of step {state.best_global_step}," if best else f"the {kind}"
    more = ""
    if adapted and args.save_strategy != "no":
        more = f"; the complete model: stepmark consolidate {folder} OUT --merge-adapters"
    evaluate = "" if recipe.model.task is not None else f", or stepmark evaluate {folder}"
    return f"{done}; {model} is in {folder}; next: stepmark report {folder}{evaluate}{more}"


def _say(context: Context, text: str) -> None:
    if context.host.rank == 0:
        print(text, file=sys.stderr, flush=True)
