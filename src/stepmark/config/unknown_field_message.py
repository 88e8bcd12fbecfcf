"""Error messages for fields that a recipe cannot have."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection

# Fields of transformers' TrainingArguments and run_clm that recipes often have, and what to use instead.
ELSEWHERE = {
    "fp16": "use bf16",
    "do_train": "leave it out: `stepmark train` trains",
    "do_eval": "use eval_strategy",
    "evaluation_strategy": "use eval_strategy",
    "overwrite_output_dir": "choose another output_dir, or set resume_from_checkpoint",
    "per_gpu_train_batch_size": "use per_device_train_batch_size",
    "per_gpu_eval_batch_size": "use per_device_eval_batch_size",
    "logging_dir": "TensorBoard's files go to output_dir",
    "no_cuda": "use device: cpu",
    "use_cpu": "use device: cpu",
    "torch_dtype": "use dtype",
    "model_type": "use config_name",
}
# Fields of run_clm, which no installed package declares.
RUN_CLM = ("cache_dir", "use_fast_tokenizer", "model_revision", "token", "trust_remote_code", "streaming")
TYPING_ERROR = 0.85  # similarity from which a name counts as a typing error


def unknown_field(name: str, known: Collection[str], path: str | None = None) -> str:
    """One line that says that `name`, in the recipe `path` or a flag, is not a field, and what to do instead."""
    where = f" in {path}" if path else ""
    if name in ELSEWHERE:
        return f"{name}: is not a Stepmark field{where}; {ELSEWHERE[name]}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=TYPING_ERROR)
    if close and not name.startswith(f"{close[0]}_"):
        return f"{name}: is not a field{where}; did you mean {close[0]}?"
    listed = "`stepmark train --help` lists all fields"
    if name in RUN_CLM or name in _transformers_fields():
        return f"{name}: is a transformers field that Stepmark does not support{where}; leave it out; {listed}"
    return f"{name}: is not a field{where}; {listed}"


def _transformers_fields() -> set[str]:
    """Read from the installed transformers, only for an error message: importing it takes seconds."""
    from stepmark.config.quiet_libraries import quiet_libraries

    quiet_libraries()
    from transformers import TrainingArguments

    return {field.name for field in dataclasses.fields(TrainingArguments)}
