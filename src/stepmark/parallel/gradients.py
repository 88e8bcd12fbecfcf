"""Arithmetic on a step's gradients: completing partial ones over the tensor parallel axis, their norm, and clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepmark.runtime.mesh import Mesh
from stepmark.sharding.replication import Replication


def add_partial(gradients: Sequence[Tensor | None], copies: Sequence[Replication], mesh: Mesh) -> list[Tensor | None]:
    """Completes gradients of which neighbours on the tensor parallel axis have computed a part each: one collective
    for each number of copies and dtype."""
    whole = list(gradients)
    together: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, (gradient, copy) in enumerate(zip(gradients, copies, strict=True)):
        if gradient is not None and copy.partial and copy.count > 1:
            together.setdefault((copy.count, gradient.dtype), []).append(index)
    for (count, _), indices in sorted(together.items(), key=lambda item: str(item[0])):
        parts = [gradients[index] for index in indices]
        present = [part for part in parts if part is not None]
        (flat,) = mesh.replicas(count).all_reduce([torch.cat([part.reshape(-1) for part in present])])
        for index, part, total in zip(indices, present, flat.split([p.numel() for p in present]), strict=True):
            whole[index] = total.view(part.shape)
    return whole


def squares(gradients: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The sum of squares in float32, as a vector of one element; a tensor of which `counts` ranks have a copy counts
    for one part in so many, so that the sum over these ranks counts it once."""
    norms = torch._foreach_norm(list(gradients))
    parts = [norm.float().square() / count for norm, count in zip(norms, counts, strict=True)]
    return torch.stack(parts).sum().reshape(1)


def scale_to(gradients: Sequence[Tensor | None], norm: Tensor, max_norm: float) -> None:
    """Scales gradients of this norm in place to `max_norm` where it is larger (0 or less: never)."""
    present = [gradient for gradient in gradients if gradient is not None]
    if max_norm > 0 and present:
        torch._foreach_mul_(present, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
