"""The cross entropy of logits whose vocabulary is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stepmark.parallel.tensor.autograd_collectives import reduce_from
from stepmark.parallel.tensor.vocabulary import Vocabulary, vocab_parallel_cross_entropy
from stepmark.runtime.mesh import Mesh
from tests.support.ranks import Ranks

HERE = "tests.parallel.tensor.test_vocabulary"


def by_autograd(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The same from operations that autograd differentiates one by one."""
    logits = vocabulary.mask_padding(logits.float())
    (highest,) = vocabulary.axis.all_reduce([logits.detach().amax(-1)], "max")
    shifted = logits - highest.unsqueeze(-1)
    rows, elsewhere = vocabulary.local(targets)
    own = shifted.gather(-1, rows.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
    total, target = reduce_from(torch.stack([shifted.exp().sum(-1), own]), vocabulary.axis).unbind(0)
    return total.log() - target


def compare(size: int, dtype: str) -> dict[str, Any]:
    """The losses and gradients of both on this rank, the shapes of what is kept for the backward pass, and the loss of
    complete logits."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    vocabulary = Vocabulary(size, mesh.tensor_parallel, mesh.runtime)
    generator = torch.Generator().manual_seed(1)
    complete = 5 * torch.randn(3, 7, 2 * vocabulary.rows, generator=generator).to(getattr(torch, dtype))
    targets = torch.randint(0, size, (3, 7), generator=generator)
    weights = torch.randn(3, 7, generator=generator).masked_fill(targets % 3 == 0, 0)  # some are ignored
    begin = mesh.tensor_parallel.rank * vocabulary.rows
    results, kept = [], []
    for function in (vocab_parallel_cross_entropy, by_autograd):
        logits = complete[..., begin : begin + vocabulary.rows].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.shape) or each, lambda each: each):
            losses = function(logits, targets, vocabulary)
        kept.append(None)
        for _ in range(2):  # what is kept must outlive a backward pass
            logits.grad = None
            (losses * weights).sum().backward(retain_graph=True)
        assert logits.grad is not None
        results.append((losses.tolist(), logits.grad.tolist(), str(logits.grad.dtype)))
    expected = F.cross_entropy(complete[..., :size].float().flatten(0, 1), targets.flatten(), reduction="none")
    large = [shape[-1] for shape in kept[: kept.index(None)] if len(shape) == 3 and shape[-1] == vocabulary.rows]
    return {"ours": results[0], "theirs": results[1], "large": large, "expected": expected.tolist()}


def check(ranks: Ranks, size: int, dtype: str) -> None:
    for found in ranks.run(f"{HERE}:compare", size, dtype, nproc=2).check():
        assert found["ours"] == found["theirs"]  # every bit
        assert found["ours"][2] == f"torch.{dtype}"
        assert len(found["large"]) == 1
        torch.testing.assert_close(
            torch.tensor(found["ours"][0]).flatten(), torch.tensor(found["expected"]), rtol=1e-5, atol=1e-5
        )


def test_gradients_are_those_of_autograd(ranks: Ranks) -> None:
    check(ranks, 67, "float32")  # one row of padding


def test_gradients_of_bfloat16_logits_are_those_of_autograd(ranks: Ranks) -> None:
    check(ranks, 64, "bfloat16")
