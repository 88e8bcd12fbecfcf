"""Models with a PEFT adapter: checkpoints hold the adapter under peft's file names, and a checksum of the base."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stepmark.checkpoint.downloads import address_of_copy
from stepmark.checkpoint.format.manifest import ADAPTER
from stepmark.checkpoint.written_form import own_class
from stepmark.errors import UsageError
from stepmark.model_folder.adapted_model import BASE_DIGEST
from stepmark.model_folder.consolidate import UNLIMITED
from stepmark.parallel.model_digest import mesh_digest
from stepmark.runtime.mesh import Mesh
from stepmark.training.model_wrappers import adapter_tensors, base_tensors

MAY_DIFFER = ("inference_mode", "base_model_name_or_path", "revision", "peft_version")


class RenamedModel(nn.Module):
    """Live tensors of a model under the names that a library saves them with: a section of checkpoints. `names`: those
    in its state dict, by those in checkpoints."""

    def __init__(self, model: Any, names: dict[str, str]) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it is not a submodule
        self.names = names

    @property
    def model(self) -> Any:
        return self._model[0]

    def state_dict(self, *, keep_vars: bool = False, **_: Any) -> dict[str, Tensor]:  # type: ignore[override]
        state = type(self.model).state_dict(self.model, keep_vars=keep_vars)
        return {name: state[full] for name, full in self.names.items()}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (tensor for tensor in self.state_dict(keep_vars=True).values() if isinstance(tensor, nn.Parameter))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return (tensor for tensor in self.state_dict(keep_vars=True).values() if not isinstance(tensor, nn.Parameter))


class Adapter(RenamedModel):
    """The adapter of a PeftModel as a module of its own: a section of checkpoints in `adapter_model.safetensors`.

    Its state dict has the live tensors, under the names that `peft.PeftModel.save_pretrained` gives them. Of several
    adapters it is the active one; the others, such as a reference, are not trained and belong to the run's identity.

    Raises UsageError where the model trains parameters that peft would not save, or several adapters.
    """

    tensor_group = ADAPTER  # of the files in a checkpoint
    stores_all_names = True  # peft asks for each name of tied tensors
    largest_file = UNLIMITED  # bytes; peft reads one file

    def __init__(self, model: Any) -> None:
        by_name = {name: adapter_tensors(model, name) for name in model.peft_config}
        active = model.active_adapter if len(by_name) > 1 else next(iter(by_name))
        others = {name: found for name, found in by_name.items() if name != active}
        trained = [name for name, found in others.items() if any(each.requires_grad for _, each in found.values())]
        if trained or active not in list(by_name):
            raise UsageError(
                f"the model has several adapters ({', '.join(by_name)}), and checkpoints hold one; delete the others, "
                "or freeze them"
            )
        saved = by_name[active]
        super().__init__(model, {name: full for name, (full, _) in saved.items()})
        self.config = model.peft_config[active]
        self._others = {full for found in others.values() for full, _ in found.values()}
        _check_complete(model, saved)

    def write_config(self, folder: Path) -> None:
        """Writes `adapter_config.json`, for inference, and a model card, as peft does. A base model in a folder is
        named by its absolute path or the address it came from, and so found wherever a command starts."""
        config, inner = copy.copy(self.config), self.model.get_base_model()
        config.inference_mode = True
        base = config.base_model_name_or_path or getattr(inner, "name_or_path", None)
        base = str(Path(base).absolute()) if base and Path(base).is_dir() else base or None
        config.base_model_name_or_path = base and address_of_copy(base)
        kind = {"base_model_class": own_class(inner).__name__, "parent_library": own_class(inner).__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=None if config.task_type else kind)
        self.model.create_or_update_model_card(str(folder))

    def identity(self, mesh: Mesh) -> dict[str, Any]:
        """The base model's checksum, equal on any mesh, and the adapter's configuration. Collective."""
        own = set(self.names.values())
        digest = mesh_digest(base_tensors(self.model, own | self._others), mesh)
        found = {BASE_DIGEST: digest, "adapter": adapter_identity(self.config)}
        if self._others:
            frozen = (each for each in base_tensors(self.model, own) if each[0] in self._others)
            found["frozen_adapters"] = mesh_digest(frozen, mesh)
        return found


def adapter_identity(config: Any) -> dict[str, Any]:
    """An adapter's configuration as plain values, without what may change when a run is resumed."""

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(map(str, value))  # their order differs between processes
        return value.value if isinstance(value, Enum) else str(value)

    values = {name: value for name, value in config.to_dict().items() if name not in MAY_DIFFER}
    return json.loads(json.dumps(values, default=plain))


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter of a PeftModel; None for any other model."""
    peft = sys.modules.get("peft")  # a PeftModel cannot exist without it
    inner = getattr(model, "_orig_mod", model)
    return Adapter(inner) if peft is not None and isinstance(inner, peft.PeftModel) else None


def saved_module(model: nn.Module) -> nn.Module:
    """What checkpoints hold of a model: its adapter, or itself. sentence-transformers saves the model of transformers
    in its first module as one of its own, beside folders of its further modules, and so has it at the root here."""
    root = getattr(model, "transformers_model", None)
    first = next(iter(model.children()), None)
    if not isinstance(root, nn.Module) or not getattr(first, "save_in_root", False):
        if getattr(model, "_hf_peft_config_loaded", False):
            raise UsageError(
                "model: transformers' add_adapter has changed the names of its weights, so that from_pretrained would "
                "not find them in checkpoints; use peft.get_peft_model(model, config)"
            )
        return adapter_of(model) or model
    prefix = next((f"{name}." for name, module in model.named_modules() if module is root), "")
    return RenamedModel(model, {name.removeprefix(prefix): name for name in model.state_dict()})


def _check_complete(model: nn.Module, saved: dict[str, tuple[str, Tensor]]) -> None:
    """Raises UsageError where the saved tensors are not all that is trained, or not the live ones."""
    identities = {id(tensor) for _, tensor in saved.values()}
    lost = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in identities]
    if lost:
        raise UsageError(
            f"peft does not save {len(lost)} parameters that would be trained ({lost[0]}); freeze them, or name their "
            "modules in modules_to_save of the adapter's configuration"
        )
    if not all(full for full, _ in saved.values()):
        raise UsageError(
            "peft saves tensors of this adapter that it computes, so that training could not be resumed; use LoRA or "
            "another adapter that is saved as it is trained"
        )
