"""What loading needs of transformers beyond its public interface. A version that lacks one of these breaks loading."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import transformers

# What `load.patched_constructors` patches or calls, and `pretrained.prepare` uses: attributes by their object.
NEEDED = {
    "transformers:PreTrainedModel": [
        "from_pretrained",
        "_load_pretrained_model",
        "_finalize_model_loading",
        "_adjust_missing_and_unexpected_keys",
        "base_model_prefix",
        "all_tied_weights_keys",
        "tie_weights",
        "initialize_weights",
        "__init_subclass__",
    ],
    "transformers.utils.loading_report": ["LoadStateDictInfo"],
    "transformers.core_model_loading": [
        "WeightConverter",
        "WeightRenaming",
        "Concatenate",
        "MergeModulelist",
        "dot_natural_key",
        "rename_source_key",
        "build_glob_alternation",
    ],
    "transformers.modeling_utils": ["LoadStateDictConfig"],
}
PARAMETERS = {
    "_load_pretrained_model": ["model", "state_dict", "checkpoint_files", "load_config"],
    "_finalize_model_loading": ["model", "load_config", "loading_info"],
    "tie_weights": ["self", "missing_keys", "recompute_mapping"],
    "_adjust_missing_and_unexpected_keys": ["self", "loading_info"],
}
CONFIG = ["weight_mapping", "hf_quantizer", "device_map", "dtype_plan", "pretrained_model_name_or_path"]


def report(what: str) -> str:
    return (
        f"transformers {transformers.__version__} has no {what}, which stepmark.parallel.loading needs; adapt it there"
    )


def owner_of(place: str) -> Any:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in NEEDED.items() for name in names])
def test_transformers_has_it(place: str, name: str) -> None:
    owner = owner_of(place)
    assigned = isinstance(owner, type) and f"self.{name} =" in inspect.getsource(owner)
    assert hasattr(owner, name) or assigned, report(f"{place}.{name}")


@pytest.mark.parametrize("name", PARAMETERS)
def test_functions_have_the_parameters(name: str) -> None:
    found = list(inspect.signature(getattr(transformers.PreTrainedModel, name)).parameters)
    wanted = PARAMETERS[name]
    assert found[: len(wanted)] == wanted, report(f"{name}({', '.join(wanted)}): it has ({', '.join(found)})")


@pytest.mark.parametrize("name", CONFIG)
def test_the_account_of_a_loading_has_the_fields(name: str) -> None:
    config = owner_of("transformers.modeling_utils").LoadStateDictConfig
    assert name in inspect.signature(config).parameters, report(f"LoadStateDictConfig.{name}")


def test_the_report_is_made_of_six_collections() -> None:
    info = owner_of("transformers.utils.loading_report").LoadStateDictInfo(set(), set(), set(), [], {}, set())
    assert {"missing_keys", "unexpected_keys"} <= set(vars(info)), report("LoadStateDictInfo.missing_keys")
