"""Builds the model and the tokenizer that a recipe describes, on the host."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepmark.config.recipe import ModelArguments, Recipe
from stepmark.config.yaml_file import parse_options
from stepmark.data.prepared_data import choose_block_size
from stepmark.data.tokenize.tokenizer import check_own_code, load_tokenizer
from stepmark.errors import DataError, StepmarkError, UsageError
from stepmark.launch.imports import quick_imports
from stepmark.parallel.loading.load import ModelFactory, load_model, new_model
from stepmark.recipe.adapter import with_adapter
from stepmark.recipe.early_checks import check_model_folder
from stepmark.runtime.module_placement import cast_module


def build_tokenizer(config: ModelArguments) -> Any:
    """The tokenizer that the recipe names, or the one in the model's folder."""
    if config.model_name_or_path is not None:
        check_model_folder(config.model_name_or_path)
    name = config.tokenizer_name or str(config.model_name_or_path)
    given = config.tokenizer_name is not None or Path(name).is_dir()
    field = "tokenizer_name" if given else "model_name_or_path"  # a folder may lack a tokenizer, which that field names
    tokenizer = load_tokenizer(name, config.trust_remote_code, field=field)
    # transformers makes an empty tokenizer of a folder that has a config.json and no tokenizer's files.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise UsageError(
            f"{field}: no tokenizer could be loaded from {name!r}: it has no tokens; set tokenizer_name to the "
            "model's tokenizer"
        )
    if config.chat_template_path is not None:
        tokenizer.chat_template = _chat_template(config.chat_template_path)
    return tokenizer


def _chat_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"chat_template_path: {path} cannot be read ({error}); name a text file with Jinja") from error


def build_config(config: ModelArguments, tokenizer: Any) -> Any:
    """The configuration of a new model, with the tokenizer's vocabulary size and special tokens unless overridden.
    Without a tokenizer (None) the configuration's own apply."""
    from transformers import CONFIG_MAPPING, AutoConfig

    name = str(config.config_name)
    overrides = _overrides(config)
    by_type = name in CONFIG_MAPPING and not Path(name).exists()
    try:
        trust = config.trust_remote_code
        made = CONFIG_MAPPING[name]() if by_type else AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        check_own_code(error, "config_name", name)
        raise UsageError(
            f"config_name: {name!r} is neither a folder with a config.json nor a model type such as gpt2, llama or "
            "qwen3"
        ) from error
    unknown = [key for key in overrides if not hasattr(made, key)]
    if unknown:
        raise UsageError(f"config_overrides: {type(made).__name__} has no {unknown[0]}{_similar(unknown[0], made)}")
    given = {} if tokenizer is None else {"vocab_size": len(tokenizer), **_special_tokens(tokenizer)}
    values = {**given, **overrides}
    if tokenizer is not None and values["vocab_size"] < len(tokenizer):
        raise UsageError(
            f"config_overrides: vocab_size {values['vocab_size']} is less than the tokenizer's {len(tokenizer)} tokens"
        )
    inherited = {} if by_type else made.to_dict()
    if "num_hidden_layers" in overrides:
        inherited.pop("layer_types", None)  # one per layer: derived again for another number of layers
    try:
        return type(made)(**{**inherited, **values})
    except Exception as error:  # every configuration class checks its values differently
        message = " ".join(str(error).split())
        raise UsageError(f"config_overrides: {type(made).__name__} rejects {overrides}: {message}") from error


def check_config(recipe: Recipe, tokenizer: Any) -> None:
    """Checks the configuration of a new model, which costs nothing, before data are tokenized for it.

    Raises UsageError as `build_config`, and DataError where blocks are longer than the model takes.
    """
    if recipe.model.config_name is not None:
        length = choose_block_size(recipe.data.block_size, tokenizer.model_max_length)
        check_block_size(build_config(recipe.model, tokenizer), length)


