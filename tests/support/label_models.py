"""Small models of every transformers class that takes labels, with samples for them and the loss computed by hand."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.utils.generic import find_labels

VOCABULARY = 67
CLASSES = 3
LENGTH = 12
IMAGE = 32
IGNORED = -100

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_labels": CLASSES, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32,
    "emb_dim": 32, "embedding_size": 32, "intermediate_size": 48, "hidden_dim": 48, "d_ff": 48, "ffn_dim": 48,
    "d_inner": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "d_head": 8,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_source_positions": 64,
    "max_target_positions": 64, "image_size": IMAGE, "patch_size": 8, "num_channels": 3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "projection_dim": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
    "rotary_dim": 4, "tie_word_embeddings": False, "num_frames": 2, "tubelet_size": 1, "type_vocab_size": 2,
    "use_cache": False, "decoder_hidden_size": 32, "out_hidden_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16,
    "num_mel_bins": 16, "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16, "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "apply_spec_augment": False, "ctc_zero_infinity": True, "semantic_loss_ignore_index": 255,
}  # fmt: skip
LARGEST = 40_000_000  # parameters
TWO_CLASSES = ("question", "next sentence")
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "thinker_config", "talker_config")


@dataclass(frozen=True)
class Case:
    """A model class, its task, and a small model in eval mode with samples of its own shape."""

    name: str
    task: str
    model: nn.Module
    samples: list[dict[str, Tensor]]

    def __post_init__(self) -> None:
        self.model.eval()


class NotMade(Exception):
    """No small model, or no samples for it, could be made."""


def classes_with_labels() -> list[str]:
    """Every model class of transformers whose forward has labels."""
    return [name for name in dir(transformers) if _has_labels(name)]


def _has_labels(name: str) -> bool:
    if not name[0].isupper() or name.startswith(("TF", "Flax", "Auto")):
        return False
    try:
        owner = getattr(transformers, name)
    except Exception:  # it needs a library that is not installed
        return False
    is_model = inspect.isclass(owner) and issubclass(owner, transformers.PreTrainedModel)
    return is_model and bool(find_labels(owner))


def _tasks() -> dict[str, str]:
    """The task of every class, by transformers' mappings; the first one that lists it wins."""
    tasks: dict[str, str] = {}
    for task, mapping in (
        ("causal", "CAUSAL_LM"),
        ("masked", "MASKED_LM"),
        ("seq2seq", "SEQ_TO_SEQ_CAUSAL_LM"),
        ("tokens", "TOKEN_CLASSIFICATION"),
        ("sequence", "SEQUENCE_CLASSIFICATION"),
        ("question", "QUESTION_ANSWERING"),
        ("choice", "MULTIPLE_CHOICE"),
        ("next sentence", "NEXT_SENTENCE_PREDICTION"),
        ("image", "IMAGE_CLASSIFICATION"),
        ("video", "VIDEO_CLASSIFICATION"),
        ("audio", "AUDIO_CLASSIFICATION"),
        ("audio frames", "AUDIO_FRAME_CLASSIFICATION"),
        ("speech", "SPEECH_SEQ_2_SEQ"),
        ("ctc", "CTC"),
        ("segmentation", "SEMANTIC_SEGMENTATION"),
        ("image text", "IMAGE_TEXT_TO_TEXT"),
        ("image text", "MULTIMODAL_LM"),
    ):
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                tasks.setdefault(name, task)
    return tasks


TASKS = _tasks()
ENDINGS = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "question",
    "ForQuestionAnsweringSimple": "question",
    "ForMultipleChoice": "choice",
    "ForMaskedLM": "masked",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForNextSentencePrediction": "next sentence",
    "ForImageClassification": "image",
    "ForVideoClassification": "video",
    "ForSemanticSegmentation": "segmentation",
    "ForCTC": "ctc",
}


def task_of(name: str) -> str:
    """The task of a class; empty if it is unknown."""
    known = TASKS.get(name, "")
    by_name = next((task for ending, task in ENDINGS.items() if name.endswith(ending)), "")
    return by_name if by_name and known in ("", "causal", "seq2seq") and name not in _SEQ2SEQ else known


_SEQ2SEQ = set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())


