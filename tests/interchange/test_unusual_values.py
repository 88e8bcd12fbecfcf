"""Tensors that are saved in unusual ways: the values that torch would load, or one error, and never others."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.hf_model import write_model_folder
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ImportOptions
from stepmark.interchange.sources.optimizer_names import numbered_names
from stepmark.model_folder.new_folder import WritingListener
from tests.support.foreign_checkpoints import torch_xla_folder, truth

SILENT = WritingListener(lambda size: None, lambda size: None)


def model_in(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """A file's tensors, imported."""
    out = path.with_name(f"{path.name}-out")
    write_model_folder(open_foreign(path, ImportOptions(**options)), out, SILENT)
    return load_file(out / "model.safetensors")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


VIEWS = {
    "transposed": draw(700, 900).t(),
    "every third column": draw(3000, 700)[:, ::3],
    "permuted": draw(4, 5, 6).permute(2, 0, 1),
    "from the middle": draw(40, 50).flatten()[7:100],
    "channels last": draw(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
}


def test_views_are_what_torch_loads(tmp_path: Path) -> None:
    torch.save(VIEWS, tmp_path / "model.pt")
    found = model_in(tmp_path / "model.pt")
    assert found.keys() == VIEWS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in VIEWS.items())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint64", "bool", "complex64", "float16"])
def test_types_are_what_torch_loads(name: str, tmp_path: Path) -> None:
    tensor = (draw(9, 7).abs() * 3).to(getattr(torch, name))
    torch.save({"a": tensor, "b": draw(3)}, tmp_path / "model.pt")
    found = model_in(tmp_path / "model.pt")
    assert found["a"].dtype == tensor.dtype
    assert torch.equal(found["a"].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(found["b"], draw(3))


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_what_is_stored_negated_is_refused(bit: str, tmp_path: Path) -> None:
    """Their storage holds other values than they have."""
    conjugate = torch.complex(draw(4), draw(4)).conj()
    torch.save({"weight": conjugate if bit == "conj" else conjugate.imag}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt.*resolve_neg"):
        model_in(tmp_path / "model.pt")


def test_safetensors_whose_tensors_are_not_aligned(tmp_path: Path) -> None:
    """An element then lies across the ends of the blocks that are read at once."""
    small, large = torch.arange(5, dtype=torch.uint8), draw(4500, 701)
    entries = {
        "small": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
        "large": {"dtype": "F32", "shape": [4500, 701], "data_offsets": [5, 5 + 4 * large.numel()]},
    }
    header = json.dumps(entries).encode()
    data = small.numpy().tobytes() + large.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    found = model_in(tmp_path / "model.safetensors")
    assert torch.equal(found["large"], large)
    assert torch.equal(found["small"], small)


@pytest.mark.parametrize(
    ("places", "size"), [([[0, 8], [4, 12]], 12), ([[0, 8], [12, 20]], 20), ([[0, 8], [8, 16]], 20), ([[0, 8]] * 2, 8)]
)
def test_safetensors_that_do_not_fill_their_file(places: list[list[int]], size: int, tmp_path: Path) -> None:
    """A tensor elsewhere in the file has the bytes of another."""
    entries = {
        f"tensor.{number}": {"dtype": "F32", "shape": [2], "data_offsets": place} for number, place in enumerate(places)
    }
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        model_in(path)


def test_a_name_that_safetensors_uses_itself(tmp_path: Path) -> None:
    torch.save({"__metadata__": draw(2), "a": draw(3)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointMismatch, match=r"__metadata__.*--map"):
        model_in(tmp_path / "model.pt")
    assert model_in(tmp_path / "model.pt", names=[("__metadata__", "b")])["b"].tolist() == draw(2).tolist()


def test_order_of_safetensors_numbers_no_optimizer(tmp_path: Path) -> None:
    """They are sorted by name, and parameters of one shape would get each other's states."""
    source = torch_xla_folder(tmp_path / "source", truth(), ranks=2, form="hugging face")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointMismatch, match="--config"):
        open_foreign(source, ImportOptions())
    assert open_foreign(source, ImportOptions(model_only=True)).model


def test_order_of_records_numbers_no_optimizer(tmp_path: Path) -> None:
    """Ranks divide the records among them, and only what the planner writes beside them has the program's order."""
    state: dict[str, Any] = {f"model.{name}.weight": draw(2, 3) for name in "abc"}
    state |= {f"optimizer.state.{number}.exp_avg": draw(2, 3) for number in range(3)}
    state |= {f"optimizer.state.{number}.exp_avg_sq": draw(2, 3) for number in range(3)}
    state |= {"optimizer.param_groups.0.params": [0, 1, 2], "optimizer.param_groups.0.lr": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(state, checkpoint_id=tmp_path / "store", planner=planner, no_dist=True)
    with pytest.raises(CheckpointMismatch, match=r"\.metadata.*--config"):
        open_foreign(tmp_path / "store", ImportOptions())
    assert len(open_foreign(tmp_path / "store", ImportOptions(model_only=True)).model) == 3


def trainer_folder(folder: Path, model: Any, **changes: Any) -> None:
    """A checkpoint of transformers' Trainer, whose AdamW has the parameters that are trained in one group."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    state = optimizer.state_dict()
    for one in state["state"].values():
        one |= changes
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    torch.save(state, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 1}')


def test_parameters_that_the_class_freezes_may_have_no_states() -> None:
    """Such as the positions of Whisper's encoder."""
    parameters = {"a.weight": (2, 2), "positions.weight": (3, 2), "b.weight": (2, 2), "b.bias": (2,)}
    frozen = frozenset({"positions.weight"})
    groups: list[dict[str, Any]] = [{"params": [0, 1]}, {"params": [2]}]
    names, _ = numbered_names(groups, {0: (2, 2), 1: (2, 2), 2: (2,)}, parameters, "here", frozen=frozen)
    assert names == {0: "a.weight", 1: "b.weight", 2: "b.bias"}
    groups[0]["params"], groups[1]["params"] = [0, 1, 2], [3]
    names, _ = numbered_names(groups, {1: (3, 2)}, parameters, "here", frozen=frozen)
    assert names[1] == "positions.weight"
    with pytest.raises(CheckpointMismatch):
        numbered_names([{"params": [0]}], {}, parameters, "here", frozen=frozen)


@pytest.mark.parametrize("step", [float("nan"), float("inf"), 2.5, -1.0])
def test_a_step_that_is_none(step: float, tmp_path: Path) -> None:
    config: Any = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=16)
    model = transformers.GPT2LMHeadModel(config)
    trainer_folder(tmp_path / "source", model, step=torch.tensor(step))
    (tmp_path / "source" / "trainer_state.json").unlink()  # as accelerate saves it: the optimizer counts
    with pytest.raises(CheckpointDamaged, match="not a step"):
        open_foreign(tmp_path / "source", ImportOptions())


def tiny(kind: str) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    if kind == "gpt_neox":
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=32, **sizes))
    images: Any = {"image_size": 8, "patch_size": 4, "num_labels": 3, **sizes}
    if kind == "deit":
        return transformers.DeiTForImageClassification(transformers.DeiTConfig(**images))
    return transformers.ViTForImageClassification(transformers.ViTConfig(**images))


