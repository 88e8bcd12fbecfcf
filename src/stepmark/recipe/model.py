"""Builds the model and the tokenizer that a recipe describes, on the host."""

from __future__ import annotations

import contextlib
import copy
import difflib
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepmark.checkpoint.downloads import local_model
from stepmark.checkpoint.host_memory import free_host_memory, shortage
from stepmark.config.recipe import ModelArguments, Recipe
from stepmark.config.yaml_file import parse_options
from stepmark.data.prepared_data import choose_block_size
from stepmark.data.tokenize.tokenizer import check_own_code, load_tokenizer
from stepmark.errors import UsageError
from stepmark.filesystem.error_advice import explained, first_line
from stepmark.filesystem.printable import listed
from stepmark.liveness.gc_pause import quick_imports
from stepmark.model_folder.model_config import check_fits, load_config
from stepmark.parallel.loading.load import ModelFactory, patched_constructors
from stepmark.recipe.early_checks import PROBLEMS, check_model_folder
from stepmark.runtime.context import Context
from stepmark.runtime.module_placement import cast_module
from stepmark.trainer.run_folder.run_identity import SPECIAL
from stepmark.training.model_options import check_attention, use_attention

REWARD = "reward"  # the task whose models have one score
_BY_PEFT = (ValueError, TypeError)  # as it rejects modules and values
UNLIMITED = 2**62  # tokens, where no tokenizer says how many


def build_tokenizer(config: ModelArguments) -> Any:
    """The tokenizer that the recipe names, or the one in the model's folder."""
    if config.model_name_or_path is not None:
        check_model_folder(config.model_name_or_path, local_model(config.model_name_or_path))
    name = local_model(config.tokenizer_name or str(config.model_name_or_path))
    given = config.tokenizer_name is not None or Path(name).is_dir()
    field = "tokenizer_name" if given else "model_name_or_path"  # a folder may lack a tokenizer, which that field names
    tokenizer = load_tokenizer(name, config.trust_remote_code, field=field)
    # transformers makes an empty tokenizer of a folder that has a config.json and no tokenizer's files.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise UsageError(
            f"{field}: no tokenizer could be loaded from {name!r}: it has no tokens; set tokenizer_name to the "
            "model's tokenizer"
        )
    path = config.chat_template_path
    try:
        if path is not None:
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"chat_template_path: {path} cannot be read ({error}); name a text file with Jinja") from error
    return tokenizer


