"""Texts that a model in training writes after given prompts, greedily and with one graph on a lazy device.

Every token is made by a forward pass over the complete, padded sequences: a causal model does not see what follows a
position, so the padding changes nothing. That computes more than a cache would, and needs nothing of the model but its
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.data.tokenize.encoding import TextEncoder
from stepmark.errors import UsageError
from stepmark.runtime.base import Runtime
from stepmark.training.micro_batches import autocast
from stepmark.training.model_labels import evaluating


class PromptSampler:
    """Continues prompts by `tokens` tokens, or up to the end-of-sequence token.

    Args:
        tokenizer: The model's.
        prompts: The texts to continue.
        tokens: How many tokens at most.
        positions: How many the model has; None: any number.

    Raises:
        UsageError: There is no tokenizer, a prompt has no tokens, or the model has not enough positions for them.
    """

    def __init__(self, tokenizer: Any, prompts: Sequence[str], tokens: int, positions: int | None) -> None:
        if tokenizer is None:
            raise UsageError("sample_prompts: the Trainer needs the tokenizer for them; pass processing_class")
        self.prompts, self._tokenizer, self._new = prompts, tokenizer, tokens
        encoder = TextEncoder.of(tokenizer)
        self._ids = [[*encoder.prefix, *ids] for ids in encoder.encode(list(prompts))]
        for prompt, ids in zip(prompts, self._ids, strict=True):
            if not ids:
                raise UsageError(f"sample_prompts: {prompt!r} has no tokens; give a text to continue")
        self._length = max(map(len, self._ids)) + tokens
        self._ends = {encoder.suffix[-1]} if encoder.suffix else set()
        if positions is not None and self._length > positions:
            raise UsageError(
                f"sample_prompts: the longest prompt and sample_tokens are {self._length} tokens, and the model has "
                f"{positions} positions; shorten the prompt, or lower sample_tokens"
            )

    def texts(self, model: nn.Module, runtime: Runtime, autocast_dtype: torch.dtype | None) -> list[str]:
        """What a causal language model that this rank holds completely writes after each prompt. No generator advances,
        and modules' modes are restored."""
        with evaluating(model), torch.no_grad(), autocast(runtime, autocast_dtype):
            tokens = self._continue(model, runtime)
        (on_host,) = runtime.to_host([tokens])
        return [self._text(row.tolist(), len(ids)) for row, ids in zip(on_host, self._ids, strict=True)]

    def _continue(self, model: nn.Module, runtime: Runtime) -> Tensor:
        """Token ids [prompts, length]."""
        on_host = torch.zeros((len(self._ids), self._length), dtype=torch.int64)
        for row, ids in enumerate(self._ids):
            on_host[row, : len(ids)] = torch.tensor(ids)
        last = torch.tensor([[len(ids) - 1] for ids in self._ids])
        tokens, last, places = runtime.place([on_host, last, torch.arange(self._length)[None]])
        runtime.step_boundary()
        for _ in range(self._new):
            logits = model(input_ids=tokens).logits
            index = last[:, :, None].expand(-1, -1, logits.shape[-1])
            chosen = logits.gather(1, index)[:, 0].argmax(-1)
            last = last + 1
            tokens = torch.where(places == last, chosen[:, None], tokens)
            runtime.step_boundary()
        return tokens

    def _text(self, row: Sequence[int], prompt: int) -> str:
        written = list(row[prompt : prompt + self._new])
        end = next((place for place, token in enumerate(written) if token in self._ends), len(written))
        # Decoded together with the prompt, since tokenizers write the space before a word only inside of a text.
        before = self._decoded(row[:prompt])
        whole = self._decoded(row[: prompt + end])
        return whole[len(before) :] if whole.startswith(before) else self._decoded(written[:end])

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
