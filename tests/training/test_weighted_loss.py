"""The loss of a step: a mean over its target tokens, however they are spread over micro-batches and ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepmark.data.loader.loader import DataLoader
from stepmark.errors import UsageError
from stepmark.runtime.mesh import Mesh
from stepmark.training.optimizer import wrap_optimizer
from stepmark.training.step import TrainStep
from stepmark.training.weighted_loss import MicroBatchLoss, Weight, smoothed_cross_entropy
from tests.support.label_models import batch_of, make, mean_by_hand
from tests.support.programs import VOCABULARY, tiny_model
from tests.training.test_model_labels import OwnLoss

# Micro-batches with few and many target tokens: a mean of their means would be far from the mean over tokens.
SHAPES = [(1, 4), (2, 16), (3, 9)]


def micro_batches(seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rows, length in SHAPES:
        tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        labels = tokens.clone()
        labels[-1, length // 2 :] = -100
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def shifted_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def step_loss(loss: MicroBatchLoss, model: nn.Module, batches: list[dict[str, Tensor]], counts: list[int]) -> Tensor:
    total = torch.tensor(max(float(sum(counts)), 1.0))
    shares = [
        loss(model, batch, Weight(torch.tensor(float(count)), total))[0]
        for batch, count in zip(batches, counts, strict=True)
    ]
    return torch.stack(shares).sum()


def mean_over_tokens(model: nn.Module, batches: list[dict[str, Tensor]], smoothing: float = 0.0) -> Tensor:
    """Computed by hand: the mean of all tokens' losses."""
    losses = []
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1].reshape(-1, VOCABULARY)
        labels = batch["labels"][:, 1:].reshape(-1)
        kept = labels != -100
        losses.append(F.cross_entropy(logits[kept], labels[kept], reduction="none", label_smoothing=smoothing))
    return torch.cat(losses).mean()


