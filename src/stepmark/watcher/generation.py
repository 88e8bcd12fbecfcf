"""`stepmark generate`: what the model of a run or a checkpoint writes, by transformers' `generate`."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepmark.checkpoint.coordination.leases import reading
from stepmark.config.quiet_libraries import leave_out_torch_xla, quiet_libraries
from stepmark.data.tokenize.encoding import TextEncoder
from stepmark.errors import CheckpointNotFound, UsageError
from stepmark.evaluation.prompt_samples import continuation
from stepmark.evaluation.restored_model import ModelReader
from stepmark.runtime.device import choose_device, create_runtime
from stepmark.training.model_labels import unwrapped
from stepmark.training.model_options import check_attention
from stepmark.watcher.command import newest, recipe_of
from stepmark.watcher.evaluation_data import Request
from stepmark.watcher.setup import options_of, tokenizer_of

TOKENS = 64  # to generate, unless told otherwise
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


@dataclass(frozen=True)
class TextGenerator:
    """Writes texts after prompts. `config`: a GenerationConfig; `chats`: a text is what a user says to a chat model."""

    model: Any
    tokenizer: Any
    config: Any
    chats: bool

    def __call__(self, prompt: Any, seed: int, *, streams: bool = False) -> list[str]:
        """The texts after a text or a list of messages, drawn from `seed`; with `streams` printed as they come.

        Raises UsageError for a prompt that the model does not take, and options that transformers refuses.
        """
        from transformers import TextStreamer

        ids, config, model = self._ids(prompt), self.config, self.model
        before = [] if model.config.is_encoder_decoder else ids
        positions = getattr(model.config, "max_position_embeddings", None)
        room = positions - len(ids) if before and positions is not None else TOKENS
        tokens = config.max_new_tokens or max(1, min(room, TOKENS))
        if before and positions is not None and tokens > room:
            raise UsageError(
                f"--max_new_tokens: {tokens} and the prompt's {len(ids)} tokens are more than the model's {positions} "
                "positions; lower it, or shorten the prompt"
            )
        words = streams and (config.num_beams or 1) == 1
        streamer: Any = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if words else None
        given = torch.tensor([ids], device=model.device)
        torch.manual_seed(seed)
        with _refusals():
            how: dict[str, Any] = {"generation_config": config, "max_new_tokens": tokens, "streamer": streamer}
            made = model.generate(given, attention_mask=torch.ones_like(given), **how)
        texts = [continuation(self.tokenizer, before, row[len(before) :]) for row in made.tolist()]
        if streams and not words:
            print(*texts, sep="\n", flush=True)
        return texts

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and not self.chats:
            encoder = TextEncoder.of(self.tokenizer)
            ids = [*encoder.prefix, *encoder.encode([prompt])[0]]
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            try:
                text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # templates are programs; without one, a ValueError
                line = str(error).strip().split("\n")[0]
                raise UsageError(f"no chat template takes these messages: {line}; give a text") from error
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise UsageError(f"{prompt!r} has no tokens; give a text to continue")
        return list(ids)


def open_generator(given: Any, options: Mapping[str, Any], chat: bool | None) -> TextGenerator:
    """The generator that a command line asks for, with `options` of transformers' GenerationConfig.

    Raises UsageError, and CheckpointError where there is no model.
    """
    quiet_libraries()
    device = choose_device(given.device)
    if device == "xla" and given.device != "auto":
        raise UsageError("--device: xla would compile a graph for every length; generate with --device cpu")
    device = "cpu" if device == "xla" else device
    leave_out_torch_xla()
    if not given.path.is_dir():
        raise CheckpointNotFound(f"there is no folder {given.path}")
    path = newest(Request(given.path))
    with reading(path, "generate"):
        recipe, trust = recipe_of(path, given), given.trust_remote_code
        run, tokenizer = options_of(recipe, path), tokenizer_of(recipe, path, trust)
        if tokenizer is None:
            raise UsageError(f"{path} has no tokenizer; a Trainer with processing_class saves it")
        attention = given.attn_implementation or run.attn_implementation
        check_attention(attention, device, half=True)
        named: dict[str, Any] = {"base_model": given.base_model, "attention": attention}
        reader = ModelReader(create_runtime(device), trust_remote_code=trust, **named)
        model: Any = unwrapped(reader.read(path)).eval()
    print(f"{path}, on {device}", file=sys.stderr, flush=True)
    chats = getattr(tokenizer, "chat_template", None) is not None
    if run.columns is not None:
        chats = run.columns.get("messages_column") is not None
    return TextGenerator(model, tokenizer, _config(model, tokenizer, path, options), chats if chat is None else chat)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Inside the block, what transformers raises for options is a UsageError."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:  # NotImplementedError is one
        raise UsageError(f"transformers refuses to generate: {' '.join(str(error).split())}") from error


def _config(model: Any, tokenizer: Any, folder: Path, options: Mapping[str, Any]) -> Any:
    """The model's GenerationConfig with `options`, and the end of its tokenizer."""
    from transformers import GenerationConfig

    if getattr(model, "generation_config", None) is None:
        raise UsageError(f"{folder}: {type(model).__name__} writes no text; give a model with a language model's head")
    own = (folder / "generation_config.json").is_file()
    config = GenerationConfig.from_pretrained(folder) if own else copy.deepcopy(model.generation_config)
    with _refusals():
        config.update(**options)
    unused = [name for name in SAMPLING if name in options and not config.do_sample]
    if unused:
        raise UsageError(f"--{unused[0]}: no tokens are drawn; add --do_sample, or leave it out")
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = [each for each in dict.fromkeys([*ends, tokenizer.eos_token_id]) if each is not None] or None
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return config
