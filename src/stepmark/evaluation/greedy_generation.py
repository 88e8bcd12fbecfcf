"""Greedy generation of an encoder-decoder with static shapes: every token is made by the same graph.

The decoder always gets the complete, padded sequence, and the position that is generated next is device data. That
computes more than a cache would, but a lazy device compiles one graph instead of one for each length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stepmark.errors import UsageError
from stepmark.runtime.base import Runtime

# Settings of a generation with other values than these change which tokens are generated.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "do_sample": (None, False),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
}


def greedy_tokens(model: Any, inputs: Mapping[str, Any], config: Any, runtime: Runtime) -> Tensor:
    """Generates as `model.generate` does without sampling and beams.

    Args:
        model: An encoder-decoder of transformers, on the device.
        inputs: The encoder's inputs [rows, …].
        config: The GenerationConfig, with `max_length`.
        runtime: The device.

    Returns:
        Token ids [rows, max_length]; the padding id after the end.

    Raises:
        UsageError: The model or the configuration asks for another kind of generation.
    """
    _check(model, config)
    rows = len(next(value for value in inputs.values() if isinstance(value, Tensor)))
    encoded = model.get_encoder()(**{name: value for name, value in inputs.items() if name != "decoder_input_ids"})
    rest = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    given = config.eos_token_id
    ends = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [int(given)]
    padding = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    on_host = torch.full((rows, config.max_length), padding, dtype=torch.int64)
    on_host[:, 0] = config.decoder_start_token_id
    tokens, positions, ended = runtime.place(
        [on_host, torch.arange(config.max_length), torch.zeros(rows, dtype=torch.bool)]
    )
    runtime.step_boundary()
    for position in range(config.max_length - 1):
        (here,) = runtime.place([torch.tensor([position])])
        logits = model(encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=False, **rest).logits
        chosen = logits.index_select(1, here)[:, 0].argmax(-1)
        forced = _forced(config, position)
        if forced is not None:
            chosen = torch.full_like(chosen, forced)
        chosen = torch.where(ended, torch.full_like(chosen, padding), chosen)
        tokens = torch.where(positions == here + 1, chosen[:, None], tokens)
        for end in ends:
            ended = ended | (chosen == end)
        runtime.step_boundary()
    return tokens


def _check(model: Any, config: Any) -> None:
    if not getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(
            f"predict_with_generate: {type(model).__name__} is not an encoder-decoder, and only those generate on a "
            "lazy device; evaluate on device: cpu or cuda"
        )
    for name, neutral in _NEUTRAL.items():
        if getattr(config, name, None) not in neutral:
            raise UsageError(
                f"predict_with_generate: {name} is {getattr(config, name)}, and a lazy device generates greedily, with "
                f"static shapes; set it to {neutral[-1]}, or evaluate on device: cpu or cuda"
            )


def _forced(config: Any, position: int) -> int | None:
    """The token that has to come after `position`."""
    if position == 0 and config.forced_bos_token_id is not None:
        return int(config.forced_bos_token_id)
    if position == config.max_length - 2 and config.forced_eos_token_id is not None:
        forced = config.forced_eos_token_id
        return int(forced[0] if isinstance(forced, (list, tuple)) else forced)
    return None