class OwnMean(nn.Module):
    """A plain torch module, whose loss is the mean over its micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model(dropout=0.0).eval()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.inner(input_ids).logits
        if labels is None:
            return {"logits": logits}
        flat, targets = logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
        losses = F.cross_entropy(flat, targets.clamp(min=0), reduction="none")
        counts = (targets != -100).float()
        return {"loss": (losses * counts).sum() / counts.sum(), "logits": logits}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model(dropout=0.0).eval()


def test_the_loss_is_the_mean_over_tokens(model: nn.Module) -> None:
    """Of a model of transformers, and of one whose mean over a micro-batch is weighted by its tokens."""
    batches = micro_batches()
    counts = [shifted_targets(batch) for batch in batches]
    own = OwnMean()
    for each, plain in ((model, model), (own, own.inner)):
        found = step_loss(MicroBatchLoss(each), each, batches, counts)
        torch.testing.assert_close(found, mean_over_tokens(plain, batches))


def test_a_micro_batch_without_targets_adds_nothing_and_gives_no_nan() -> None:
    for model in (OwnMean(), tiny_model(dropout=0.0).eval()):
        batches = micro_batches()[:2]
        batches[1]["labels"][:] = -100
        counts = [shifted_targets(batch) for batch in batches]
        assert counts[1] == 0
        alone = gradients(model, batches[:1], counts[:1])
        together = gradients(model, batches, counts)
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
        nothing = gradients(model, batches[1:], counts[1:])
        assert not any(gradient.any() for gradient in nothing)


def gradients(model: nn.Module, batches: list[dict[str, Tensor]], counts: list[int]) -> list[Tensor]:
    """The step's loss, and after it all parameters' gradients."""
    model.zero_grad()
    loss = step_loss(MicroBatchLoss(model), model, batches, counts)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_is_that_of_torch_over_all_tokens(model: nn.Module, smoothing: float) -> None:
    batches = micro_batches()
    counts = [shifted_targets(batch) for batch in batches]
    found = step_loss(MicroBatchLoss(model, label_smoothing=smoothing), model, batches, counts)
    torch.testing.assert_close(found, mean_over_tokens(model, batches, smoothing))


def test_label_smoothing_is_that_of_transformers(model: nn.Module) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    (batch,) = micro_batches()[1:2]
    outputs = model(input_ids=batch["input_ids"])
    theirs = LabelSmoother(0.2)(outputs, batch["labels"], shift_labels=True)
    ours = smoothed_cross_entropy(outputs.logits, batch["labels"], 0.2, causal_shift=True) / shifted_targets(batch)
    torch.testing.assert_close(ours, theirs)


def test_several_labels_of_a_sample_are_not_smoothed(model: nn.Module) -> None:
    """As in transformers."""
    several = copy.deepcopy(model)
    several.config.problem_type = "multi_label_classification"  # type: ignore[union-attr, assignment]
    with pytest.warns(UserWarning, match="Label smoothing is not compatible with multi-label classification"):
        assert MicroBatchLoss(several, label_smoothing=0.1).smoothing == 0
    assert MicroBatchLoss(model, label_smoothing=0.1).smoothing == 0.1


def test_label_smoothing_is_of_labels_that_a_collator_has_shifted(model: nn.Module) -> None:
    """Which leaves out more of them, as between packed sequences."""
    (batch,) = [each for each in micro_batches() if each["labels"].shape == SHAPES[1]]
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].clone()
    shifted[:, 5] = -100
    given, count = {**batch, "shift_labels": shifted}, torch.tensor(float((shifted != -100).sum()))
    found, _ = MicroBatchLoss(model, label_smoothing=0.1)(model, given, Weight(count, count))
    logits = model(batch["input_ids"]).logits
    torch.testing.assert_close(found, F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), label_smoothing=0.1))


def test_label_smoothing_without_shift_for_classes() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 2, -100, 1, 1])
    found = smoothed_cross_entropy(logits.bfloat16(), labels, 0.1, causal_shift=False)
    assert found.dtype == torch.float32
    kept = labels != -100
    expected = F.cross_entropy(logits.bfloat16().float()[kept], labels[kept], reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(found, expected)


def test_the_users_function_gets_outputs_labels_and_the_number_of_targets(model: nn.Module) -> None:
    batches = micro_batches()
    counts = [shifted_targets(batch) for batch in batches]
    seen: list[float] = []

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        seen.append(num_items_in_batch.item())
        assert "loss" not in outputs
        flat = outputs.logits[:, :-1].reshape(-1, VOCABULARY)
        return F.cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch

    loss = MicroBatchLoss(model, compute_loss_func=compute, label_smoothing=0.3)  # the function wins over smoothing
    found = step_loss(loss, model, batches, counts)
    torch.testing.assert_close(found, mean_over_tokens(model, batches))
    assert seen == [float(count) for count in counts]
    assert all("labels" in batch for batch in batches)


def test_a_users_function_without_labels_uses_the_models_outputs() -> None:
    """For start and end positions, as in transformers: labels are None."""
    case = make("BertForQuestionAnswering")

    def compute(outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor) -> Tensor:
        assert labels is None
        return outputs.loss

    assert train(case.model, case.samples, compute) == pytest.approx(mean_by_hand(case).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GPT2LMHeadModel", "peft"),
        ("BertForTokenClassification", "peft"),
        ("T5ForConditionalGeneration", "peft"),
        ("BertForTokenClassification", "compiled"),
        pytest.param("GPT2LMHeadModel", "compiled", marks=pytest.mark.prove),
        pytest.param("T5ForConditionalGeneration", "compiled", marks=pytest.mark.prove),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of peft and torch.compile
def test_wrapped_models(name: str, kind: str) -> None:
    case = make(name)
    expected = mean_by_hand(case).item()
    if kind == "peft":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(case.model, peft.LoraConfig(r=2)).eval()  # its adapters begin at zero
    else:
        model = torch.compile(case.model, backend="eager")
    assert train(model, case.samples) == pytest.approx(expected, rel=1e-5)
    smoothed = train(model, case.samples, label_smoothing=1e-9)
    assert smoothed == pytest.approx(expected, rel=1e-5)


def test_outputs_come_with_the_loss(model: nn.Module) -> None:
    (batch,) = micro_batches()[:1]
    one = torch.tensor(1.0)
    for loss in (MicroBatchLoss(model), MicroBatchLoss(model, label_smoothing=0.1)):
        outputs = loss(model, batch, Weight(one, one))[1]
        assert outputs.logits.shape == (1, 4, VOCABULARY)
        assert outputs.past_key_values is None  # generation's cache is not kept


class ManyOutputs(nn.Module):
    """A classifier that returns a tuple, its loss first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.linear(features)
        return (logits, features) if labels is None else (F.cross_entropy(logits, labels), logits, features)


