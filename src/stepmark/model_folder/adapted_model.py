"""Loads an adapter of peft over the base model that it was trained on, and merges it into it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepmark.checkpoint.downloads import local_model
from stepmark.checkpoint.format.manifest import Manifest
from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.error_advice import explained
from stepmark.filesystem.json_files import read_json
from stepmark.model_folder.model_config import load_config, model_class
from stepmark.tensor_files.source_files import read_safetensors

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_DIGEST = "weights of the frozen base model"  # a key of a run's identity
_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_DTYPES = ("auto", "float32", "bfloat16", "float16")  # in which a run may have loaded the base


def load_adapted(
    folder: Path, manifest: Manifest | None, base: str | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The PeftModel of an adapter's folder on the host, its base in the dtype that the run had.

    Args:
        folder: The adapter, as peft saves it.
        manifest: That of the checkpoint, which knows the digest of the base; None: it is not checked.
        base: A folder or a name on the hub. Default: what the adapter's configuration names.
        trust_remote_code: Executes Python code that comes with the base. Default: False.

    Raises:
        UsageError: The base model cannot be loaded, or the adapter not applied to it.
        CheckpointMismatch: It is not the one that the adapter was trained on, or there is no configuration.
    """
    config = read_adapter_config(folder)
    name = base or config.get("base_model_name_or_path")
    if not name:
        raise UsageError("the adapter does not name its base model; name it with --base-model")
    name = local_model(str(name))
    expected = None if manifest is None else manifest.identity.get(BASE_DIGEST)
    tried: set[Any] = set()
    for dtype in _DTYPES:
        adapted = _apply(folder, config, name, dtype, trust_remote_code)
        kinds = frozenset(parameter.dtype for parameter in adapted.get_base_model().parameters())
        if kinds in tried:
            continue
        tried.add(kinds)
        if expected is None or _digest(adapted) == expected:
            return adapted
    raise CheckpointMismatch(
        f"{name} is not the base model that the adapter was trained on: its weights differ, or it had another adapter "
        "beside this one; name that one with --base-model"
    )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The adapter's configuration. Raises CheckpointMismatch where it has none."""
    missing = CheckpointMismatch(f"{folder} has no readable {ADAPTER_CONFIG}, which says how it is applied")
    with explained(lambda error: missing, (OSError, ValueError)):
        found = read_json(folder / ADAPTER_CONFIG, follow=True)
    if not isinstance(found, dict) or found.get("megatron_config") is not None:  # it names a module, which is imported
        raise CheckpointMismatch(f"{folder / ADAPTER_CONFIG} is no configuration, or Megatron's, which is not read")
    return found


def _apply(folder: Path, config: Mapping[str, Any], name: str, dtype: str, trust: bool) -> Any:
    import peft

    def explain(error: Exception) -> UsageError:
        if "trust_remote_code" in str(error):  # and not asked about on the terminal
            return UsageError(
                f"the base model {name} comes with Python code of its own, which is not executed here; if you trust it,"
                " evaluate with --trust_remote_code"
            )
        told = f"the adapter cannot be applied to the base model {name}: {' '.join(str(error).split())[:300]}"
        return UsageError(f"{told}; pass another one with --base-model")

    files.check_files(folder)
    with explained(explain):  # peft's, and what its files make it do
        own = next(iter(load_config(name, trust).architectures or ["AutoModel"]))
        kind = model_class(class_of_task(config) or own, Path(name))  # the class that the adapter was trained with
        base = kind.from_pretrained(name, dtype=dtype, trust_remote_code=trust)
        with warnings.catch_warnings():  # peft's own use of what transformers has renamed
            warnings.simplefilter("ignore")
            made = peft.PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=_is_float32(folder))
        made.active_peft_config.base_model_name_or_path = name  # where peft looks, wherever it was trained
    return made


def _is_float32(folder: Path) -> bool:
    """Whether the adapter was trained in float32, as peft makes it over any base; else it has the base's dtype."""
    weights = folder / ADAPTER_WEIGHTS
    return not weights.is_file() or all(each.dtype == "F32" for each in read_safetensors(weights)[0].values())


def class_of_task(config: Mapping[str, Any]) -> str | None:
    """The class of transformers that an adapter's configuration names, if it names one."""
    mapping = config.get("auto_mapping") or {}
    return _CLASSES.get(config.get("task_type") or "") or mapping.get("base_model_class")


def _digest(adapted: Any) -> str:
    from stepmark.parallel.model_digest import complete_digest
    from stepmark.training.model_wrappers import adapter_tensors, base_tensors

    own = {full for full, _ in adapter_tensors(adapted, adapted.active_adapter).values()}
    return complete_digest(base_tensors(adapted, own))


def merge_adapter(folder: Path, base: str, manifest: Manifest, max_shard_size: int) -> None:
    """Replaces the adapter in `folder`, as peft saves it, by the complete model in safetensors files of at most
    `max_shard_size` bytes of tensors. `base` and errors: as of `load_adapted`."""
    try:
        adapted = load_adapted(folder, manifest, base)
    except (UsageError, CheckpointMismatch) as error:
        raise type(error)(f"--merge-adapters: {error}") from error
    named = [(name, id(each)) for name, each in adapted.named_parameters(remove_duplicate=False)]
    owners = Counter(each for _, each in named)
    for name, each in named:
        if owners[each] > 1 and ".base_layer." in name and ".token_adapter." not in name:  # which peft ties, too
            raise UsageError(f"--merge-adapters: {name} is tied to another weight, which merging changes; leave it out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's, about what it saves
        merged = adapted.merge_and_unload()
    for path in folder.iterdir():
        if path.name.startswith("adapter_"):
            files.remove_file(path)
    merged.save_pretrained(folder, max_shard_size=max_shard_size)
    permissions = files.usual_permissions(folder)
    for path in folder.glob("*.safetensors"):  # safetensors gives its files to their owner alone
        files.set_permissions(path, permissions)
