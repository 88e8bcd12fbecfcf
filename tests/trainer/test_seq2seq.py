"""Evaluations that generate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

from stepmark import Seq2SeqTrainer, Seq2SeqTrainingArguments
from stepmark.errors import UsageError
from stepmark.runtime.eager import EagerRuntime
from stepmark.trainer.seq2seq import greedy_tokens
from tests.support.ranks import Ranks
from tests.support.seq2seq_programs import LENGTH, Sentences, generated, small_t5


def by_hand(**options: object) -> list[list[int]]:
    rows = []
    for index in range(5):
        sample = Sentences()[index]
        inputs = {name: sample[name][None] for name in ("input_ids", "attention_mask")}
        (tokens,) = small_t5().eval().generate(**inputs, **options).tolist()  # type: ignore[arg-type]
        rows.append(tokens)
    return rows


def padded(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row + [0] * (width - len(row)) for row in rows]


def test_metrics_get_what_the_model_generates(tmp_path: Path) -> None:
    found = generated("cpu", str(tmp_path), generation_num_beams=2)
    assert padded(found["tokens"], 20) == padded(by_hand(max_length=LENGTH, num_beams=2), 20)
    assert found["labels"][0][:7] == [*Sentences()[0]["labels"][:5].tolist(), -100, -100]


def test_options_of_one_evaluation_win_over_the_arguments(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "new"), device="cpu", predict_with_generate=True, generation_max_length=LENGTH
    )
    trainer = Seq2SeqTrainer(small_t5(), args)
    tokens = trainer.predict(Sentences(), max_new_tokens=4).predictions
    assert padded(tokens.tolist(), 20) == padded(by_hand(max_new_tokens=4), 20)
    logits = Seq2SeqTrainer(small_t5(), Seq2SeqTrainingArguments(output_dir=str(tmp_path), device="cpu"))
    assert logits.predict(Sentences()).predictions[0].shape == (5, 7, 61)


def test_greedy_generation_with_static_shapes_gives_the_same_tokens() -> None:
    model = small_t5().eval()
    inputs = torch.utils.data.default_collate([Sentences()[index] for index in range(5)])
    del inputs["labels"]
    endless = GenerationConfig(max_length=LENGTH, decoder_start_token_id=0, pad_token_id=0, eos_token_id=[])
    with torch.no_grad():
        generated_token = int(model.generate(**inputs, generation_config=endless)[0, 3])
    for ends, forced in ((1, None), ([1, generated_token], None), (1, 7)):
        config = GenerationConfig(
            max_length=LENGTH, decoder_start_token_id=0, pad_token_id=0, eos_token_id=ends, forced_eos_token_id=forced
        )
        with torch.no_grad():
            found = greedy_tokens(model, inputs, config, EagerRuntime(torch.device("cpu")))
            expected = model.generate(**inputs, generation_config=config)
        assert padded(expected.tolist(), LENGTH) == found.tolist()


def test_decoder_inputs_made_of_labels_are_not_what_generation_begins_with(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), device="cpu", predict_with_generate=True, generation_max_length=LENGTH
    )
    trainer = Seq2SeqTrainer(small_t5(), args)
    inputs = torch.utils.data.default_collate([Sentences()[index] for index in range(5)])
    trainer.model.eval()
    _, expected, _ = trainer.prediction_step(trainer.model, inputs, False)
    given = {**inputs, "decoder_input_ids": torch.full_like(inputs["labels"], 40)}
    _, tokens, _ = trainer.prediction_step(trainer.model, given, False)
    assert torch.equal(tokens, expected)


def test_data_without_labels_are_generated_from(tmp_path: Path) -> None:
    rows = [Sentences()[index] for index in range(5)]
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), device="cpu", predict_with_generate=True, generation_max_length=LENGTH
    )
    trainer = Seq2SeqTrainer(small_t5(), args)
    expected = trainer.predict(rows).predictions.tolist()
    for row in rows:
        del row["labels"]
    found = trainer.predict(rows)
    assert (found.predictions.tolist(), found.label_ids) == (expected, None)
    assert "test_loss" not in found.metrics


@pytest.mark.xla
@pytest.mark.parametrize("length", [{"max_length": LENGTH}, {"max_new_tokens": 3}, {}])
def test_a_lazy_device_generates_the_same_without_compiling_again(
    tmp_path: Path, ranks: Ranks, length: dict[str, int]
) -> None:
    found, expected = (
        ranks.run("tests.support.seq2seq_programs:generated", device, str(tmp_path / device), length).check()[0]
        for device in ("xla", "cpu")
    )
    assert found["compiled"] == 0
    assert (found["tokens"], found["labels"]) == (expected["tokens"], expected["labels"])
    assert np.isclose(found["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch_xla's, from transformers' arguments
def test_arguments_of_transformers_keep_what_they_say_of_generation(tmp_path: Path) -> None:
    theirs = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, predict_with_generate=True, generation_max_length=5
    )
    assert Seq2SeqTrainer(small_t5(), theirs).predict(Sentences()).predictions.shape[1] == 20  # as the model's own
    assert Seq2SeqTrainer(small_t5(), theirs).args.generation_max_length == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sortish_sampler": True}, "^sortish_sampler: is not supported"),
        ({"generation_max_length": 0}, "^generation_max_length: should be at least 1"),
        ({"generation_config": "/no/such/folder"}, "^generation_config: "),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Seq2SeqTrainer(small_t5(), Seq2SeqTrainingArguments(output_dir=str(tmp_path), device="cpu", **options))  # type: ignore[arg-type]


def test_beams_are_refused_where_shapes_are_static() -> None:
    config = GenerationConfig(max_length=LENGTH, num_beams=3)
    with pytest.raises(UsageError, match="^predict_with_generate: num_beams is 3, .* set it to 1"):
        greedy_tokens(small_t5(), {}, config, EagerRuntime(torch.device("cpu")))


@pytest.mark.parametrize("setting", ["guidance_scale", "repetition_penalty"])
def test_a_factor_of_zero_is_no_default(setting: str) -> None:
    config = GenerationConfig(max_length=LENGTH)
    setattr(config, setting, 0.0)
    with pytest.raises(UsageError, match=f"^predict_with_generate: {setting} is 0"):
        greedy_tokens(small_t5(), {}, config, EagerRuntime(torch.device("cpu")))


def test_generation_with_sharded_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^predict_with_generate and fsdp: "):
        Seq2SeqTrainingArguments(output_dir=str(tmp_path), predict_with_generate=True, fsdp="full_shard")
