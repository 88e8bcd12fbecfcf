"""Embedding, head and loss with the vocabulary sharded over ranks.

Each rank holds ceil(vocabulary / ranks) rows; the last ranks' shards may be padded. A rank's first row is device data,
so that the graphs of all ranks are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stepmark.errors import UsageError
from stepmark.parallel.tensor.autograd_collectives import copy_to, gather, reduce_from
from stepmark.parallel.tensor.layers import become
from stepmark.parallel.tensor.plans import vocabulary_rows
from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import Collectives

IGNORED = -100


class Vocabulary:
    """This rank's rows of a vocabulary of `size` tokens."""

    def __init__(self, size: int, axis: Collectives, runtime: Runtime) -> None:
        self.size = size
        self.rows = vocabulary_rows(size, axis.size)
        self.axis = axis
        self._runtime = runtime
        self._begin: Tensor | None = None
        self._held: Tensor | None = None

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens' rows in this rank's shard, 0 for tokens of other ranks; and a mask of the latter."""
        if self._begin is None:
            self._begin = self._runtime.place(torch.tensor([self.axis.rank * self.rows]))
        rows = tokens - self._begin
        elsewhere = (rows < 0) | (rows >= self.rows)
        return rows.masked_fill(elsewhere, 0), elsewhere

    def mask_padding(self, logits: Tensor) -> Tensor:
        """Logits (…, rows) with padding set to -inf, so that it has probability 0."""
        if self.size == self.rows * self.axis.size:
            return logits
        if self._held is None:
            self._held = self._runtime.place(torch.arange(self.rows) + self.axis.rank * self.rows < self.size)
        return torch.where(self._held, logits, torch.full_like(logits, -torch.inf))

    def complete(self, logits: Tensor) -> Tensor:
        """Complete logits (…, vocabulary) from this rank's (…, rows)."""
        return gather(logits, self.axis, -1)[..., : self.size]


class VocabParallelEmbedding(nn.Embedding):
    """An embedding sharded by rows."""

    vocabulary: Vocabulary

    def forward(self, input: Tensor) -> Tensor:
        rows, elsewhere = self.vocabulary.local(input)
        output = F.embedding(rows, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.padding_idx is not None:  # that row gets no gradient
            output = torch.where((input == self.padding_idx).unsqueeze(-1), output.detach(), output)
        return reduce_from(output, self.vocabulary.axis)


def shard_embedding(module: nn.Embedding, vocabulary: Vocabulary) -> None:
    """Replaces the forward of an embedding whose weight is sharded by rows."""
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UsageError(
            "parallelize_embedding: embeddings with max_norm, scale_grad_by_freq or sparse cannot be sharded; set it "
            "to false"
        )
    become(module, VocabParallelEmbedding)
    object.__setattr__(module, "vocabulary", vocabulary)


class VocabParallelHead:
    """The layer that computes logits, or several of which one is in use."""

    def __init__(self, vocabulary: Vocabulary, input_gathered: bool) -> None:
        self.vocabulary = vocabulary
        self.keep_sharded = False  # in a forward pass of which the loss is wanted
        self.returns_logits = False  # from such a pass, too
        self._input_gathered = input_gathered

    def attach(self, module: nn.Module) -> None:
        """Makes a module, whose weight is sharded by rows, compute logits as the head does."""
        if not self._input_gathered:  # by a gather whose backward pass sums already
            module.register_forward_pre_hook(lambda _, args: (copy_to(args[0], self.vocabulary.axis), *args[1:]))
        module.register_forward_hook(self._leave)

    def _leave(self, module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        return logits if self.keep_sharded else self.vocabulary.complete(logits)


class VocabParallelLoss:
    """Replaces transformers' ForCausalLMLoss where the head is sharded: the same loss, from logits that may be, too."""

    def __init__(self, head: VocabParallelHead, on_complete: Callable[..., Tensor]) -> None:
        self._head = head
        self._on_complete = on_complete

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if not self._head.keep_sharded:
            given = (logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
            return self._on_complete(*given, **options)
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        counted = shift_labels != ignore_index
        losses = vocab_parallel_cross_entropy(logits, shift_labels.masked_fill(~counted, 0), self._head.vocabulary)
        total = losses.masked_fill(~counted, 0).sum()
        return total / (counted.sum() if num_items_in_batch is None else num_items_in_batch)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Cross entropy of each target, in float32, without gathering the logits.

    logits: (…, rows), this rank's; targets: (…), token ids. Two all-reduces, of (…) and (2, …) elements. One tensor of
    the logits' shape is kept for the backward pass, in float32.
    """
    return _CrossEntropy.apply(logits, targets, vocabulary)


class _CrossEntropy(Function):
    """Autograd's own formulas would keep three tensors of the logits' shape, and make as many in the backward pass."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        axis = vocabulary.axis
        masked = vocabulary.mask_padding(logits.detach().float())
        (highest,) = axis.all_reduce([masked.amax(-1)], "max")
        rows, elsewhere = vocabulary.local(targets)
        own = (masked.gather(-1, rows.unsqueeze(-1)).squeeze(-1) - highest).masked_fill(elsewhere, 0)
        exponentials = (masked - highest.unsqueeze(-1)).exp_()
        total, target = axis.all_reduce([torch.stack([exponentials.sum(-1), own])])[0].unbind(0)
        context.save_for_backward(exponentials, total, rows, elsewhere)
        context.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        exponentials, total, rows, elsewhere = context.saved_tensors
        own = -gradient.masked_fill(elsewhere, 0)
        result = exponentials * (gradient / total).unsqueeze(-1)
        result.scatter_add_(-1, rows.unsqueeze(-1), own.unsqueeze(-1))
        return result.to(context.dtype), None, None


def use_vocab_parallel_loss(model: Any, head: VocabParallelHead, called: Sequence[nn.Module]) -> None:
    """Lets a causal model in training compute its own loss from sharded logits. `called`: the modules that call it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    forward = inspect.unwrap(type(model).forward)
    signature = inspect.signature(forward)
    used = forward.__code__.co_names
    if getattr(model, "loss_function", None) is not ForCausalLMLoss or "loss_function" not in used:
        return
    if "unpadded_vocab_size" in used:  # a slice of the logits, which would be one of each rank's
        return
    model.loss_function = VocabParallelLoss(head, ForCausalLMLoss)
    model.vocabulary_head = head

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = signature.bind_partial(module, *args, **kwargs).arguments
        options = {**given.get("kwargs", {}), **given}
        as_tuple = options.get("return_dict") is False or not getattr(model.config, "return_dict", True)
        head.keep_sharded = module.training and options.get("labels") is not None and not as_tuple

    def end(module: nn.Module, args: Any, outputs: Any) -> Any:
        if not head.keep_sharded:
            return outputs
        head.keep_sharded = False
        logits = {"logits": head.vocabulary.complete(outputs["logits"])} if head.returns_logits else {}
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"}, **logits)

    for each in called:
        each.register_forward_pre_hook(begin, with_kwargs=True)
        each.register_forward_hook(end)


def return_logits(model: nn.Module, wanted: bool) -> None:
    """Says whether the outputs of a model with a sharded head have complete logits beside its own loss."""
    for module in model.modules():
        if isinstance(head := vars(module).get("vocabulary_head"), VocabParallelHead):
            head.returns_logits = wanted