def make(name: str) -> Case:
    """A small model of a class with samples. Raises NotMade, with the reason."""
    task = task_of(name)
    if task not in SAMPLES:
        raise NotMade(f"no samples for its task ({task or 'in no mapping of transformers'})")
    if name in NO_LOSS_BY_HAND:
        raise NotMade(NO_LOSS_BY_HAND[name])
    owner, reasons = getattr(transformers, name), []
    try:
        attempts = list(_attempts(owner.config_class, task))
    except Exception as error:
        raise NotMade(f"no small configuration: {_first_line(error)}") from error
    for values in attempts:
        try:
            model = _small_model(owner, task, values)
        except Exception as error:
            reasons.append(f"no small configuration: {_first_line(error)}")
            continue
        for samples in SAMPLES[task]:
            try:
                case = Case(name, task, model, samples(model))
                with torch.no_grad():
                    loss = model(**batch_of(case.samples[:2])).loss
                if not loss.isfinite():
                    raise NotMade("its loss is not finite with random weights")
                return case
            except Exception as error:
                reasons.append(f"its forward fails: {_first_line(error)}")
    raise NotMade(next((each for each in reasons if "forward" in each), reasons[0]))


def small(name: str) -> Any:
    """A small model of a class, with random weights. Raises NotMade, with the reason."""
    owner, reason = getattr(transformers, name), ""
    try:
        for values in _attempts(owner.config_class, task_of(name)):
            try:
                return _small_model(owner, task_of(name), values)
            except Exception as error:
                reason = reason or _first_line(error)
    except Exception as error:
        reason = _first_line(error)
    raise NotMade(f"no small configuration: {reason}")