def classes(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"features": torch.randn(rows, 4, generator=generator), "labels": torch.arange(rows) % 3}


def test_a_model_that_returns_a_tuple_has_its_loss_first() -> None:
    model, inputs = ManyOutputs(), classes(5)
    weight = Weight(torch.tensor(5.0), torch.tensor(10.0))
    loss, outputs = MicroBatchLoss(model)(model, inputs, weight)
    torch.testing.assert_close(loss, F.cross_entropy(model.linear(inputs["features"]), inputs["labels"]) / 2)
    assert [output.shape for output in outputs] == [(5, 3), (5, 4)]
    smoothed, outputs = MicroBatchLoss(model, label_smoothing=0.1)(model, inputs, weight)
    expected = F.cross_entropy(model.linear(inputs["features"]), inputs["labels"], label_smoothing=0.1)
    torch.testing.assert_close(smoothed, expected / 2)
    assert [output.shape for output in outputs] == [(5, 3), (5, 4)]


def test_a_model_without_a_loss_is_named() -> None:
    class WithoutLoss(nn.Module):
        def forward(self, features: Tensor) -> dict[str, Tensor]:
            return {"logits": features}

    one = torch.tensor(1.0)
    with pytest.raises(UsageError, match=r"returned no loss \(its outputs: logits\); pass labels under the names"):
        MicroBatchLoss(WithoutLoss())(WithoutLoss(), {"features": torch.ones(1)}, Weight(one, one))


def test_a_loss_of_several_elements_is_refused() -> None:
    class PredictionsFirst(nn.Module):
        def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return features, F.mse_loss(features, labels)

    model, one = PredictionsFirst(), torch.tensor(1.0)
    with pytest.raises(UsageError, match=r"shape \[3, 2\]"):
        MicroBatchLoss(model)(model, {"features": torch.ones(3, 2), "labels": torch.ones(3, 2)}, Weight(one, one))


class Logits(nn.Module):
    """A language model that computes no loss: its forward has no labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.embedding(input_ids))}


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("way", ["mean", "sum"])
@pytest.mark.parametrize("make_model", [Logits, lambda: tiny_model(dropout=0.0).eval()], ids=["logits", "gpt2"])
def test_a_users_function_is_weighted_by_the_targets_that_it_counts(
    make_model: Callable[[], nn.Module], way: str, shifted: bool
) -> None:
    def losses(outputs: Any, labels: Tensor, reduction: str) -> Tensor:
        logits, targets = (outputs["logits"][:, :-1], labels[:, 1:]) if shifted else (outputs["logits"], labels)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return losses(outputs, labels, "mean") if way == "mean" else losses(outputs, labels, "sum") / num_items_in_batch

    compute.causal_shift = shifted  # type: ignore[attr-defined]
    model = make_model()
    samples, joined = seven_samples()
    found = train(model, samples, compute)
    expected = losses(model(joined["input_ids"]), joined["labels"], "mean")
    assert found == pytest.approx(expected.item(), rel=1e-6)


def seven_samples() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Samples with different numbers of targets, and all of them as one batch."""
    joined = {name: torch.cat([batch[name] for batch in padded()]) for name in ("input_ids", "labels")}
    joined = {name: torch.cat([rows, rows[:1]]) for name, rows in joined.items()}
    return [{name: rows[index] for name, rows in joined.items()} for index in range(7)], joined


def train(
    model: nn.Module, samples: list[dict[str, Tensor]], compute: Any = None, label_smoothing: float = 0.0
) -> float:
    """The loss of one step over all samples, in four micro-batches of which the last is ragged."""
    mesh = Mesh.create(device="cpu")
    loss = MicroBatchLoss(model, compute_loss_func=compute, label_smoothing=label_smoothing)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = wrap_optimizer(torch.optim.SGD([each for each in names if each.requires_grad], lr=0.0), names, mesh)
    step = TrainStep(model, optimizer, loss, mesh, accumulation=4)
    (batch,) = DataLoader(samples, 2, accumulation=4, shuffle=False, labels=loss.labels)
    return float(step(0, batch).values[0])


class SummedLoss(Logits):
    """Divides the sum of its losses by the number that it is given."""

    causal_shift = True

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids)["logits"]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": loss / num_items_in_batch, "logits": logits}


class MeanLoss(Logits):
    """A mean, and arbitrary keyword arguments."""

    causal_shift = True

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids)["logits"]
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


