"""Merges an adapter of peft into the base model that it was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.json_values import decode_plain
from stepmark.checkpoint.format.manifest import ADAPTER, Manifest
from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.filesystem import files

BASE_DIGEST = "weights of the frozen base model"  # a key of a run's identity
_CONFIG = "adapter_config.json"
_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


@dataclass(frozen=True)
class Merge:
    """`base`: a folder or a name on the hub; None: what the adapter's configuration names."""

    base: str | None = None


def merge_adapter(folder: Path, merge: Merge, manifest: Manifest, max_shard_size: int) -> None:
    """Replaces the adapter in `folder`, as peft saves it, by the complete model in safetensors.

    Args:
        folder: The adapter, with its configuration.
        merge: The base model.
        manifest: That of the checkpoint, which knows the digest of the base.
        max_shard_size: Bytes of tensors in one file.

    Raises:
        UsageError: The base model cannot be loaded, or the adapter not applied to it.
        CheckpointMismatch: It is not the one that the adapter was trained on.
    """
    import peft

    if not (folder / _CONFIG).is_file():
        raise CheckpointMismatch(f"--merge-adapters: the checkpoint has no {_CONFIG}, which says how it is applied")
    config = json.loads((folder / _CONFIG).read_bytes())
    name = merge.base or config.get("base_model_name_or_path")
    if not name:
        raise UsageError("--merge-adapters: the adapter does not name its base model; pass it with --base-model")
    try:
        base = _model_class(config, str(name)).from_pretrained(str(name), dtype="auto")
        adapted = peft.PeftModel.from_pretrained(base, str(folder))
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--merge-adapters: the adapter cannot be applied to the base model {name}: {reason[:300]}; pass another "
            "one with --base-model"
        ) from error
    _check_base(adapted, str(name), manifest)
    merged = adapted.merge_and_unload()
    for path in folder.iterdir():
        if path.name.startswith(("adapter_", "README")):
            files.remove_file(path)
    merged.save_pretrained(folder, max_shard_size=max_shard_size)


def _model_class(config: Mapping[str, Any], base: str) -> Any:
    """The class of transformers that the adapter was trained with."""
    import transformers

    mapping = config.get("auto_mapping") or {}
    name = _CLASSES.get(config.get("task_type") or "") or mapping.get("base_model_class")
    if name is None:
        architectures = transformers.AutoConfig.from_pretrained(base).architectures or ["AutoModel"]
        name = architectures[0]
    return getattr(transformers, name)


def _check_base(adapted: Any, name: str, manifest: Manifest) -> None:
    """Raises CheckpointMismatch where the run had another base model. It may have converted it."""
    import torch

    expected = decode_plain(manifest.metadata).get("identity", {}).get(BASE_DIGEST)
    if expected is None:  # saved by a loop of the user's own
        return
    dtypes = {entry.dtype for entry in manifest.tensors[ADAPTER].values()}
    for convert in (False, True):
        if convert and dtypes != {"BF16"}:
            break
        if convert:
            adapted.to(torch.bfloat16)
        if _digest(adapted) == expected:
            return
    raise CheckpointMismatch(
        f"--merge-adapters: {name} is not the base model that the adapter was trained on: its weights differ; pass "
        "that one with --base-model"
    )


def _digest(adapted: Any) -> str:
    from stepmark.parallel.model_digest import complete_digest
    from stepmark.training.adapter_tensors import adapter_tensors, base_tensors

    own = {full for full, _ in adapter_tensors(adapted, adapted.active_adapter).values()}
    return complete_digest(base_tensors(adapted, own))
