"""Small checkpoints in other tools' formats, written from the formats' descriptions, and the truth that is in them."""

from __future__ import annotations

import json
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KEYS, SIZE, MLP, VOCAB, LAYERS = 32, 8, 2, 4, 24, 64, 2
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": SIZE,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
STEP = 3
GROUP = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "foreach": None}


@dataclass(frozen=True)
class Truth:
    """A Llama and its AdamW states, by Hugging Face's names in the model's order."""

    model: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


def truth(seed: int = 0, *, head_norms: bool = False) -> Truth:
    """All numbers differ, so that every permutation shows. With `head_norms`, a Qwen3."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        inner = {
            "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
            "self_attn.k_proj": (KEYS * SIZE, HIDDEN),
            "self_attn.v_proj": (KEYS * SIZE, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
            **({"self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,)} if head_norms else {}),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return drawn(shapes, generator)


def drawn(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> Truth:
    """Weights and moments of these shapes."""
    draw = {name: torch.randn(3, *shape, generator=generator) for name, shape in shapes.items()}
    moments = {
        name: {"step": torch.tensor(float(STEP)), "exp_avg": d[1].clone(), "exp_avg_sq": d[2].abs().clone()}
        for name, d in draw.items()
    }
    return Truth({name: d[0].clone() for name, d in draw.items()}, moments)


def grouped(names: list[str]) -> list[list[str]]:
    """What decays, and what does not."""
    return [[name for name in names if "norm" not in name], [name for name in names if "norm" in name]]


def numbered(moments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The state dict of an AdamW over parameters of these names."""
    groups, state, number = [], {}, 0
    for names in grouped(list(moments)):
        groups.append({**GROUP, "params": list(range(number, number + len(names)))})
        for name in names:
            state[number] = moments[name]
            number += 1
    return {"state": state, "param_groups": groups}


