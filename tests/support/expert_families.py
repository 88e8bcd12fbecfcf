"""A program for two ranks that divide the experts of many small families: each against the complete model."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from scripts.small_models import SMALL, narrow_model
from stepmark import Mesh, parallelize
from stepmark.parallel.architectures import TENSOR_PARALLEL
from stepmark.runtime.collectives import Collectives
from stepmark.sharding.layout import layout_of
from stepmark.sharding.replication import replication_of
from stepmark.sharding.views import local_shard

LENGTHS = (8, 5)  # of the sequences of two data parallel ranks: their tokens weigh as much as they are many
TOLERANCE = 1e-4  # of the largest value of the tensor compared
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def differences(kinds: list[str]) -> dict[str, str]:
    """What differs first, by family; empty strings where nothing does."""
    warnings.simplefilter("ignore")
    over = {
        "tensor": Mesh.create(tensor_parallel_size=2, expert_parallel_size=2, device="cpu"),
        "data": Mesh.create(expert_parallel_size=2, device="cpu"),
    }
    found = {}
    for kind in kinds:
        try:
            forms = [name for name in over if name == "data" or kind in TENSOR_PARALLEL]
            results = [f"over {name} parallel ranks: {each}" for name in forms if (each := compare(kind, over[name]))]
            found[kind] = "; ".join(results)
        except Exception as error:  # the other rank may wait in a collective of this family
            raise RuntimeError(f"{kind}: {error}") from error
    return found


def compare(kind: str, mesh: Mesh) -> str:
    """The difference of one family on one mesh, forward and backward."""
    model, divided = _model(kind), parallelize(_model(kind), mesh)
    tokens = torch.randint(3, SMALL["vocab_size"], (2, max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    batches, shares = [tokens], [1.0]
    if mesh.data_parallel.size > 1:
        batches = [row[None, :length] for row, length in zip(tokens, LENGTHS, strict=True)]
        shares = [(length - 1) / (sum(LENGTHS) - 2) for length in LENGTHS]
    rank = mesh.data_parallel.rank
    expected = [_run(model, *each) for each in zip(batches, shares, strict=True)][rank]
    found = _run(divided, batches[rank], shares[rank])
    for name, ours, theirs in zip(("logits", "loss"), found, expected, strict=True):
        if not _close(ours, theirs, theirs):
            return f"{name} differ"
    wrong = ""
    whole = dict(model.named_parameters())
    for name, local in divided.named_parameters():  # each is reduced on both ranks, also where an earlier one differs
        gradient = torch.zeros_like(local) if local.grad is None else local.grad
        gradient = _complete(gradient, local, mesh)
        complete, layout = whole[name].grad, layout_of(local)
        complete = torch.zeros_like(whole[name]) if complete is None else complete
        theirs = complete if layout is None else local_shard(complete, layout, tuple(local.shape))
        if not _close(gradient, theirs, complete):
            wrong = wrong or f"the gradient of {name} differs"
    return wrong


def _model(kind: str) -> Any:
    """With the loss of routers, where the family has one that it can compute."""
    model = narrow_model(kind, **ROUTERS)
    try:
        model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)
    except (IndexError, TypeError, AttributeError):
        model = narrow_model(kind)
    return model


def _run(model: Any, tokens: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Logits in evaluation, and the loss in training; adds a share of its gradients."""
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, use_cache=False).logits
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    loss = model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss
    (loss * share).backward()
    return logits, loss.detach()


def _complete(gradient: Tensor, local: Tensor, mesh: Mesh) -> Tensor:
    """The sum over all ranks."""
    axis: Collectives
    if mesh.data_parallel.size > 1:
        axis, replication = mesh.data_parallel, replication_of(local, 1)
        return gradient if replication.experts else axis.all_reduce([gradient.clone()])[0]
    axis = mesh.tensor_parallel
    return axis.all_reduce([gradient.clone()])[0] if replication_of(local, axis.size).partial else gradient


def _close(ours: Tensor, theirs: Tensor, scale: Tensor) -> bool:
    return ours.shape == theirs.shape and bool(
        (ours - theirs).abs().max() <= TOLERANCE * max(float(scale.abs().max()), 1e-6)
    )