def build_config(config: ModelArguments, tokenizer: Any) -> Any:
    """The configuration of a new model, with the tokenizer's vocabulary size and special tokens unless overridden.
    Without a tokenizer (None) the configuration's own apply."""
    from transformers import CONFIG_MAPPING

    name = local_model(str(config.config_name))
    wanted = config.config_overrides or {}
    overrides = parse_options("config_overrides", wanted) if isinstance(wanted, str) else dict(wanted)
    by_type = name in CONFIG_MAPPING and not Path(name).exists()

    def explain(error: Exception) -> UsageError:
        check_own_code(error, "config_name", name)
        return UsageError(f"config_name: {PROBLEMS['config_name'].format(name)}")

    with explained(explain, (OSError, ValueError)):
        made = CONFIG_MAPPING[name]() if by_type else load_config(name, config.trust_remote_code)
    unknown = [key for key in overrides if not hasattr(made, key)]
    if unknown:
        kind, close = type(made).__name__, difflib.get_close_matches(unknown[0], made.to_dict(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"{kind} has other names for its sizes"
        raise UsageError(f"config_overrides: {kind} has no {unknown[0]}; {hint}")
    special = {name: getattr(tokenizer, name, None) for name in SPECIAL}
    given = {} if tokenizer is None else {"vocab_size": len(tokenizer), **special}
    values = {**{name: value for name, value in given.items() if value is not None}, **overrides}
    if tokenizer is not None and values["vocab_size"] < len(tokenizer):
        raise UsageError(
            f"config_overrides: vocab_size {values['vocab_size']} is less than the tokenizer's {len(tokenizer)} tokens"
        )
    inherited = {} if by_type else made.to_dict()
    if "num_hidden_layers" in overrides:
        inherited.pop("layer_types", None)  # one per layer: derived again for another number of layers
    rejects = f"config_overrides: {type(made).__name__} rejects {overrides}"
    with explained(lambda error: UsageError(f"{rejects}: {' '.join(str(error).split())}")):  # each in its own way
        made = type(made)(**{**inherited, **values})
    return made


def check_device_has_attention(recipe: Recipe, device: str) -> None:
    """Raises UsageError where `attn_implementation` is not for devices of this type."""
    args = recipe.training
    check_attention(recipe.model.attn_implementation, device, half=args.bf16 or args.fp16 or args.dtype == "bfloat16")


def config_of(recipe: Recipe, tokenizer: Any) -> Any:
    """The configuration of the recipe's model, which is made once in a run, before data are tokenized for it. Without a
    tokenizer (None) its own vocabulary applies, and blocks may have any length that it takes.

    Raises UsageError where the fields do not describe one, the saved model has none that can be read, or blocks are
    longer than the model takes.
    """
    name = recipe.model.model_name_or_path
    if name is None:
        made = build_config(recipe.model, tokenizer)
    else:
        with _explained(name, "loaded"):
            made = load_config(local_model(name), recipe.model.trust_remote_code)
    length = choose_block_size(recipe.data.block_size, getattr(tokenizer, "model_max_length", UNLIMITED))
    longest = getattr(made, "max_position_embeddings", None)
    if isinstance(longest, (int, float)) and length > longest:
        more = ", or raise max_position_embeddings in config_overrides" if name is None else ""
        told = f"block_size: {length} tokens are more than the model's {longest} positions"
        raise UsageError(f"{told}; set block_size to {longest} or less{more}")
    return made


def build_model(
    config: ModelArguments,
    made: Any,
    seed: int,
    factory: ModelFactory | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    reads_weights: bool = True,
) -> torch.nn.Module:
    """The causal language model of the configuration that `config_of` has made: new, with weights drawn in fp32 from
    `seed` and cast to `dtype`, or from a local folder; without `reads_weights`, one that only looks like that. It is
    complete and on the host; with a `factory`, sharded and on the device, with the same values."""
    with quick_imports():
        import transformers.models.auto.modeling_auto  # noqa: F401

        if config.peft is not None:
            import peft  # noqa: F401

    torch.manual_seed(seed)
    name = config.model_name_or_path
    if name is None:
        model = make_model(config, made, factory, dtype)
    elif reads_weights:
        with contextlib.nullcontext() if factory is None else patched_constructors(factory):
            model = _load(local_model(name), made, dtype, config, factory is None)
    else:
        make = partial(_from_config, made, config, dtype=dtype)
        with _explained(name, "made"):
            model = make() if factory is None else factory.new(make)
    return configured(model, config)


def make_model(
    config: ModelArguments, made: Any, factory: ModelFactory | None = None, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """Raises UsageError where the fields do not describe a model."""
    invalid = "config_name and config_overrides: they do not describe a valid model"
    with explained(lambda error: UsageError(f"{invalid}: {first_line(error)}")):  # each class checks its sizes
        if factory is not None:
            return factory.new(lambda: _from_config(made, config), dtype)
        model = _from_config(made, config)
    cast_module(model, dtype)
    return model


def _from_config(made: Any, config: ModelArguments, **options: Any) -> torch.nn.Module:
    kind, head = _kind_of(config)
    for name, value in head.items():
        setattr(made, name, value)
    return kind.from_config(made, trust_remote_code=config.trust_remote_code, **options)


def _kind_of(config: ModelArguments) -> tuple[Any, dict[str, Any]]:
    """The class of the task's models, and what it asks of their configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if config.task == REWARD:
        return AutoModelForSequenceClassification, {"num_labels": 1}
    return AutoModelForCausalLM, {}


def check_makeable(config: ModelArguments, made: Any, factory: ModelFactory | None, dtype: str, own: Context) -> None:
    """Raises UsageError where `factory` cannot shard the model, or, on all ranks of a node, where host memory has no
    room for what they make of it; no weights are read or drawn for that. Collective."""
    size, read = 0, config.model_name_or_path is not None
    with contextlib.suppress(Exception), torch.device("meta"):  # the error of building or loading it says more
        model = _from_config(copy.deepcopy(made), config)
        size = getattr(torch, dtype if read else "float32").itemsize
    if size and factory is not None:
        factory.shard(model)
    needed = size and size * sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    reports = own.host.all_gather((own.world.node, needed, free_host_memory()))
    here = [(needs, free) for node, needs, free in reports if node == own.world.node]
    short = shortage([needs for needs, _ in here], [free for _, free in here], "the model", "the models of the")
    if short is not None:
        raise UsageError(
            f"{'model_name_or_path' if read else 'config_name'}: making the model needs {short}; divide it among ranks "
            "(tensor_parallel_size, pipeline_parallel_size), start fewer ranks on a node, or choose a smaller model"
        )


def _load(name: str, made: Any, dtype: torch.dtype, config: ModelArguments, whole: bool) -> torch.nn.Module:
    (kind, head), trust = _kind_of(config), config.trust_remote_code
    with _explained(name, "loaded"):
        if whole and not trust:
            check_fits(lambda: _from_config(made, config), Path(name))
        model, report = kind.from_pretrained(
            name, dtype=dtype, output_loading_info=True, trust_remote_code=trust, **head
        )
    missing = sorted(report["missing_keys"])
    if config.task == REWARD:  # whose head is new
        base = f"{model.base_model_prefix}."
        missing = [each for each in missing if each.startswith(base)]
    if missing:
        raise UsageError(
            f"model_name_or_path: {name} lacks weights of {type(model).__name__}: {listed(missing, 1)}; name a folder "
            "with a complete model"
        )
    return model


def _explained(name: str, what: str) -> AbstractContextManager[None]:
    """Inside the block, an exception of transformers, safetensors, the hub's client or a parser is a UsageError."""

    def explain(error: Exception) -> UsageError:
        check_own_code(error, "model_name_or_path", name)
        return UsageError(f"model_name_or_path: no model can be {what} from {name}: {first_line(error)}")

    return explained(explain)


def configured(model: nn.Module, config: ModelArguments) -> nn.Module:
    """The model with the attention and the adapter that the recipe asks for; the adapter's first weights are the next
    random numbers.

    Raises:
        UsageError: The model has no such attention; peft is not installed, or cannot adapt the modules that
            `lora_target_modules` names.
    """
    use_attention(model, config.attn_implementation)
    if config.peft is None:
        return model
    from peft import LoraConfig, get_peft_model

    modules = config.lora_target_modules  # one name means its modules, other text is a pattern of complete names
    with explained(lambda error: UsageError(f"lora_target_modules: {' '.join(str(error).split())}"), _BY_PEFT):
        lora = LoraConfig(
            task_type="SEQ_CLS" if config.task == REWARD else "CAUSAL_LM",
            r=config.lora_r,
            lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # a float will do
            lora_dropout=config.lora_dropout,
            target_modules=[modules] if isinstance(modules, str) and modules.isidentifier() else modules,
        )
        adapted: Any = get_peft_model(model, lora)
    return adapted