def _small_model(owner: Any, task: str, values: dict[str, Any]) -> Any:
    config = owner.config_class(**values)
    if task == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 0
    if hasattr(config, "languages"):
        config.default_language = config.languages[0]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in owner(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise NotMade(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = owner(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all():
                parameter.zero_()
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.float().eval()


def _attempts(kind: Any, task: str) -> Iterator[dict[str, Any]]:
    """Values for a configuration: first all small ones, then fewer, which more configurations accept."""
    small = _known(kind())
    if task in TWO_CLASSES:
        small["num_labels"] = 2
    sizes = ("vocab_size", "num_labels", "num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id")
    yield small
    for left_out in (
        ("head_dim",),
        ("conv_dim", "conv_stride", "conv_kernel", "num_feat_extract_layers", "d_kv", "d_head", "embedding_size"),
        ("head_dim", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "num_frames"),
        ("num_attention_heads", "num_heads", "head_dim", "num_key_value_heads", "decoder_hidden_size"),
    ):
        yield {name: value for name, value in small.items() if name not in left_out}
    yield {name: value for name, value in small.items() if name in (*sizes, "hidden_size", *PARTS)}
    yield {name: value for name, value in small.items() if name in (*sizes, *PARTS)}
    yield {name: value for name, value in small.items() if name in sizes[:2]}


def _known(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in SMALL.items():
        try:
            current = getattr(config, name)
        except Exception:  # a property that this configuration cannot compute, in any way: it is no size to set
            continue
        if isinstance(current, (list, tuple)) and not isinstance(value, tuple):
            continue
        if isinstance(value, tuple) and not isinstance(current, (list, tuple)):
            continue
        if current is None and name not in ("pad_token_id", "bos_token_id", "eos_token_id", "num_key_value_heads"):
            continue
        values[name] = value
    values |= {name: 0.0 for name, value in vars(config).items() if "drop" in name and isinstance(value, float)}
    for part in PARTS:
        inner = vars(config).get(part)
        if isinstance(inner, transformers.PreTrainedConfig):
            values[part] = type(inner)(**_known(inner)) if part in ("encoder", "decoder") else _known(inner)
    if getattr(config, "layer_types", None) is not None:
        values["layer_types"] = list(config.layer_types[-2:])
    return values


def _random(*shape: int, low: int = 3, high: int = VOCABULARY, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


COUNT = 7  # samples: at batch size 2 and 5 the last batch is ragged


def _rows(make_row: Callable[[int], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [make_row(index) for index in range(COUNT)]


def _text(index: int) -> dict[str, Tensor]:
    ids = _random(LENGTH, seed=index)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _some_ignored(labels: Tensor, index: int) -> Tensor:
    """Labels of which another number counts in every sample: the first of even samples counts."""
    labels = labels.clone()
    labels[LENGTH - 1 - index :] = IGNORED
    if index % 2:
        labels[0] = IGNORED
    return labels


def _vocabulary(index: int) -> Tensor:
    return _some_ignored(_random(LENGTH, seed=100 + index), index)


def language(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {**_text(index), "labels": _vocabulary(index)})


def token_classes(model: nn.Module) -> list[dict[str, Tensor]]:
    labels = lambda index: _some_ignored(_random(LENGTH, low=0, high=CLASSES, seed=100 + index), index)  # noqa: E731
    return _rows(lambda index: {**_text(index), "labels": labels(index)})


def _class(index: int) -> Tensor:
    return torch.tensor(index % CLASSES)


def sequence_classes(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {**_text(index), "labels": _class(index)})


def boxed_tokens(model: nn.Module) -> list[dict[str, Tensor]]:
    width = 8 if "Bros" in type(model).__name__ else 4
    boxes = torch.arange(LENGTH * width).reshape(LENGTH, width)
    return [{**row, "bbox": boxes / boxes.amax() if width == 8 else boxes % 5} for row in token_classes(model)]


def one_end(model: nn.Module) -> list[dict[str, Tensor]]:
    """Sequences that end with the one end-of-sequence token, which some classifiers look for."""

    def row(index: int) -> dict[str, Tensor]:
        text = _text(index)
        text["input_ids"][-1] = 2
        return {**text, "labels": _class(index)}

    return _rows(row)


def answers(model: nn.Module) -> list[dict[str, Tensor]]:
    start, end = lambda index: torch.tensor(index), lambda index: torch.tensor(index + 3)
    return _rows(lambda index: {**_text(index), "start_positions": start(index), "end_positions": end(index)})


def ended_answers(model: nn.Module) -> list[dict[str, Tensor]]:
    rows = answers(model)
    for row in rows:
        row["input_ids"][-1] = 2
    return rows


def choices(model: nn.Module) -> list[dict[str, Tensor]]:
    def row(index: int) -> dict[str, Tensor]:
        ids = _random(CLASSES, LENGTH, seed=index)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _class(index)}

    return _rows(row)


def next_sentences(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {**_text(index), "labels": torch.tensor(index % 2)})


def sequence_to_sequence(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {**_text(index), "labels": _vocabulary(index)})


def _pixels(model: Any, index: int, *leading: int) -> Tensor:
    size = getattr(model.config, "image_size", IMAGE)
    size = size if isinstance(size, int) else IMAGE
    channels = getattr(model.config, "num_channels", 3)
    shape = (*leading, channels if isinstance(channels, int) else 3, size, size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(index))


def images(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"pixel_values": _pixels(model, index), "labels": _class(index)})


def videos(model: Any) -> list[dict[str, Tensor]]:
    frames = getattr(model.config, "num_frames", getattr(model.config, "frames_per_clip", 2))
    name = "pixel_values_videos" if "pixel_values_videos" in inspect.signature(model.forward).parameters else ""
    name = name or "pixel_values"
    return _rows(lambda index: {name: _pixels(model, index, frames), "labels": _class(index)})


def _wave(index: int, length: int = 800) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(index))


def _features(model: Any, index: int) -> Tensor:
    config = model.config
    bins = next((getattr(config, name) for name in ("num_mel_bins", "feature_size") if hasattr(config, name)), 16)
    length = getattr(config, "max_length", 0) or 2 * getattr(config, "max_source_positions", 32)
    return torch.randn(bins, length, generator=torch.Generator().manual_seed(index))


def sounds(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"input_values": _wave(index), "labels": _class(index)})


def sound_features(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"input_features": _features(model, index), "labels": _class(index)})


def spectrograms(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"input_values": _features(model, index).T, "labels": _class(index)})


def spectrogram_features(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"input_features": _features(model, index).T, "labels": _class(index)})


def speech(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"input_features": _features(model, index), "labels": _vocabulary(index)})


def speech_frames(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"input_features": _features(model, index).T, "labels": _vocabulary(index)})


def speech_waves(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"input_values": _wave(index), "labels": _vocabulary(index)})


def _transcript(index: int) -> Tensor:
    labels = torch.full((6,), IGNORED)
    labels[: 2 + index % 4] = _random(2 + index % 4, seed=100 + index)
    return labels


def transcripts(model: nn.Module) -> list[dict[str, Tensor]]:
    return _rows(lambda index: {"input_values": _wave(index), "labels": _transcript(index)})


def feature_transcripts(model: nn.Module) -> list[dict[str, Tensor]]:
    def row(index: int) -> dict[str, Tensor]:
        features = _features(model, index).T
        return {"input_features": features, "labels": _transcript(index)}

    return _rows(row)


def segments(model: nn.Module) -> list[dict[str, Tensor]]:
    def row(index: int) -> dict[str, Tensor]:
        pixels = _pixels(model, index)
        labels = _random(*pixels.shape[-2:], low=0, high=CLASSES, seed=100 + index)
        labels[: 4 * index] = 255
        return {"pixel_values": pixels, "labels": labels}

    return _rows(row)


