"""Gradient checkpointing does what its options say, and no option changes a gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stepmark import Trainer, TrainingArguments
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.trainer.compat.transformers_arguments import converted
from stepmark.training.model_options import set_training
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks

PROGRAM = "tests.support.programs:train"
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def norms_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[float], int]:
    """The gradient norms of two steps, and how often torch's reentrant function was called."""
    calls: list[Any] = []
    original = torch.utils.checkpoint.CheckpointFunction.apply
    counted = staticmethod(lambda *inputs: (calls.append(1), original(*inputs))[1])
    monkeypatch.setattr(torch.utils.checkpoint.CheckpointFunction, "apply", counted)
    common: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(output_dir=str(folder), device="cpu", **common, **options)
    trainer = Trainer(tiny_model(layers=2), args, train_dataset=Blocks(16))
    trainer.train()
    monkeypatch.undo()
    return [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log], len(calls)


def test_the_reentrant_function_is_used_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, none = norms_of(tmp_path / "plain", monkeypatch)
    usual, still_none = norms_of(tmp_path / "usual", monkeypatch, gradient_checkpointing=True)
    other, four = norms_of(tmp_path / "other", monkeypatch, **REENTRANT)
    assert plain == usual == other
    assert (none, still_none, four) == (0, 0, 4)  # two layers in two steps


def test_the_random_numbers_are_drawn_again_where_they_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, _ = norms_of(tmp_path / "kept", monkeypatch, gradient_checkpointing=True)
    others = {"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}
    drawn, _ = norms_of(tmp_path / "drawn", monkeypatch, gradient_checkpointing=True, **others)
    assert kept != drawn


def test_two_ranks_with_the_reentrant_function_equal_one(ranks: Ranks, tmp_path: Path) -> None:
    common = {"device": "cpu", "dropout": 0.0, "max_steps": 4}
    one = {**common, "output_dir": str(tmp_path / "1"), "per_device_train_batch_size": 4}
    two = {**common, **REENTRANT, "output_dir": str(tmp_path / "2"), "per_device_train_batch_size": 2}
    (alone,) = ranks.run(PROGRAM, one).check()
    together = ranks.run(PROGRAM, two, nproc=2).check()
    assert together[0]["weights"] == together[1]["weights"]
    for step, (loss, norm) in alone["losses"].items():
        assert together[0]["losses"][step] == pytest.approx([loss, norm], rel=1e-5)


def test_options_are_read_from_text_and_checked() -> None:
    assert TrainingFields(gradient_checkpointing_kwargs="use_reentrant=false").checkpointing_options == {
        "use_reentrant": False
    }
    made = TrainingArguments(gradient_checkpointing_kwargs='{"use_reentrant": true}')
    assert made.gradient_checkpointing_kwargs == {"use_reentrant": True}
    for wrong, message in (
        ({"every_n_layers": 2}, "'every_n_layers' is not supported; it has use_reentrant, preserve_rng_state"),
        ({"use_reentrant": "no"}, "use_reentrant should be True or False, and is 'no'"),
    ):
        with pytest.raises(UsageError, match=f"^gradient_checkpointing_kwargs: {message}"):
            TrainingFields(gradient_checkpointing_kwargs=wrong)
    with pytest.raises(
        UsageError, match="^gradient_checkpointing_kwargs and pipeline_parallel_size: a stage recomputes"
    ):
        TrainingFields(**REENTRANT, pipeline_parallel_size=2, gradient_accumulation_steps=2)


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads)).save_pretrained(tmp_path / "model")
    quantization = transformers.Mxfp4Config(dequantize=True)
    model = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "model", quantization_config=quantization)
    args = TrainingArguments(output_dir=str(tmp_path / "run"), device="cpu", disable_tqdm=True)
    with pytest.raises(UsageError, match=r"^model: it is quantized"):
        Trainer(model, args, train_dataset=Blocks(4)).train()


def test_the_newer_names_of_transformers_are_the_same_fields() -> None:
    options = {"use_reentrant": False}
    made = TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs=options)  # type: ignore[call-arg]
    assert (made.gradient_checkpointing, made.gradient_checkpointing_kwargs) == (True, options)
    assert (made.activation_checkpointing, made.activation_checkpointing_kwargs) == (True, options)
    made.activation_checkpointing = False
    assert made.gradient_checkpointing is False
    other = {"use_reentrant": True}
    with pytest.raises(UsageError, match=r"^activation_checkpointing_kwargs, gradient_checkpointing_kwargs: "):
        TrainingArguments(activation_checkpointing_kwargs=options, gradient_checkpointing_kwargs=other)  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_transformers_arguments_with_either_name_are_converted(tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {name: True, f"{name}_kwargs": {"use_reentrant": True}}
    made = converted(transformers.TrainingArguments(str(tmp_path), use_cpu=True, **given))
    assert (made.gradient_checkpointing, made.gradient_checkpointing_kwargs) == (True, {"use_reentrant": True})


def test_every_module_is_put_into_training_mode() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ModuleList())
    inner.register_module("nothing", None)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": inner})
    optimizer = torch.optim.SGD(model.parameters())
    for each in list(model.modules()):
        set_training(model, optimizer)
        assert all(module.training for module in model.modules())
        each.training = False
    set_training(model, optimizer)
    assert all(module.training for module in model.modules())
