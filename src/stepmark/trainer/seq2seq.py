"""`Seq2SeqTrainer`: evaluations and predictions of tokens that the model generates.

On a lazy device every token is made by the same graph: the decoder always gets the complete, padded sequence, and the
position that is generated next is device data. That computes more than a cache would, but a lazy device compiles one
graph instead of one for each length.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import PredictionOutput

from stepmark.errors import UsageError
from stepmark.runtime.base import Runtime
from stepmark.trainer.trainer import Trainer


class Seq2SeqTrainer(Trainer):
    """A `Trainer` whose evaluations generate, with `predict_with_generate`.

    Eager devices generate as `model.generate` does. A lazy device generates greedily, with static shapes: the decoder
    runs on the complete sequence for each token, in one graph.

    Raises:
        UsageError: As `Trainer`; or the generation configuration is not valid.
    """

    def __init__(self, model: nn.Module | None = None, args: Any = None, *others: Any, **options: Any) -> None:
        self._options: dict[str, Any] | None = None  # of the evaluation that runs
        super().__init__(model, args, *others, **options)
        given = getattr(self.args, "generation_config", None)
        if given is not None:
            generating: Any = self.model
            try:
                generating.generation_config = transformers.Seq2SeqTrainer.load_generation_config(given)
            except (OSError, ValueError) as error:
                raise UsageError(f"generation_config: {' '.join(str(error).split())}") from error

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """As `Trainer.evaluate`. Further arguments are those of `model.generate`, such as `max_length`."""
        with self._generating(generation):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> PredictionOutput:
        """As `Trainer.predict`. Further arguments are those of `model.generate`, such as `max_length`."""
        with self._generating(generation):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @contextlib.contextmanager
    def _generating(self, generation: dict[str, Any]) -> Iterator[None]:
        """Inside the block, these options are used. Evaluations of single sets in it keep those of the first call."""
        before = self._options
        if before is None or generation:
            self._options = self._with_arguments(generation)
        try:
            yield
        finally:
            self._options = before

    def _with_arguments(self, generation: Mapping[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in generation.items() if value is not None}
        length, beams = (getattr(self.args, name, None) for name in ("generation_max_length", "generation_num_beams"))
        if length is not None and "max_length" not in options and "max_new_tokens" not in options:
            options["max_length"] = length
        if beams is not None:
            options.setdefault("num_beams", beams)
        return options

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **generation: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluates one batch. With `predict_with_generate` the predictions are generated token ids [rows, length], and
        labels as well as they are padded to the generation's length with the padding id."""
        if prediction_loss_only or not getattr(self.args, "predict_with_generate", False):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        labels = inputs.get("labels")
        loss = None if labels is None else super().prediction_step(model, inputs, True, ignore_keys)[0]
        options = self._options if self._options is not None and not generation else self._with_arguments(generation)
        with torch.no_grad():
            tokens = self._generate(inputs, options)
        config = self._generation_config()
        length = int(config.max_length if config.max_new_tokens is None else config.max_new_tokens + 1)
        return loss, self._padded(tokens, length), None if labels is None else self._padded(labels, length)

    def _generate(self, inputs: Mapping[str, Any], options: dict[str, Any]) -> Tensor:
        labels, decoder = inputs.get("labels"), inputs.get("decoder_input_ids")
        left_out = {"labels"}
        if labels is not None and decoder is not None and labels.shape == decoder.shape:  # made of the labels
            left_out |= {"decoder_input_ids", "decoder_attention_mask"}
        given = {name: value for name, value in inputs.items() if name not in left_out}
        model: Any = self.model
        if not self.context.runtime.lazy:
            return model.generate(**given, **options)
        config = self._generation_config()
        config.update(**options)
        stated = "max_length" in options or model.generation_config.max_length is not None
        if config.max_new_tokens is not None or not stated:  # transformers' default is one of new tokens
            config.max_length = 1 + (config.max_new_tokens or config.max_length)
        return greedy_tokens(model, given, config, self.context.runtime)

    def _generation_config(self) -> Any:
        """A copy of the model's, with transformers' defaults where it sets nothing."""
        config: Any = copy.deepcopy(self.model.generation_config)
        config.update(**config._get_default_generation_params(), defaults_only=True)
        return config

    def _padded(self, tokens: Tensor, length: int) -> Tensor:
        missing = length - tokens.shape[-1]
        return nn.functional.pad(tokens, (0, missing), value=self._padding_id()) if missing > 0 else tokens

    def _padding_id(self) -> int:
        processing, config = self.processing_class, getattr(self.model, "config", None)
        for owner, name in ((processing, "pad_token_id"), (processing, "eos_token_id"), (config, "pad_token_id")):
            found = getattr(owner, name, None)
            if isinstance(found, int):
                return found
        raise UsageError("predict_with_generate: there is no padding id; set pad_token_id in the model's configuration")


# Settings of a generation with other values than their defaults, or nothing, change which tokens are generated.
_NEUTRAL = """
    num_beams do_sample min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size repetition_penalty
    encoder_repetition_penalty bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias guidance_scale
    penalty_alpha constraints force_words_ids
"""


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
    defaults = {**config._get_default_generation_params(), "guidance_scale": 1.0}
    for name in _NEUTRAL.split():
        value, default = getattr(config, name, None), defaults.get(name)
        if value not in (None, default) and (value or default):  # where nothing is the default, so are 0 and []
            raise UsageError(
                f"predict_with_generate: {name} is {value}, and a lazy device generates greedily, with static shapes; "
                f"set it to {default}, or evaluate on device: cpu or cuda"
            )


def _forced(config: Any, position: int) -> int | None:
    """The token that has to come after `position`."""
    if position == 0 and config.forced_bos_token_id is not None:
        return int(config.forced_bos_token_id)
    if position == config.max_length - 2 and config.forced_eos_token_id is not None:
        forced = config.forced_eos_token_id
        return int(forced[0] if isinstance(forced, (list, tuple)) else forced)
    return None
