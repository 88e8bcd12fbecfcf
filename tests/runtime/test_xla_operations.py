"""Operations that are composed for lazy tensors give what torch gives, and stay on the device."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.ranks import Ranks

HERE = "tests.runtime.test_xla_operations"


def largest_differences() -> list[float]:
    """Of solutions and gradients from torch's on the CPU, for each kind of triangular system; inf for a transfer."""
    from stepmark.runtime.xla import XlaRuntime

    runtime = XlaRuntime()
    generator = torch.Generator().manual_seed(0)
    lower = torch.tril(torch.rand(2, 4, 4, generator=generator)) + 2 * torch.eye(4)
    right = torch.rand(2, 4, 5, generator=generator)
    found = []
    for upper, left, unit in itertools.product([False, True], repeat=3):
        given = [(lower.mT if upper else lower).contiguous(), (right if left else right.mT).contiguous()]
        results = []
        for tensors in (given, runtime.place(given)):
            leaves = [tensor.requires_grad_() for tensor in (tensors[0].clone().detach(), tensors[1].clone().detach())]
            before = runtime.transfers_to_host()
            solution = torch.linalg.solve_triangular(*leaves, upper=upper, left=left, unitriangular=unit)
            gradients = torch.autograd.grad(solution.square().sum(), leaves)
            transferred = runtime.transfers_to_host() != before
            results.append([each.detach().cpu() for each in (solution, *gradients)])
        differences = [float((ours - theirs).abs().max()) for ours, theirs in zip(*results, strict=True)]
        found.append(float("inf") if transferred else max(differences))
    return found


def polar_numbers() -> dict[str, float]:
    """The largest difference of complex numbers and a gradient from torch's on the CPU; transfers."""
    from stepmark.runtime.xla import XlaRuntime

    runtime = XlaRuntime()
    absolute, angle = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for sizes, angles in ((absolute, angle), runtime.place([absolute, angle])):
        before = runtime.transfers_to_host() or 0
        leaf = sizes.clone().requires_grad_()
        parts = torch.view_as_real(torch.polar(leaf, angles))
        (gradient,) = torch.autograd.grad((parts * parts[..., :1]).sum(), [leaf])
        transfers = (runtime.transfers_to_host() or 0) - before
        results.append([parts.detach().cpu(), gradient.cpu()])
    differences = [float((ours - theirs).abs().max()) for ours, theirs in zip(*results, strict=True)]
    return {"difference": max(differences), "transfers": transfers}


@pytest.mark.xla
def test_polar_coordinates(ranks: Ranks) -> None:
    (found,) = ranks.run(f"{HERE}:polar_numbers").check()
    assert found["transfers"] == 0
    assert found["difference"] < 1e-6


@pytest.mark.xla
def test_triangular_systems(ranks: Ranks) -> None:
    (found,) = ranks.run(f"{HERE}:largest_differences").check()
    assert len(found) == 8
    assert max(found) < 1e-5


def own_transfers() -> list[int | None]:
    from stepmark.runtime.context import start

    runtime = start("xla").runtime
    tensors = runtime.place([torch.ones(3), torch.ones(2), torch.tensor(1.0)])
    runtime.step_boundary(wait=True)
    counts = [runtime.transfers_to_host(own=False)]
    runtime.to_host(tensors)
    counts.append(runtime.transfers_to_host(own=False))
    float(tensors[2])  # a line of the user's
    counts.append(runtime.transfers_to_host(own=False))
    return counts


@pytest.mark.xla
def test_transfers_of_the_runtime_are_told_from_those_of_other_lines(ranks: Ranks) -> None:
    (found,) = ranks.run(f"{__name__}:own_transfers").check()
    assert found == [0, 0, 1]


def attention_in_autocast() -> dict[str, object]:
    """Attention of a float32 query and key with a bfloat16 value, in autocast, beside torch's on the CPU."""
    from stepmark.runtime.xla import XlaRuntime

    runtime = XlaRuntime()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.rand(1, 2, 4, 8, generator=generator) for _ in range(3))
    mask = torch.rand(1, 1, 4, 4, generator=generator)
    results = []
    for kind, tensors in (("cpu", [query, key, value, mask]), ("xla", runtime.place([query, key, value, mask]))):
        leaf = tensors[0].detach().requires_grad_()
        with torch.autocast(kind, dtype=torch.bfloat16):
            found = torch.nn.functional.scaled_dot_product_attention(
                leaf, tensors[1], tensors[2].bfloat16(), attn_mask=tensors[3]
            )
        (gradient,) = torch.autograd.grad(found.float().square().sum(), [leaf])
        results.append([found.detach().cpu(), gradient.cpu()])
    (theirs, their_gradient), (ours, our_gradient) = results
    return {
        "dtypes": [str(each.dtype) for each in (ours, our_gradient)],
        "difference": float((ours.float() - theirs.float()).abs().max()),
        "of the gradient": float((our_gradient - their_gradient).abs().max()),
    }


@pytest.mark.xla
def test_attention_computes_in_the_dtype_of_autocast(ranks: Ranks) -> None:
    (found,) = ranks.run(f"{HERE}:attention_in_autocast").check()
    assert found["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert found["difference"] < 0.01
    assert found["of the gradient"] < 0.01