@pytest.mark.parametrize("make_model", [SummedLoss, MeanLoss])
def test_plain_modules_may_sum_or_average(make_model: Callable[[], nn.Module]) -> None:
    model = make_model()
    samples, joined = seven_samples()
    logits = Logits.forward(model, joined["input_ids"])["logits"][:, :-1]  # type: ignore[arg-type]
    expected = F.cross_entropy(logits.flatten(0, 1), joined["labels"][:, 1:].flatten())
    assert train(model, samples) == pytest.approx(expected.item(), rel=1e-5)


def plain_mean(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], labels)


def mean_that_ignores_more_labels(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """nan where no label is left, even if the micro-batch was given one."""
    return F.cross_entropy(outputs[0], labels, reduction="none")[labels > 1].mean()


@pytest.mark.parametrize("compute", [plain_mean, mean_that_ignores_more_labels])
def test_the_users_mean_of_a_micro_batch_without_targets_gives_no_nan(compute: Callable[..., Tensor]) -> None:
    model, inputs = ManyOutputs(), classes(2)
    inputs["labels"][:] = -100
    loss = step_loss(MicroBatchLoss(model, compute_loss_func=compute), model, [inputs], [0])
    loss.backward()
    assert loss == 0
    assert model.linear.weight.grad is not None
    assert not model.linear.weight.grad.any()


@pytest.mark.parametrize("shifted", [True, False])
def test_smoothing_shifts_labels_if_the_models_own_loss_does(shifted: bool) -> None:
    model = OwnLoss(shifted).eval()
    tokens = torch.randint(0, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "labels": tokens}
    count = torch.tensor(15.0 if shifted else 18.0)
    loss = MicroBatchLoss(model, label_smoothing=0.2, causal_shift=shifted)
    found, _ = loss(model, inputs, Weight(count, count))
    logits = model(tokens)["logits"]
    kept, targets = (logits[:, :-1], tokens[:, 1:]) if shifted else (logits, tokens)
    expected = F.cross_entropy(kept.flatten(0, 1), targets.flatten(), label_smoothing=0.2)
    torch.testing.assert_close(found, expected)


def test_labels_of_independent_classes_are_smoothed_towards_one_half() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=generator)
    labels = torch.randint(0, 2, (5, 3), generator=generator).float()
    by_hand = [
        -(0.9 * y + 0.05) * F.logsigmoid(x) - (0.95 - 0.9 * y) * F.logsigmoid(-x)
        for x, y in zip(logits.flatten(), labels.flatten(), strict=True)
    ]
    found = smoothed_cross_entropy(logits, labels, 0.1, causal_shift=False)
    torch.testing.assert_close(found / 5, torch.stack(by_hand).mean())


def test_smoothing_a_regression_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"label_smoothing_factor: .*set it to 0 for a regression"):
        smoothed_cross_entropy(torch.zeros(4, 1), torch.zeros(4), 0.1, causal_shift=False)


def test_models_without_an_argument_labels_are_not_smoothed() -> None:
    case = make("BertForQuestionAnswering")
    inputs, one = batch_of(case.samples), torch.tensor(1.0)
    found, _ = MicroBatchLoss(case.model, label_smoothing=0.2)(case.model, inputs, Weight(one, one))
    torch.testing.assert_close(found, case.model(**inputs).loss)


@pytest.mark.parametrize("accepts", [False, True])
def test_gradients_of_a_step_do_not_depend_on_its_micro_batches(accepts: bool) -> None:
    model = tiny_model(dropout=0.0).eval() if accepts else OwnMean()
    joined = {name: torch.cat([each[name] for each in padded()]) for name in ("input_ids", "labels")}
    ways = [gradients(model, batches, [shifted_targets(each) for each in batches]) for batches in ([joined], padded())]
    for at_once, divided in zip(*ways, strict=True):
        torch.testing.assert_close(at_once, divided, rtol=1e-4, atol=1e-6)


def padded() -> list[dict[str, Tensor]]:
    """The micro-batches at one length, so that they can be joined."""
    width = max(length for _, length in SHAPES)
    return [
        {
            "input_ids": F.pad(batch["input_ids"], (0, width - batch["input_ids"].shape[1])),
            "labels": F.pad(batch["labels"], (0, width - batch["labels"].shape[1]), value=-100),
        }
        for batch in micro_batches()
    ]