def write_config(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder / "config.json"


def trainer_folder(folder: Path, found: Truth) -> Path:
    """transformers' Trainer."""
    write_config(folder)
    save_file(found.model, folder / "model.safetensors")
    torch.save(numbered(found.moments), folder / "optimizer.pt")
    torch.save({"last_epoch": STEP, "lr_lambdas": [{}, {}], "_last_lr": [0.01, 0.01]}, folder / "scheduler.pt")
    state = {"global_step": STEP, "epoch": 0.5, "log_history": [{"step": 1, "loss": 2.0}], "best_metric": 1.5}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    """Saves with torch's own code, as one process."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def dcp_folder(folder: Path, found: Truth) -> Path:
    """torch.distributed.checkpoint of a named state, by torch's own code."""
    groups = [{**GROUP, "params": names} for names in grouped(list(found.model))]
    optimizer = {"state": found.moments, "param_groups": groups}
    save_dcp({"model": found.model, "optimizer": optimizer, "step": STEP}, folder)
    write_config(folder)
    return folder


def titan_folder(folder: Path, found: Truth) -> Path:
    """torchtitan: Meta's names, interleaved rows of queries and keys, a flattened optimizer."""
    names = {"self_attn.q": "attention.wq", "self_attn.k": "attention.wk", "self_attn.v": "attention.wv"}
    names |= {"self_attn.o": "attention.wo", "mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3"}
    names |= {"mlp.down": "feed_forward.w2", "input_layernorm": "attention_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "_proj.weight": ".weight", "embed_tokens": "tok_embeddings"}

    def meta(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name.replace("lm_head", "output").removeprefix("model.")

    def rows(name: str, tensor: Tensor) -> Tensor:
        heads = HEADS if "q_proj" in name else KEYS if "k_proj" in name else 0
        if not heads or not tensor.dim():
            return tensor
        return tensor.view(heads, 2, SIZE // 2, -1).transpose(1, 2).reshape(tensor.shape).contiguous()

    state: dict[str, Any] = {meta(name): rows(name, tensor) for name, tensor in found.model.items()}
    for name, moments in found.moments.items():
        for key, value in moments.items():
            state[f"optimizer.state.{meta(name)}.{key}"] = rows(name, value)
        state[f"optimizer.param_groups.{meta(name)}.lr"] = 0.01
    save_dcp({**state, "train_state": {"step": STEP}}, folder)
    write_config(folder)
    return folder


# neuronx-distributed and optimum-neuron


def rank_tensors(tensors: dict[str, Tensor], rank: int, ranks: int, copies: int) -> dict[str, Tensor]:
    """A tensor parallel rank's part: columns and rows cut, gate and up fused, keys and values `copies` times."""
    found: dict[str, Tensor] = {}
    group = HEADS // KEYS // copies
    order = [h * HEADS // KEYS + r * group + t for r in range(copies) for h in range(KEYS) for t in range(group)]

    def heads(tensor: Tensor, positions: list[int], dim: int) -> Tensor:
        pieces = tensor.split(SIZE, dim)
        return torch.cat([pieces[position] for position in positions], dim).chunk(ranks, dim)[rank].contiguous()

    for name, tensor in tensors.items():
        if "q_proj" in name:
            found[name.replace("q_proj.weight", "qkv_proj.weight_q")] = heads(tensor, order, 0)
        elif "k_proj" in name or "v_proj" in name:
            key = "k" if "k_proj" in name else "v"
            new = name.replace(f"{key}_proj.weight", f"qkv_proj.weight_{key}")
            found[new] = heads(tensor, list(range(KEYS)) * copies, 0)
        elif "o_proj" in name:
            found[name] = heads(tensor, order, 1)
        elif "gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            fused = torch.cat([tensor.chunk(ranks)[rank], up.chunk(ranks)[rank]])
            found[name.replace("gate_proj", "gate_up_proj")] = fused
        elif "down_proj" in name:
            found[name] = tensor.chunk(ranks, 1)[rank].contiguous()
        elif "embed" in name or "lm_head" in name:
            found[name] = tensor.chunk(ranks)[rank].clone()
        elif "up_proj" not in name:
            found[name] = tensor
    return found


def with_fused_heads(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's tensors with its query, key and value rows in one, as optimum-neuron has them with fuse_qkv."""
    fused: dict[str, Tensor] = {}
    for name, tensor in found.items():
        prefix, _, part = name.partition("qkv_proj.weight_")
        if not part:
            fused[name] = tensor
        elif part == "q":
            fused[f"{prefix}qkv_proj.weight_qkv"] = torch.cat([found[f"{prefix}qkv_proj.weight_{x}"] for x in "qkv"])
    return fused


def rank_moments(found: Truth, rank: int, ranks: int, copies: int) -> dict[str, dict[str, Tensor]]:
    """The optimizer's states of a tensor parallel rank."""
    cut = {
        key: rank_tensors({name: m[key] for name, m in found.moments.items()}, rank, ranks, copies)
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {
        name: {"step": torch.tensor(float(STEP)), **{key: cut[key][name] for key in cut}} for name in cut["exp_avg"]
    }


def zero_part(state: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """A data parallel rank's part of an optimizer's state dict, as ZeRO-1 cuts it: rows, padded."""

    def rows(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        padding = -len(tensor) % ranks
        return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]).chunk(ranks)[rank].clone()

    parts = {number: {key: rows(value) for key, value in one.items()} for number, one in state["state"].items()}
    shapes = {number: list(one["exp_avg"].shape) for number, one in state["state"].items()}
    return {"state": {}, "param_groups": state["param_groups"], "base_state": parts, "shape_info": shapes}


def nxd_folder(folder: Path, found: Truth, *, tp: int = 4, dp: int = 2, xser: bool = False) -> Path:
    """neuronx-distributed with ZeRO-1, and key/value heads replicated where there are fewer than ranks."""
    write_config(folder)
    copies = max(1, tp // KEYS)
    for rank in range(tp):
        place = f"tp_rank_{rank:02d}_pp_rank_00.pt"
        save_rank(folder / "model" / f"dp_rank_00_{place}", rank_tensors(found.model, rank, tp, copies), xser)
        state = numbered(rank_moments(found, rank, tp, copies))
        for part in range(dp):
            save_rank(folder / "optim" / f"dp_rank_{part:02d}_{place}", zero_part(state, part, dp), xser)
    torch.save({"total_steps": STEP}, folder / "user_content.pt")
    return folder


def optimum_folder(folder: Path, found: Truth, *, tp: int = 2, xser: bool = True) -> Path:
    """optimum-neuron of today."""
    write_config(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEP}))
    copies = max(1, tp // KEYS)
    for rank in range(tp):
        place = f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        save_rank(folder / "shards" / "model" / place, rank_tensors(found.model, rank, tp, copies), xser)
        save_rank(folder / "shards" / "optim" / place, numbered(rank_moments(found, rank, tp, copies)), xser)
    names = rank_tensors(found.model, 0, tp, copies)
    body = {"parameters": {name: {"tensor_model_parallel": False} for name in names}}
    (folder / "shards" / "mp_metadata_pp_rank_0.json").write_text(json.dumps(body))
    return folder


def torch_xla_folder(folder: Path, found: Truth, *, ranks: int = 3, form: str = "in the files") -> Path:
    """A script with torch_xla's ZeRO-1: a file for each rank under a name of its own, and the model where it put it."""
    write_config(folder)
    state = numbered(found.moments)
    for rank in range(ranks):
        part = zero_part(state, rank, ranks)
        if form == "in the files":
            whole: Any = {"step": STEP, "model_state_dict": found.model, "optimizer_state_dict": part}
            torch.save(whole, folder / f"ckpt_{rank:03d}.tar")
        else:
            torch.save(part, folder / f"optimizer_{rank}.pt")
    if form == "state dict":
        torch.save(found.model, folder / "model.pt")
    elif form == "hugging face":
        save_file(found.model, folder / "model.safetensors")
    return folder


def save_rank(path: Path, value: Any, xser: bool) -> None:
    """A rank's file; with xser, references and a file for each tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(value, path)
        return
    tensors: list[Tensor] = []
    with _reference_class() as reference:

        def replaced(item: Any) -> Any:
            if isinstance(item, Tensor):
                tensors.append(item)
                return reference(len(tensors) - 1)
            if isinstance(item, dict):
                return {key: replaced(one) for key, one in item.items()}
            return [replaced(one) for one in item] if isinstance(item, list | tuple) else item

        torch.save(replaced(value), path)
    inner = path.with_name(f"{path.name}.tensors")
    inner.mkdir()
    for number, tensor in enumerate(tensors):
        torch.save(tensor, inner / f"tensor_{number}.pt")


@contextmanager
def _reference_class() -> Iterator[type]:
    """torch_xla's class of references, or one of the same name."""
    name = "torch_xla.utils.serialization"
    before = {key: sys.modules.get(key) for key in ("torch_xla", "torch_xla.utils", name)}

    class TensorReference:
        def __init__(self, tid: int) -> None:
            self.tid = tid

    TensorReference.__module__, TensorReference.__qualname__ = name, "TensorReference"
    made: Any = types.ModuleType(name)
    made.TensorReference = TensorReference
    for key in before:
        sys.modules[key] = made if key == name else types.ModuleType(key)
    try:
        yield TensorReference
    finally:
        for key, module in before.items():
            if module is None:
                del sys.modules[key]
            else:
                sys.modules[key] = module


# DeepSpeed, Lightning, and FSDP's full optimizer


@contextmanager
def _made_class(module: str, name: str) -> Iterator[type]:
    """A class of another program's, for as long as something of it is pickled."""
    parts = module.split(".")
    parents = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    before = {key: sys.modules.get(key) for key in parents}
    made = type(name, (), {"__module__": module})
    for key in parents:
        sys.modules[key] = types.ModuleType(key)
    setattr(sys.modules[module], name, made)
    try:
        yield made
    finally:
        for key, value in before.items():
            sys.modules.pop(key) if value is None else sys.modules.__setitem__(key, value)


def deepspeed_folder(
    folder: Path, found: Truth, stage: int = 3, ranks: int = 3, *, frozen: str = "none", bf16: bool = False
) -> Path:
    """ZeRO: two groups, of which ZeRO-3 cuts the first into two sub-groups; parameters with `frozen` in their names are
    not trained."""
    step = folder / f"global_step{STEP}"
    step.mkdir(parents=True)
    write_config(folder)
    (folder / "latest").write_text(step.name)
    low = torch.bfloat16 if bf16 else torch.float32
    groups = grouped([name for name in found.model if frozen not in name])
    still = {name: tensor.to(low) for name, tensor in found.model.items() if frozen in name}
    shapes = [{name: found.model[name].shape for name in names} for names in groups]
    units = groups if stage < 3 else [groups[0][:5], groups[0][5:], groups[1]]

    def value(name: str, key: str) -> Tensor:
        return found.model[name] if key == "weight" else found.moments[name][key]

    def part(tensor: Tensor, rank: int) -> Tensor:
        size = -(-tensor.numel() // ranks)
        return torch.nn.functional.pad(tensor.flatten(), (0, size * ranks - tensor.numel()))[rank * size :][
            :size
        ].clone()

    def flat(names: list[str], key: str, rank: int) -> Tensor:
        if stage == 3:
            return torch.cat([part(value(name, key), rank) for name in names])
        whole = torch.cat([value(name, key).flatten() for name in names])
        size = -(-whole.numel() // (2 * ranks)) * 2
        kept = whole.numel() if key == "weight" else size * ranks  # states are padded, weights are not
        return torch.nn.functional.pad(whole, (0, size * ranks - whole.numel()))[:kept][rank * size :][:size].clone()

    def mapping(names: list[str], rank: int, address: type) -> dict[str, Any]:
        size, at, has = -(-sum(value(name, "weight").numel() for name in names) // (2 * ranks)) * 2, 0, {}
        for name in names:
            low_end, at = at, at + value(name, "weight").numel()
            begin, end = max(low_end, rank * size), min(at, rank * size + size)
            if begin < end:
                has[name] = address()
                has[name].__dict__.update(start=begin - rank * size, numel=end - begin)
        return has

    inner, weights = ("optimizer_state_dict", "fp32_flat_groups")
    if stage < 3:
        inner, weights = "base_optimizer_state", "single_partition_of_fp32_groups"
    numbers = [list(range(len(units) - 1)), [len(units) - 1]]
    step_tensor = {"step": torch.tensor(float(STEP))}
    with _made_class("deepspeed.utils.tensor_fragment", "fragment_address") as address:
        for rank in range(ranks):
            flats = {key: [flat(names, key, rank) for names in units] for key in ("weight", "exp_avg", "exp_avg_sq")}
            states = {n: {k: v[n] for k, v in flats.items() if k != "weight"} | step_tensor for n in range(len(units))}
            base = {"state": states, "param_groups": [{**GROUP, "params": own} for own in numbers]}
            optimizer = {"zero_stage": stage, inner: base, weights: flats["weight"], "partition_count": ranks}
            if stage < 3:
                optimizer["param_slice_mappings"] = [mapping(names, rank, address) for names in units]
            torch.save({"optimizer_state_dict": optimizer}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            empty = torch.empty(0, dtype=low)
            module = {name: empty if stage == 3 else tensor.to(low) for name, tensor in found.model.items()}
            model = {"module": module, "param_shapes": shapes, "global_steps": STEP, "dp_world_size": ranks}
            model |= {"frozen_param_shapes": {name: tensor.shape for name, tensor in still.items()}, "mine": 5}
            model["frozen_param_fragments"] = {n: part(t, rank) if stage == 3 else t for n, t in still.items()}
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(model, step / f"{name}_model_states.pt")
    return folder


def lightning_folder(folder: Path, found: Truth) -> Path:
    """Lightning, of a module that has the model as `self.model`: one group, with a schedule of steps."""
    write_config(folder)
    moments = dict(enumerate(found.moments.values()))
    state = {f"model.{name}": tensor for name, tensor in found.model.items()} | {"metric.total": torch.tensor(3)}
    optimizer = {"state": moments, "param_groups": [{**GROUP, "params": list(moments)}]}
    saved = {"state_dict": state, "optimizer_states": [optimizer], "global_step": STEP, "epoch": 1}
    saved |= {"lr_schedulers": [{"last_epoch": STEP, "lr_lambdas": [None], "_last_lr": [0.01]}], "loops": {"fit": 1}}
    torch.save({**saved, "pytorch-lightning_version": "2.6.0"}, folder / "last.ckpt")
    return folder


def fsdp_folder(folder: Path, found: Truth) -> Path:
    """torch.save of the complete model and optimizer by name, as FSDP.full_optim_state_dict gives it."""
    write_config(folder)
    groups = [{**GROUP, "params": names[::-1]} for names in grouped(list(found.model))]  # names, in any order
    optimizer = {"state": dict(reversed(found.moments.items())), "param_groups": groups}
    torch.save({"model": found.model, "optimizer": optimizer, "step": STEP}, folder / "full.pt")
    return folder


WRITERS = {
    "DeepSpeed": deepspeed_folder,
    "Lightning": lightning_folder,
    "plain state dict": fsdp_folder,
    "transformers Trainer": trainer_folder,
    "dcp": dcp_folder,
    "torchtitan": titan_folder,
    "neuronx-distributed": nxd_folder,
    "optimum-neuron": optimum_folder,
    "torch_xla ZeRO-1": torch_xla_folder,
}