@pytest.mark.parametrize("kind", ["vit", "deit", "gpt_neox"])
def test_names_that_transformers_changes_when_it_saves(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    parameters = dict(model.named_parameters())
    wd = transformers.Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    order = [[name for name in parameters if name in wd], [name for name in parameters if name not in wd]]
    optimizer = torch.optim.AdamW([{"params": [parameters[name] for name in group]} for group in order])
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    source = tmp_path / "source"
    model.save_pretrained(source)
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    (source / "trainer_state.json").write_text('{"global_step": 1}')
    saved = load_file(source / "model.safetensors").keys()
    assert saved != parameters.keys()
    write_checkpoint(open_foreign(source, ImportOptions()), tmp_path / "out", SILENT)
    weights, states = (
        load_file(tmp_path / "out" / n) for n in ("model.safetensors", "optimizer/optimizer.safetensors")
    )
    assert all(torch.equal(weights[name], parameter) for name, parameter in parameters.items())
    assert all(torch.equal(states[f"{name}/exp_avg"], optimizer.state[p]["exp_avg"]) for name, p in parameters.items())
    path = source / "config.json"
    path.write_text(path.read_text().replace(transformers.__version__, "4.57.6"))
    with pytest.raises(CheckpointMismatch, match=r"optimizer\.pt.*4\.57\.6.*--model-only"):
        open_foreign(source, ImportOptions())
    write_model_folder(open_foreign(source, ImportOptions(model_only=True)), tmp_path / "model", SILENT)
    again = type(model).from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
