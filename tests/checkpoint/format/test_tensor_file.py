"""Other programs read our files: transformers, safetensors, torch.distributed.checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.trainer_utils import get_last_checkpoint

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.tensor_file import Header, header_size, order, parse_header, read_tensors
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.sharding.layout import TensorSlice
from tests.support.checkpoint_states import same

CONFIG: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 120, "n_positions": 16}


def tiny(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**CONFIG))


def save(folder: Path, model: GPT2LMHeadModel, step: int = 1, **options: Any) -> Path:
    with Checkpointer(folder, **options) as checkpointer:
        handle = checkpointer.save(step, {"model": model}, files=model.config.save_pretrained)
        assert handle is not None
        return handle.result()


@pytest.mark.parametrize("max_file_size", [5_000_000_000, 20_000])
def test_transformers_loads_the_folder(tmp_path: Path, max_file_size: int) -> None:
    model = tiny().eval()
    path = save(tmp_path, model, max_file_size=max_file_size)
    assert get_last_checkpoint(str(tmp_path)) == str(path)
    assert (len(list(path.glob("model*.safetensors"))) > 1) == (max_file_size < 1e9)
    assert (path / "model.safetensors.index.json").exists() == (max_file_size < 1e9)
    loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    files = {entry["name"] for entry in json.loads((path / "manifest.json").read_text())["files"]}
    assert "config.json" in files


def test_a_tied_tensor_is_written_once_under_the_name_transformers_keeps(tmp_path: Path) -> None:
    model = tiny()
    tensors = load_file(save(tmp_path, model) / "model.safetensors")
    assert "transformer.wte.weight" in tensors
    assert "lm_head.weight" not in tensors


def test_an_untied_model_takes_a_tied_checkpoint_and_not_the_reverse(tmp_path: Path) -> None:
    save(tmp_path, tiny())
    untied = GPT2LMHeadModel(GPT2Config(**CONFIG, tie_word_embeddings=False))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"model": untied})
        assert untied.lm_head.weight is not untied.transformer.wte.weight
        assert same(untied.lm_head.weight, untied.transformer.wte.weight)
        checkpointer.save(2, {"model": untied})
        with pytest.raises(Exception, match=r"lm_head\.weight"):
            checkpointer.restore({"model": tiny()})


class Odd(torch.nn.Module):
    """Shapes and types that other readers stumble over; no two of them the same."""

    def __init__(self, fill: bool = True) -> None:
        super().__init__()
        self.scalar = torch.nn.Parameter(torch.tensor(2.5 if fill else 0.0))
        self.bf16 = torch.nn.Parameter(torch.randn(5, 3).bfloat16())
        self.register_buffer("count", torch.tensor(7 if fill else 0))
        self.register_buffer(
            "bytes_", torch.arange(5, dtype=torch.uint8) if fill else torch.zeros(5, dtype=torch.uint8)
        )
        self.register_buffer("strided", torch.randn(4, 6).t())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("max_file_size", [5_000_000_000, 40])
def test_dcp_reads_the_model_bit_for_bit(tmp_path: Path, max_file_size: int) -> None:
    module = Odd()
    with Checkpointer(tmp_path, max_file_size=max_file_size) as checkpointer:
        handle = checkpointer.save(1, {"model": module})
        assert handle is not None
        path = handle.result()
    state = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert same(state, dict(module.state_dict()))


def test_safetensors_reads_optimizer_and_state(tmp_path: Path) -> None:
    module = Odd()
    optimizer = torch.optim.AdamW([module.scalar, module.bf16])
    module.scalar.grad, module.bf16.grad = torch.ones_like(module.scalar), torch.ones_like(module.bf16)
    optimizer.step()
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"model": module, "optimizer": optimizer, "nest": {"a": [torch.ones(3)]}})
        assert handle is not None
        path = handle.result()
    states = load_file(path / "optimizer" / "optimizer.safetensors")
    assert same(states["bf16/exp_avg"], optimizer.state[module.bf16]["exp_avg"])
    assert same(states["scalar/step"], optimizer.state[module.scalar]["step"])
    assert load_file(path / "state" / "nest.safetensors")["a/0"].tolist() == [1.0] * 3


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("entries", "size", "damaged", "words"),
    [
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, True, "'b' begins at byte"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, True, "'b' begins at byte"),
        ({"a": entry(0, 12)}, 12, True, "'a' has 12 bytes"),
        ({"a": entry(0, 8)}, 7, True, "inside tensor 'a'"),
        ({"a": entry(0, 8)}, 9, True, "its header describes"),
        ({"a": entry(0, 8, dtype="F3")}, 8, False, "'a' has the unknown type 'F3'"),
        ({"a": [1]}, 8, True, "malformed"),
    ],
)
def test_what_is_wrong_with_any_safetensors_file(
    entries: Any, size: int, damaged: bool, words: str, tmp_path: Path
) -> None:
    header = json.dumps(entries).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with path.open("rb") as file, pytest.raises(CheckpointError, match=words) as caught:
        read_tensors(file)
    assert isinstance(caught.value, CheckpointDamaged) is damaged


def test_any_name_and_any_shard_is_read_back_from_a_header_and_an_index() -> None:
    names = ["plain", 'a "quoted" one', "back\\slash", "\u00e9\U0001f600"]
    slices = [TensorSlice.full((3, 2)), TensorSlice.of_box((1, 0), (2, 2)), TensorSlice.of_range((3, 2), 1, 4)]
    listed = [(f"{name} {n}", "F32", (3, 2), part) for name in names for n, part in enumerate(slices)]
    tensors = order(
        [*listed, ("none", "BF16", (0,), TensorSlice.full((0,))), ("scalar", "F64", (), TensorSlice.full(()))]
    )
    digests = {each.name: [f"{number:016x}"] * len(each.checksum_blocks()) for number, each in enumerate(tensors)}
    header = Header(header_size(tensors, 'save "1"'), 7, 'save "1"', tensors, digests)
    found = parse_header(header.to_bytes(), header.size + header.data_size)
    assert {each.name: each for each in found.tensors} == {each.name: each for each in tensors}
    assert (found.size, found.step, found.save, found.digests) == (header.size, 7, 'save "1"', digests)
