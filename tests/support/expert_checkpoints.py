"""Expert parallel checkpoints of neuronx-distributed, written from the format's description.

ZeRO-1 there is two optimizers in one file: numbers of experts begin at an offset in states and shapes, and at 0 in the
groups; data parallel rank d has the experts of expert parallel rank d % ep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.foreign_checkpoints import STEP, Truth, drawn, numbered, save_rank, zero_part

EXPERTS, HIDDEN, INNER, VOCAB = 6, 16, 8, 32
GATE_UP, DOWN = "mlp.expert_mlps.mlp_op.gate_up_proj.weight", "mlp.expert_mlps.mlp_op.down_proj.weight"


def expert_truth(layers: int = 2, seed: int = 0) -> Truth:
    """A model with fused experts, and its AdamW states, under neuronx-distributed's names."""
    generator = torch.Generator().manual_seed(seed)
    inner = {
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.router.linear_router.weight": (EXPERTS, HIDDEN),
        GATE_UP: (EXPERTS, HIDDEN, 2 * INNER),
        DOWN: (EXPERTS, INNER, HIDDEN),
        "input_layernorm.weight": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in inner.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return drawn(shapes, generator)


def part(name: str, tensor: Tensor, tp: tuple[int, int], ep: tuple[int, int]) -> Tensor:
    """What the rank (number, size) of both kinds has of a tensor."""
    rank, ranks = tp
    if tensor.dim() == 3:
        own = tensor.chunk(ep[1])[ep[0]]
        if "down_proj" in name:
            return own.chunk(ranks, 1)[rank].clone()
        if "gate_up_proj" in name:
            return torch.cat([half.chunk(ranks, 2)[rank] for half in own.chunk(2, 2)], 2)
        return own.chunk(ranks, 2)[rank].clone()
    if "embed" in name or "lm_head" in name:
        return tensor.chunk(ranks)[rank].clone() if tensor.dim() else tensor
    return tensor.chunk(ranks, 1)[rank].clone() if "o_proj" in name and tensor.dim() else tensor


def local(found: Truth, tp: tuple[int, int], ep: tuple[int, int]) -> Truth:
    """A rank's model and whole states."""
    moments = {n: {key: part(n, v, tp, ep) for key, v in state.items()} for n, state in found.moments.items()}
    return Truth({name: part(name, tensor, tp, ep) for name, tensor in found.model.items()}, moments)


def two_in_one(found: Truth, dp: tuple[int, int], experts: int) -> dict[str, Any]:
    """The ZeRO-1 state of a data parallel rank (number, size)."""
    fused = {name for name, tensor in found.model.items() if tensor.dim() == 3}
    common = numbered({name: state for name, state in found.moments.items() if name not in fused})
    own = numbered({name: state for name, state in found.moments.items() if name in fused})
    first, second = zero_part(common, *dp), zero_part(own, dp[0] // experts, dp[1] // experts)
    made: dict[str, Any] = {"ep_param_id_offset": 1, "ep_param_group_offset": len(first["param_groups"])}
    made |= {"param_groups": first["param_groups"] + second["param_groups"], "state": {}}
    for key in ("base_state", "shape_info"):
        offset = max(first[key]) + 1
        made[f"ep_{key}_offset"] = offset
        made[key] = first[key] | {offset + number: value for number, value in second[key].items()}
    return made


def expert_folder(
    folder: Path, found: Truth, *, tp: int = 2, ep: int = 2, dp: int = 4, xser: bool = False, zero: bool = True
) -> Path:
    """A tag. Without ZeRO-1 the optimizer is that of the first expert parallel rank."""
    for rank in range(tp):
        for number in range(ep):
            own = local(found, (rank, tp), (number, ep))
            path = folder / "model" / f"dp_rank_00_ep_rank_{number:02d}_tp_rank_{rank:02d}_pp_rank_00.pt"
            save_rank(path, own.model, xser)
            if not zero and number == 0:
                save_rank(folder / "optim" / path.name, numbered(own.moments), xser)
        for number in range(dp if zero else 0):
            own = local(found, (rank, tp), (number % ep, ep))
            path = folder / "optim" / f"dp_rank_{number:02d}_tp_rank_{rank:02d}_pp_rank_00.pt"
            save_rank(path, two_in_one(own, (number, dp), ep), xser)
    torch.save({"total_steps": STEP}, folder / "user_content.pt")
    return folder