def with_images(make_samples: Callable[[Any], list[dict[str, Tensor]]]) -> Callable[[Any], list[dict[str, Tensor]]]:
    def samples(model: Any) -> list[dict[str, Tensor]]:
        return [{**row, "pixel_values": _pixels(model, index)} for index, row in enumerate(make_samples(model))]

    return samples


SAMPLES: dict[str, list[Callable[[Any], list[dict[str, Tensor]]]]] = {
    "causal": [language, with_images(language)],
    "masked": [language, with_images(language)],
    "seq2seq": [sequence_to_sequence],
    "tokens": [token_classes, boxed_tokens],
    "sequence": [sequence_classes, one_end],
    "question": [answers, ended_answers],
    "choice": [choices],
    "next sentence": [next_sentences],
    "image": [images],
    "video": [videos],
    "audio": [sounds, sound_features, spectrograms, spectrogram_features],
    "speech": [speech, speech_frames, speech_waves],
    "ctc": [transcripts, feature_transcripts],
    "segmentation": [segments],
    "image text": [language, with_images(language)],
}


def batch_of(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def mean_by_hand(case: Case) -> Tensor:
    """The mean over all targets (or samples), from the model's logits for one sample at a time."""
    losses, counts = zip(*(sample_losses(case, sample) for sample in case.samples), strict=True)
    return torch.stack(losses).sum() / sum(counts)


def sample_losses(case: Case, sample: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum of a sample's losses, and their number."""
    # With a cache, T5Gemma attends to decoder tokens that it masks without one.
    options = {"use_cache": False} if "use_cache" in inspect.signature(case.model.forward).parameters else {}
    outputs = case.model(**batch_of([sample]), **options)
    if case.task == "question":
        return _answer_losses(outputs, sample), 1
    if case.task == "ctc":
        return outputs.loss, 1  # one sample: there is nothing to average
    logits, labels = _at_least_float32(outputs.logits), sample["labels"][None]
    if case.task == "segmentation":
        logits = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(logits, labels, ignore_index=255, reduction="sum"), int((labels != 255).sum())
    if shifts(case):
        logits, labels = logits[:, :-1], labels[:, 1:]
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.reshape(-1), reduction="sum"), int((labels != IGNORED).sum())


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _answer_losses(outputs: Any, sample: dict[str, Tensor]) -> Tensor:
    both = [
        F.cross_entropy(_at_least_float32(logits), sample[name][None])
        for logits, name in ((outputs.start_logits, "start_positions"), (outputs.end_logits, "end_positions"))
    ]
    return (both[0] + both[1]) / 2


# Decoders of encoder-decoders and other classes in transformers' mapping of causal models whose loss does not shift
# labels: they are trained on labels that are already shifted.
ALIGNED = frozenset({
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "CpmAntForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM",
    "PPFormulaNetForConditionalGeneration", "PegasusForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
    "XLMWithLMHeadModel", "XLNetLMHeadModel",
})  # fmt: skip
# Causal language models with an audio encoder, which transformers lists with encoder-decoders.
SHIFTED = frozenset({
    "AudioFlamingo3ForConditionalGeneration", "GlmAsrForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration", "VoxtralForConditionalGeneration",
})  # fmt: skip
# Classes whose loss cannot be written down from their outputs for one sample, and why.
NO_LOSS_BY_HAND = {
    "FlaubertForQuestionAnswering": "its head searches with a beam, and returns no logits of single positions",
    "XLMForQuestionAnswering": "its head searches with a beam, and returns no logits of single positions",
    "XLNetForQuestionAnswering": "its head searches with a beam, and returns no logits of single positions",
    "ReformerForMaskedLM": "its backward pass exists in train mode only",
    "UperNetForSemanticSegmentation": "its loss adds that of an auxiliary head whose logits it does not return",
    "ReformerModelWithLMHead": "its backward pass exists in train mode only",
    "ReformerForQuestionAnswering": "its backward pass exists in train mode only",
    "ReformerForSequenceClassification": "its backward pass exists in train mode only",
    "CsmDepthDecoderForCausalLM": "the labels of its first codebook have no logits",
    "GitForCausalLM": "its logits are longer than its labels, by the patches of the image",
}


def shifts(case: Case) -> bool:
    """Whether position t predicts label t + 1."""
    return case.name in SHIFTED or (case.task in ("causal", "image text") and case.name not in ALIGNED)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
