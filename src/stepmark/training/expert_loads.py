"""How many tokens the experts of a mixture get in a step, and the routing biases that follow from it.

A token counts once for each expert that its router chose, before an expert's parameters, or the ranks that hold them,
matter. Tokens that the attention mask leaves out do not count, as in transformers' load balancing loss, and neither do
rows that only fill a batch's shape. Nothing is read: the numbers stay on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.data.loader.batch import MicroBatch, rows_of
from stepmark.errors import UsageError
from stepmark.parallel.pipeline.balance import RoutedExperts, routed_experts
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.dtensor import is_dtensor


class ExpertLoads:
    """Counts the tokens of each expert in the forward passes of a step.

    Only what runs within `counting` counts, so that neither evaluations nor layers that a backward pass computes again
    do. All ranks of a tensor parallel group have the same counts.

    `bias_update_rate`: what `update_biases` adds to or takes from a bias; 0: nothing. `experts`: number of experts and
    routing bias of every layer of the complete model, by the experts' module.

    Raises UsageError where biases are to be updated and no router has one, or it is sharded.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, bias_update_rate: float = 0.0) -> None:
        stages = staged(model)
        own = routed_experts(model)
        self.experts: dict[str, RoutedExperts] = own if stages is None else stages.experts
        self._runtime = mesh.runtime
        self._rate = bias_update_rate
        self._biases = self._updated_biases(model, own) if bias_update_rate else {}
        self._zeros = {name: mesh.runtime.numbers([0.0] * each.number) for name, each in own.items()}
        self.begin()
        self._kept: Tensor | None = None  # 1 for the rows and tokens that count; None: all do
        self._pairs: dict[torch.Size, Tensor] = {}  # by the shape of choices: what each of them counts
        self._open = False
        self._hooks = [
            # Before any hook that changes the router's choice for the experts of this rank.
            model.get_submodule(name).register_forward_pre_hook(
                partial(self._add, name), with_kwargs=True, prepend=True
            )
            for name in own
        ]

    def _updated_biases(self, model: nn.Module, own: Iterable[str]) -> dict[str, Tensor]:
        if not any(each.bias for each in self.experts.values()):
            raise UsageError(
                "router_bias_update_rate: no router of this model has a bias for balance (e_score_correction_bias); "
                "leave it out"
            )
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found = {name: tensors[bias] for name in own if (bias := self.experts[name].bias) is not None}
        if any(map(is_dtensor, found.values())):
            raise UsageError(
                "router_bias_update_rate and fsdp: the biases are parameters, which fsdp shards; use zero_1"
            )
        for tensor in found.values():
            tensor.data = tensor.data.float()  # in bfloat16 small steps would be lost
        return found

    def begin(self) -> None:
        """Begins a step. On an eager device the sums of all layers are parts of one tensor."""
        self._sums = dict(self._zeros)
        if self._zeros and not self._runtime.lazy:
            sizes = [self.experts[name].number for name in self._zeros]
            parts = torch.zeros(sum(sizes), device=self._runtime.device).split(sizes)
            self._sums = dict(zip(self._zeros, parts, strict=True))

    @contextlib.contextmanager
    def counting(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Inside the block, the forward pass of this micro-batch counts."""
        if not self._zeros:
            yield
            return
        self._kept, self._open = self._kept_tokens(micro_batch), True
        self._pairs.clear()
        try:
            yield
        finally:
            self._kept, self._open = None, False

    def _kept_tokens(self, micro_batch: MicroBatch) -> Tensor | None:
        """[rows, 1] or, with an attention mask, [rows, length]; data in every batch: one lazy graph serves all."""
        inputs: Any = micro_batch.inputs
        kept, rows = None, rows_of(inputs)
        if micro_batch.filled or self._runtime.lazy:
            real = min(micro_batch.rows, rows) if micro_batch.filled else rows
            kept = self._runtime.numbers([1.0] * real + [0.0] * (rows - real))[:, None]
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) == rows:
            kept = mask.float() if kept is None else mask * kept
        return kept

    def _add(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a layer: counts the tokens of each of its experts, where its argument `top_k_index`, [tokens, k], has
        those of each token; in a few operations, since there may be many layers."""
        if not self._open:
            return
        index: Tensor = args[1] if len(args) > 1 else kwargs["top_k_index"]
        if self._runtime.lazy or torch.compiler.is_compiling():  # a graph of its own, which depends on no other layer's
            chosen = (index[..., None] == torch.arange(self.experts[name].number, device=index.device)).sum(1)
            self._sums[name] = self._sums[name] + (chosen * self._of_tokens(index)[:, None]).sum(0)
            return
        if index.shape not in self._pairs:
            self._pairs[index.shape] = self._of_tokens(index)[:, None].expand(index.shape).reshape(-1)
        self._sums[name].scatter_add_(0, index.reshape(-1), self._pairs[index.shape])

    def _of_tokens(self, index: Tensor) -> Tensor:
        """What each token counts. Tokens that are not those of the attention mask, such as an encoder's, all count."""
        tokens, kept = len(index), self._kept
        if kept is not None and tokens % len(kept) == 0:
            if kept.shape[1] == 1:
                kept = kept.expand(len(kept), tokens // len(kept))
            if kept.numel() == tokens:
                return kept.reshape(-1)
        return torch.ones(tokens, device=index.device)

    @torch.no_grad()
    def counts(self) -> Tensor | None:
        """The tokens of all experts in this rank's part of the step, layer after layer as in `experts`, a float32
        vector; 0 in layers of other stages. None for a model without experts."""
        if not self.experts:
            return None
        sums, device = self._sums, self._runtime.device
        every = self.experts.items()
        return torch.cat([sums[key] if key in sums else torch.zeros(each.number, device=device) for key, each in every])

    @torch.no_grad()
    def update_biases(self, counts: Tensor | None) -> None:
        """Raises the bias of each expert that got fewer tokens than the mean of its layer, and lowers that of one that
        got more: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024,
        arXiv:2408.15664), as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). `counts`: of all ranks."""
        if counts is None or not self._biases:
            return
        for name, row in zip(self.experts, counts.split([each.number for each in self.experts.values()]), strict=True):
            if name in self._biases:
                bias = self._biases[name]
                bias.add_((row.mean() - row).sign().view_as(bias), alpha=self._rate)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
