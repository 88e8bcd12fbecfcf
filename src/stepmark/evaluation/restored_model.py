"""Restores models from checkpoints, saved on any mesh, and from Hugging Face folders."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import tempfile
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stepmark.checkpoint.downloads import local_model
from stepmark.checkpoint.format.dtypes import torch_dtype
from stepmark.checkpoint.format.integrity import check_integrity, read_values
from stepmark.checkpoint.format.manifest import ADAPTER, MANIFEST, MODEL, Manifest, read_manifest
from stepmark.checkpoint.format.read_errors import read_errors_of
from stepmark.checkpoint.restore.apply import apply
from stepmark.checkpoint.restore.compare import compare
from stepmark.checkpoint.restore.read_plan import ReadPlan
from stepmark.checkpoint.restore.tensor_reader import TensorReader
from stepmark.checkpoint.sections import describe
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, StepmarkError, UsageError
from stepmark.filesystem.error_advice import explained, first_line
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG, load_adapted, read_adapter_config
from stepmark.model_folder.consolidate import consolidate
from stepmark.model_folder.model_config import CONFIG, check_fits, load_config, model_class
from stepmark.model_folder.new_folder import WritingListener
from stepmark.runtime.base import Runtime
from stepmark.runtime.module_placement import place_module
from stepmark.training.model_options import use_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass
class ModelReader:
    """Reads models, reusing the module while the configuration stays the same, so that a lazy device keeps its graph.

    Only the model is read. Not collective. `trust_remote_code`: execute Python code that lies in the folder.
    `base_model`: that of adapters, a folder or a name on the hub; default: what their configurations name.
    `attention`: transformers' name of its implementation; default: the model's own.
    """

    runtime: Runtime
    _: KW_ONLY
    trust_remote_code: bool = False
    base_model: str | None = None
    attention: str | None = None
    _cached: tuple[Any, nn.Module] | None = field(default=None, init=False)  # (configuration, dtypes) and the module

    def read(self, folder: Path) -> nn.Module:
        """The model in a folder, on the device, in the types it was saved in.

        Raises CheckpointNotFound, CheckpointDamaged, CheckpointMismatch if it is not a transformers model, and
        UsageError if it does not have the attention.
        """
        model = self._read(folder)
        use_attention(model, self.attention)
        return model

    def _read(self, folder: Path) -> nn.Module:
        if not (folder / MANIFEST).is_file():
            return self._adapted(folder, None) if is_adapter(folder) else self._pretrained(folder)
        manifest = read_manifest(folder)
        check_integrity(folder, manifest)
        if manifest.tensors.get(ADAPTER) and not manifest.tensors.get(MODEL):
            return self._adapted(folder, manifest)
        model = self._module(folder, manifest)
        fill_from(folder, manifest, model, self.runtime)
        return model

    def _module(self, folder: Path, manifest: Manifest) -> nn.Module:
        if not manifest.tensors.get(MODEL):
            raise CheckpointMismatch(f"{folder} has no section {MODEL!r}; it holds {', '.join(manifest.sections)}")
        config = read_config(folder, self.trust_remote_code)
        if self.attention in ("eager", "sdpa"):  # which some classes choose when they are made
            config._attn_implementation = self.attention
        dtypes = {name: torch_dtype(entry.dtype) for name, entry in manifest.tensors[MODEL].items()}
        key = (config.to_dict(), dtypes)
        if self._cached is None or self._cached[0] != key:
            model = _construct(folder, manifest, config, self.trust_remote_code)
            for each, tensor in model.state_dict(keep_vars=True).items():  # as they were saved
                if each in dtypes and isinstance(tensor, Tensor):
                    tensor.data = tensor.data.to(dtypes[each])
            place_module(model, self.runtime)
            self._cached = key, model
        return self._cached[1]

    def _adapted(self, folder: Path, manifest: Manifest | None) -> nn.Module:
        """The base model with the adapter in a folder; the base is kept for further adapters of the same form."""
        with tempfile.TemporaryDirectory(prefix="stepmark-adapter-") as temporary:
            complete = folder
            if manifest is not None:  # on whatever mesh it was saved
                complete = Path(temporary) / "adapter"
                consolidate(folder, complete, "safetensors", sys.maxsize, WritingListener())
            key = (read_adapter_config(complete), manifest is None)
            if self._cached is None or self._cached[0] != key:
                model = load_adapted(complete, manifest, self.base_model, trust_remote_code=self.trust_remote_code)
                place_module(model, self.runtime)
                self._cached = key, model
            else:
                from peft import set_peft_model_state_dict
                from peft.utils import load_peft_weights

                set_peft_model_state_dict(self._cached[1], load_peft_weights(str(complete), device="cpu"))
        return self._cached[1]

    def _pretrained(self, folder: Path) -> nn.Module:
        import transformers

        if not os.path.lexists(folder / CONFIG):
            raise CheckpointNotFound(
                f"{folder} is neither a checkpoint (it has no {MANIFEST}) nor a Hugging Face model folder (it has no "
                f"{CONFIG})"
            )
        config = read_config(folder, self.trust_remote_code)
        # The automatic class takes what came with the weights.
        own = self.trust_remote_code and getattr(config, "auto_map", None)
        owner: Any = transformers.AutoModelForCausalLM
        if config.architectures and not own:
            owner = model_class(config.architectures[0], folder / CONFIG)
        if not own:
            check_fits(lambda: getattr(owner, "from_config", owner)(copy.deepcopy(config)), folder)
        damaged = f"no model can be loaded from {folder}"
        with explained(lambda error: CheckpointDamaged(f"{damaged}: {first_line(error)}")):  # of many kinds
            model, report = owner.from_pretrained(
                str(folder), output_loading_info=True, dtype="auto", trust_remote_code=self.trust_remote_code
            )
        if report["missing_keys"]:
            raise CheckpointDamaged(f"{folder} lacks weights of its model: {sorted(report['missing_keys'])[0]}")
        place_module(model, self.runtime)
        return model


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter alone."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


def fill_from(folder: Path, manifest: Manifest, model: nn.Module, runtime: Runtime) -> None:
    """Loads the weights of a checkpoint into a model, in place; every byte is verified before it is used.

    Raises CheckpointMismatch, before anything is changed, if the checkpoint is of another model, and CheckpointDamaged.
    """
    state = {MODEL: model}
    with contextlib.closing(TensorReader(folder, manifest)) as reader:
        plan = ReadPlan(reader, read_values(folder, manifest), runtime)
        compare(plan, state, describe(state))
        for _, name in sorted(plan.unexpected()):
            raise CheckpointMismatch(
                f"{folder} contains an unexpected tensor {name!r}: the model that {CONFIG} describes does not have it"
            )
        with read_errors_of(folder):
            plan.read()
    apply(plan)


def read_config(folder: Path, trust_remote_code: bool = False, base_model: str | None = None) -> PreTrainedConfig:
    """The model's configuration; of an adapter that of its base, which may be named.

    Raises CheckpointMismatch if the folder has none that transformers can read, and UsageError if that takes code that
    is not trusted."""
    source = str(folder)
    if is_adapter(folder):
        source = local_model(base_model or str(read_adapter_config(folder).get("base_model_name_or_path")))
    elif not os.path.lexists(folder / CONFIG):
        raise CheckpointMismatch(
            f"{folder} has no {CONFIG}, so its model cannot be constructed from it alone; restore it into your own"
            " model with Checkpointer.restore, and call stepmark.evaluate"
        )

    def explain(error: Exception) -> StepmarkError:
        if "trust_remote_code" in str(error):
            return UsageError(needs_code(Path(source)))
        more = "; pass the adapter's base model with --base-model" if is_adapter(folder) else ""
        what = f"{Path(source) / CONFIG} does not describe a transformers model"
        return CheckpointMismatch(f"{what}: {first_line(error)}{more}")

    with explained(explain):  # parsers and transformers raise many kinds
        return load_config(source, trust_remote_code)


def needs_code(folder: Path) -> str:
    """The error for a folder whose code is not trusted."""
    found = ", ".join(sorted(path.name for path in folder.glob("*.py")))
    where = f" ({found})" if found else ", which is not in the folder"
    return (
        f"{folder} needs Python code that came with its model{where}; if you trust it, have it executed: with "
        "--trust_remote_code, or trust_remote_code=True in Python"
    )


def _own_class(folder: Path, config: PreTrainedConfig, name: str | None) -> str | None:
    """Where the model's class is in code that lies in the folder, as `module.Class`; None where it is one of
    transformers', even if the configuration still names the code of the model that it was made from."""
    named = [each for each in (getattr(config, "auto_map", None) or {}).values() if isinstance(each, str)]
    found = (each for each in named if each.partition(".")[2] == name)
    return next((each for each in found if (folder / f"{each.partition('.')[0]}.py").is_file()), None)


def _construct(folder: Path, manifest: Manifest, config: PreTrainedConfig, trust: bool) -> nn.Module:
    """A model of the class that was saved; the caller's random generator is not advanced."""
    import transformers

    saved = manifest.identity.get("model")
    name = (saved.get("class") if isinstance(saved, dict) else None) or next(iter(config.architectures or []), None)
    own = _own_class(folder, config, name)
    make: Any
    if own is None:
        make = model_class(name, folder) if name else transformers.AutoModelForCausalLM.from_config
        check_fits(lambda: make(copy.deepcopy(config)), folder)
    elif trust:
        make = transformers.dynamic_module_utils.get_class_from_dynamic_module(own, str(folder))
    else:
        raise UsageError(needs_code(folder))
    with torch.random.fork_rng(devices=[]):
        return make(config)
