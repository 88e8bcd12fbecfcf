"""A folder with a configuration, a model class and a tokenizer class that come with Python code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepmark.data.tokenize.tokenizer import byte_tokenizer

CONFIG = """
from transformers import GPT2Config
class TinyConfig(GPT2Config):
    model_type = "tiny_of_this_test"
"""
MODEL = """
from transformers import GPT2LMHeadModel
from .configuration_tiny import TinyConfig
class TinyModel(GPT2LMHeadModel):
    config_class = TinyConfig
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast
class TinyTokenizer(PreTrainedTokenizerFast):
    pass
"""
SIZES = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 258}


def folder_with_own_code(parent: Path, monkeypatch: pytest.MonkeyPatch, **sizes: int) -> Path:
    """A new folder in `parent`, where transformers copies the code to as well; no weights. `sizes` replace SIZES."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(parent / "modules"))
    monkeypatch.syspath_prepend(str(parent / "modules"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # copied to an earlier test's folder
    folder = parent / "own_code"
    byte_tokenizer().save_pretrained(folder)
    for name, code in (("configuration", CONFIG), ("modeling", MODEL), ("tokenization", TOKENIZER)):
        (folder / f"{name}_tiny.py").write_text(code)
    of_tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    of_tokenizer |= {
        "tokenizer_class": "TinyTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_tiny.TinyTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    classes = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyModel"}
    model_type = {"model_type": "tiny_of_this_test", "architectures": ["TinyModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps({**model_type, **SIZES, **sizes}))
    return folder