def check_block_size(config: Any, length: int) -> None:
    """Raises DataError where blocks of `length` tokens are longer than the model that `config` describes takes."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise DataError(
            f"block_size: {length} tokens are more than the model's {longest} positions; lower block_size, or raise "
            "the positions in config_overrides"
        )


def check_new_model(config: ModelArguments, tokenizer: Any) -> None:
    """Raises UsageError where no model can be made of `config_name` and `config_overrides`; it gets no weights."""
    if config.config_name is not None:
        model_config = build_config(config, tokenizer)
        with torch.device("meta"):
            _new_model(lambda: _from_config(model_config, config.trust_remote_code))


def build_model(
    config: ModelArguments,
    tokenizer: Any,
    seed: int,
    factory: ModelFactory | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.nn.Module:
    """The causal language model: new, with weights drawn in fp32 by `seed` and cast to `dtype`, or from a local folder.

    It is complete and on the host; with a `factory`, sharded and on the device, with the same values.
    """
    with quick_imports():
        import transformers.models.auto.modeling_auto  # noqa: F401

        if config.peft is not None:
            import peft  # noqa: F401

    torch.manual_seed(seed)
    return with_adapter(_base_model(config, tokenizer, factory, dtype), config)


def _base_model(
    config: ModelArguments, tokenizer: Any, factory: ModelFactory | None, dtype: torch.dtype
) -> torch.nn.Module:
    trust = config.trust_remote_code
    if config.model_name_or_path is None:
        model_config = build_config(config, tokenizer)

        def make() -> torch.nn.Module:
            if factory is not None:
                return new_model(factory, model_config, dtype=dtype, trust_remote_code=trust)
            model = _from_config(model_config, trust)
            cast_module(model, dtype)
            return model

        return _new_model(make)
    if factory is not None:
        return _load_sharded(factory, config.model_name_or_path, dtype, trust)
    return _load(config.model_name_or_path, dtype, trust)


def _new_model(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """What `make` returns. Raises UsageError where the fields do not describe a model."""
    try:
        return make()
    except StepmarkError:
        raise
    except Exception as error:  # every model class checks its sizes differently: ValueError, KeyError and more
        raise UsageError(
            f"config_name and config_overrides: they do not describe a valid model: {_first_line(error)}"
        ) from error


def _from_config(model_config: Any, trust: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust)
    return model


def build_untrained(
    config: ModelArguments,
    tokenizer: Any,
    seed: int,
    factory: ModelFactory | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.nn.Module:
    """A model as `build_model` returns it, but for the values: of `model_name_or_path` no weights are read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, trust = config.model_name_or_path, config.trust_remote_code
    if name is None:
        return build_model(config, tokenizer, seed, factory, dtype)

    try:
        saved = AutoConfig.from_pretrained(name, trust_remote_code=trust)

        def make() -> torch.nn.Module:
            made: torch.nn.Module = AutoModelForCausalLM.from_config(saved, dtype=dtype, trust_remote_code=trust)
            return made

        model: torch.nn.Module = make() if factory is None else factory.new(make)
        return with_adapter(model, config)
    except StepmarkError:
        raise
    except Exception as error:  # as in _load
        check_own_code(error, "model_name_or_path", name)
        raise UsageError(f"model_name_or_path: no model can be made from {name}: {_first_line(error)}") from error


def check_sharding(config: ModelArguments, tokenizer: Any, factory: ModelFactory) -> None:
    """Raises UsageError where `factory` cannot shard the model; no weights are read or drawn for that."""
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = config.trust_remote_code
    if config.model_name_or_path is None:
        model_config = build_config(config, tokenizer)
    else:
        try:
            model_config = AutoConfig.from_pretrained(config.model_name_or_path, trust_remote_code=trust)
        except (OSError, ValueError):
            return  # the error of loading it says more
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust)
    except Exception:  # as above: the error of building it says more
        return
    factory.shard(model)


def _load_sharded(factory: ModelFactory, name: str, dtype: torch.dtype, trust: bool) -> torch.nn.Module:
    try:
        model: torch.nn.Module = load_model(factory, name, dtype=dtype, trust_remote_code=trust)
    except StepmarkError:
        raise
    except Exception as error:  # as in _load
        check_own_code(error, "model_name_or_path", name)
        raise UsageError(f"model_name_or_path: no model can be loaded from {name}: {_first_line(error)}") from error
    return model


def _load(name: str, dtype: torch.dtype, trust: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        load: Any = AutoModelForCausalLM.from_pretrained
        model, report = load(name, dtype=dtype, output_loading_info=True, trust_remote_code=trust)
    except Exception as error:  # dozens of kinds: of transformers, safetensors, the hub's client and parsers
        check_own_code(error, "model_name_or_path", name)
        raise UsageError(f"model_name_or_path: no model can be loaded from {name}: {_first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"model_name_or_path: {name} lacks weights of {type(model).__name__}: {missing[0]}{more}; name a folder "
            "with a complete model"
        )
    assert isinstance(model, torch.nn.Module)
    return model


def _overrides(config: ModelArguments) -> dict[str, Any]:
    given = config.config_overrides or {}
    return parse_options("config_overrides", given) if isinstance(given, str) else dict(given)


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name, None) is not None}


def _first_line(error: Exception) -> str:
    line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {line}" if isinstance(error, LookupError) or not line else line


def _similar(name: str, config: Any) -> str:
    close = difflib.get_close_matches(name, config.to_dict(), n=1)
    return f"; did you mean {close[0]}?" if close else f"; {type(config).__name__} has other names for its sizes"
