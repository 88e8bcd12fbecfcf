"""Plans a recipe from its file: finds the model's configuration, the device type and the run's length."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from stepmark.config.optimizers import check_optimizer
from stepmark.config.quiet_libraries import quiet_libraries
from stepmark.config.recipe import Recipe
from stepmark.data.loader.order import BatchLayout
from stepmark.data.prepared_data import choose_block_size, prepare
from stepmark.data.tokenize.tokenizer import check_own_code
from stepmark.errors import UsageError
from stepmark.preflight.plan.plan import Plan, RunLength, check_mesh, make_plan
from stepmark.recipe.model import build_config, build_tokenizer
from stepmark.runtime.device import choose_device
from stepmark.runtime.hardware import check_device_name

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def plan_recipe(recipe: Recipe, ranks: int, device_memory: int | None = None, *, count_data: bool = False) -> Plan:
    """Plans a recipe for `ranks` ranks with `device_memory` bytes each. With `count_data`, an epoch's steps are counted
    in the data, which is tokenized for that.

    Raises UsageError or DataError for what the recipe describes wrongly.
    """
    quiet_libraries()
    check_optimizer(recipe.training.optim)
    check_mesh(recipe.training, ranks)
    notes: list[str] = []
    tokenizer = _tokenizer(recipe, notes)
    config = _config(recipe, tokenizer)
    length = run_length(recipe, tokenizer, ranks, count_data=count_data, progress=_to_stderr)
    _check_block_size(config, length.block_size)
    if any(getattr(config, name, None) for name in EXPERTS):
        notes.append("A mixture of experts is planned as if every expert saw every token: an upper bound.")
    device = _device(recipe, notes)
    return make_plan(recipe, config, ranks, length, device, device_memory, notes)


def run_length(
    recipe: Recipe, tokenizer: Any | None, ranks: int, *, count_data: bool, progress: Callable[[str], None]
) -> RunLength:
    """The length of a run of the recipe. Without `max_steps`, `count_data` tokenizes the data to count samples, into
    the cache of the run.

    Raises DataError or UsageError for data that cannot be read.
    """
    args = recipe.training
    longest = getattr(tokenizer, "model_max_length", 2**62)
    block_size = choose_block_size(recipe.data.block_size, longest)
    replicas = ranks // (args.tensor_parallel_size * args.pipeline_parallel_size)
    layout = BatchLayout(args.per_device_train_batch_size, replicas, args.gradient_accumulation_steps)
    steps: int | None = args.max_steps if args.max_steps > 0 else None
    if steps is None and count_data and tokenizer is not None:
        samples = len(prepare(recipe.data, tokenizer, progress=progress).train)
        whole = samples // layout.global_batch if args.dataloader_drop_last else -(-samples // layout.global_batch)
        steps = math.ceil(args.num_train_epochs * whole)
    return RunLength(block_size, layout.global_batch, steps)


def _tokenizer(recipe: Recipe, notes: list[str]) -> Any | None:
    try:
        return build_tokenizer(recipe.model)
    except UsageError as error:
        notes.append(f"Planned with the configuration's own vocabulary: {error}")
        return None


def _config(recipe: Recipe, tokenizer: Any | None) -> Any:
    name = recipe.model.model_name_or_path
    if name is None:
        return build_config(recipe.model, tokenizer)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=recipe.model.trust_remote_code)
    except (OSError, ValueError) as error:
        check_own_code(error, "model_name_or_path", name)
        raise UsageError(
            f"model_name_or_path: {name} has no readable config.json; a plan needs it, but no weights"
        ) from error


def _check_block_size(config: Any, block_size: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and block_size > longest:
        raise UsageError(
            f"block_size: {block_size} tokens are more than the model's {longest} positions; lower block_size, or "
            "raise the positions in config_overrides"
        )


def _device(recipe: Recipe, notes: list[str]) -> str:
    wish = recipe.training.device_name
    check_device_name(wish)
    if wish != "auto":
        return wish
    found = choose_device("auto")
    notes.append(f"device: auto is {found} on this machine; --device xla or --device cuda plans for another one.")
    return found


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
