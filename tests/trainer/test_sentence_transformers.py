"""sentence-transformers' trainers on Stepmark's Trainer, against the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepmark.errors import UsageError
from tests.support.ranks import Ranks

library = pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.prove]

from stepmark.trainer.library_trainers import _contradictions_of_sentence_transformers as contradictions  # noqa: E402
from stepmark.trainer.training_arguments import TrainingArguments  # noqa: E402
from tests.support.sentence_programs import KINDS, evaluated, make, reranker, trained  # noqa: E402
from tests.support.trl_programs import logs  # noqa: E402

TRAINED = "tests.support.sentence_programs:trained"


def losses(found: list[dict[str, float]]) -> list[float]:
    return [value for log in found for value in (log["loss"], log["grad_norm"], log["learning_rate"])]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    plain, ours = make(kind, tmp_path / "plain", plain=True), make(kind, tmp_path / "ours")
    assert isinstance(ours, type(plain))
    assert isinstance(ours.args, type(plain.args))
    plain.train()
    ours.train()
    assert len(logs(ours)) == 20
    assert losses(logs(ours)) == pytest.approx(losses(logs(plain)), rel=1e-6)
    assert logs(ours)[-1]["loss"] != logs(ours)[0]["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    """Logs are means of three steps, so that the kill is in the middle of one; there are six steps to an epoch."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3, "max_steps": 9}
    options |= {"async_save": True, "rows": 24 if kind != "several" else 12}
    killed = ranks.run(TRAINED, kind, str(tmp_path / "killed"), {**options, "kill_at": 5}, nproc=1)
    assert killed.codes == [-9]
    resumed = trained(kind, str(tmp_path / "killed"), {**options, "resume": True})
    complete = trained(kind, str(tmp_path / "complete"), options)
    for log in (*resumed, *complete):
        log.pop("tokens_per_second", None)
    assert resumed == complete


@pytest.mark.parametrize("options", [{}, {"zero_1": True}])
@pytest.mark.parametrize("kind", [*KINDS, "gathered"])
def test_two_ranks_have_the_losses_of_the_library(
    tmp_path: Path, ranks: Ranks, kind: str, options: dict[str, Any]
) -> None:
    expected = ranks.run(TRAINED, kind, str(tmp_path / "plain"), {"plain": True}, nproc=2).check()[0]
    for found in ranks.run(TRAINED, kind, str(tmp_path / "ours"), options, nproc=2).check():
        assert losses(found) == pytest.approx(losses(expected), rel=1e-5)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def test_evaluators_choose_the_best_model(tmp_path: Path) -> None:
    """Each set has a loss, and the first one the evaluator's metrics; saved models are the library's."""
    options = {**EVALUATED, "load_best_model_at_end": True, "metric_for_best_model": "eval_held_spearman_cosine"}
    options["greater_is_better"] = False
    plain, ours = (
        evaluated("several", str(tmp_path / str(plain)), {**options, "plain": plain, "eval_rows": 8})
        for plain in (True, False)
    )
    same_metrics(ours[0], plain[0])
    assert len(ours[0]) == 6
    assert np.allclose(ours[1], plain[1], atol=1e-5)
    assert np.array_equal(ours[1], ours[2])  # the best model
    assert not np.array_equal(ours[1], ours[3])  # the last one, which the last checkpoint has
    assert np.allclose(ours[3], plain[3], atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"zero_1": True}])
def test_two_ranks_evaluate_like_the_library(tmp_path: Path, ranks: Ranks, options: dict[str, Any]) -> None:
    program = "tests.support.sentence_programs:evaluated"
    plain = ranks.run(program, "ranking", str(tmp_path / "plain"), {**EVALUATED, "plain": True}, nproc=2).check()[0]
    for found in ranks.run(program, "ranking", str(tmp_path / "ours"), {**EVALUATED, **options}, nproc=2).check():
        same_metrics(found[0], plain[0])
        assert np.allclose(found[1], plain[1], atol=1e-4)
        assert all(np.array_equal(each, found[1]) for each in found[2:])


def same_metrics(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [log["step"] for log in found] == [log["step"] for log in expected]
    for mine, theirs in zip(found, expected, strict=True):
        names = {name for name in theirs if not name.endswith(("runtime", "per_second"))}
        assert "eval_held_spearman_cosine" in names or "eval_scored_loss" in names
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


class TwoParts(torch.nn.Module):
    """A loss with parts."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any, labels: Any) -> dict[str, torch.Tensor]:
        first, second = (self.model(each)["sentence_embedding"] for each in features)
        return {"distance": (first - second).square().mean(), "size": first.square().mean()}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"learning_rate_mapping": {"0": 1e-3}}, "learning_rate_mapping"),
        ({"fsdp": True}, "fsdp"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        (
            {"loss": lambda model: library.sentence_transformer.losses.SoftmaxLoss(model, 8, 3)},
            "SoftmaxLoss.classifier",
        ),
        ({"model_init": lambda: None}, "model_init"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make("ranking", tmp_path, **options)


def test_lazy_devices_are_refused() -> None:
    (message,) = contradictions(TrainingArguments(), "Own", {}, lazy=True)
    assert message.startswith("device: Own makes batches of many shapes")


def test_a_loss_with_parts_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The mean of its parts is logged, over the steps before the resumption too; once of three steps in one epoch."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3, "max_steps": 9}
    complete = make("ranking", tmp_path, loss=TwoParts, **options)
    complete.train()
    resumed = make("ranking", tmp_path, loss=TwoParts, **{**options, "output_dir": str(tmp_path / "resumed")})
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    found, expected = ([log for log in logs(each) if log["step"] > 3] for each in (resumed, complete))
    assert [log["distance"] for log in found] == [log["distance"] for log in expected]
    assert [log["loss"] for log in found] == [log["loss"] for log in expected]
    for log in expected:
        assert log["distance"] + log["size"] == pytest.approx(log["loss"], abs=1e-3)


PAIR = ("w1 w2", "w3")


@pytest.mark.parametrize("kind", ["embeddings", "reranker"])
def test_an_adapter_is_saved_loaded_and_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    def train(name: str, resume: str | None = None) -> tuple[Any, Any]:
        options: dict[str, Any] = {"output_dir": str(tmp_path / name), "max_steps": 6, "save_steps": 3}
        if kind == "reranker":
            trainer = reranker(tmp_path, **options)
        else:
            trainer = make("ranking", tmp_path, lora=True, save_strategy="steps", **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, answer(trainer.model)

    def answer(model: Any) -> Any:
        return model.predict([PAIR]) if kind == "reranker" else model.encode(list(PAIR))

    trainer, expected = train("whole")
    trainer.save_model(str(tmp_path / "final"))
    load: Any = library.CrossEncoder if kind == "reranker" else library.SentenceTransformer
    for folder in (tmp_path / "final", tmp_path / "whole" / "checkpoint-6"):
        assert np.allclose(answer(load(str(folder), device="cpu")), expected, atol=1e-6)
    assert np.array_equal(train("resumed", str(tmp_path / "whole" / "checkpoint-3"))[1], expected)
