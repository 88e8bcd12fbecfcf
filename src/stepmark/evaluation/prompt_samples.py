"""Texts that a model in training writes after given prompts, with one graph on a lazy device.

Every token is made by a forward pass over the complete, padded sequences: a causal model does not see what follows a
position, so the padding changes nothing. That computes more than a cache would, and needs nothing of the model but its
forward. Samples are drawn by adding Gumbel noise from the host to the logits (Gumbel 1954; Maddison et al. 2014,
arXiv:1411.0030).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.data.tokenize.encoding import TextEncoder
from stepmark.errors import UsageError
from stepmark.filesystem.error_advice import explained
from stepmark.runtime.base import Runtime
from stepmark.training.micro_batches import autocast
from stepmark.training.model_labels import evaluating


@dataclass(eq=False)
class PromptSampler:
    """Continues prompts by `tokens` tokens, or up to the end-of-sequence token.

    Args:
        tokenizer: The model's.
        prompts: The texts to continue.
        tokens: How many tokens at most.
        positions: How many the model has; None: any number.
        options: Of transformers' generation, do_sample, temperature, top_k, top_p and min_p; default: greedy.

    Raises:
        UsageError: There is no tokenizer, a prompt has no tokens, or the model has not enough positions for them.
    """

    tokenizer: Any
    prompts: Sequence[str]
    tokens: int
    positions: int | None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise UsageError("sample_prompts: the Trainer needs the tokenizer for them; pass processing_class")
        encoder = TextEncoder(self.tokenizer)
        self._ids = [[*encoder.prefix, *ids] for ids in encoder.encode(list(self.prompts))]
        for prompt, ids in zip(self.prompts, self._ids, strict=True):
            if not ids:
                raise UsageError(f"sample_prompts: {prompt!r} has no tokens; give a text to continue")
        self._warpers = _warpers(self.options or {})
        self._length = max(map(len, self._ids)) + self.tokens
        self._ends = {encoder.suffix[-1]} if encoder.suffix else set()
        if self.positions is not None and self._length > self.positions:
            raise UsageError(
                f"sample_prompts: the longest prompt and sample_tokens are {self._length} tokens, and the model has "
                f"{self.positions} positions; shorten the prompt, or lower sample_tokens"
            )

    def texts(
        self, model: nn.Module, runtime: Runtime, autocast_dtype: torch.dtype | None, seed: int = 0
    ) -> list[tuple[str, str]]:
        """What a causal language model that this rank holds completely writes after each prompt, sampled with `seed`,
        and the same with what is invisible shown. No generator advances, and modules' modes are restored."""
        with evaluating(model), torch.no_grad(), autocast(runtime, autocast_dtype):
            tokens = self._continue(model, runtime, torch.Generator().manual_seed(seed))
        (on_host,) = runtime.to_host([tokens])
        return [self._text(row.tolist(), len(ids)) for row, ids in zip(on_host, self._ids, strict=True)]

    def _continue(self, model: nn.Module, runtime: Runtime, generator: torch.Generator) -> Tensor:
        """Token ids [prompts, length]."""
        on_host = torch.zeros((len(self._ids), self._length), dtype=torch.int64)
        for row, ids in enumerate(self._ids):
            on_host[row, : len(ids)] = torch.tensor(ids)
        last = torch.tensor([[len(ids) - 1] for ids in self._ids])
        tokens, last, places = runtime.place([on_host, last, torch.arange(self._length)[None]])
        runtime.step_boundary()
        for _ in range(self.tokens):
            logits = model(input_ids=tokens).logits
            index = last[:, :, None].expand(-1, -1, logits.shape[-1])
            scores = logits.gather(1, index)[:, 0].float()
            if self._warpers is not None:
                scores = self._warpers(tokens, scores)
                (noise,) = runtime.place([torch.empty(scores.shape).exponential_(generator=generator)])
                scores = scores - noise.log()
            chosen = scores.argmax(-1)
            last = last + 1
            tokens = torch.where(places == last, chosen[:, None], tokens)
            runtime.step_boundary()
        return tokens

    def _text(self, row: Sequence[int], prompt: int) -> tuple[str, str]:
        written = list(row[prompt : prompt + self.tokens])
        end = next((place for place, token in enumerate(written) if token in self._ends), len(written))
        text = continuation(self.tokenizer, row[:prompt], written[:end])
        return text, visible(continuation(self.tokenizer, row[:prompt], written[: end + 1], special=True))


def continuation(tokenizer: Any, before: Sequence[int], written: Sequence[int], *, special: bool = False) -> str:
    """The text of the ids `written` after those `before`: decoded together, since tokenizers write the space before a
    word only inside of a text. `special`: with special tokens."""
    parts = (before, [*before, *written], written)
    head, whole, alone = (str(tokenizer.decode(list(ids), skip_special_tokens=not special)) for ids in parts)
    return whole[len(head) :] if whole.startswith(head) else alone


def visible(text: str) -> str:
    """The text with ↵ at line ends, · for spaces before them, other invisible characters escaped; ∅ if it is empty."""
    lines = []
    for line in text.split("\n"):
        shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line.rstrip(" "))
        lines.append(shown + "·" * (len(line) - len(line.rstrip(" "))))
    return "↵\n".join(lines) or "∅"


def _warpers(options: Mapping[str, Any]) -> Any | None:
    """transformers' warpers of logits in its order; None: greedy."""
    from transformers.generation import logits_process as warpers

    kinds = {"temperature": "Temperature", "top_k": "TopK", "top_p": "TopP", "min_p": "MinP"}
    given = {name: value for name, value in options.items() if name != "do_sample"}
    unknown = [name for name in given if name not in kinds]
    if unknown or (given and options.get("do_sample") is not True):
        told = f"{unknown[0]} is unknown; it has do_sample, {', '.join(kinds)}" if unknown else "set do_sample: true"
        raise UsageError(f"sample_options: {told}")
    with explained(lambda error: UsageError(f"sample_options: {error}"), (ValueError, TypeError)):
        made = [getattr(warpers, f"{kinds[name]}LogitsWarper")(given[name]) for name in kinds if name in given]
    return warpers.LogitsProcessorList(made) if options.get("do_sample") else None
