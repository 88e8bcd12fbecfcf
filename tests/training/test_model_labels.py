"""Which inputs of a model are labels, and whether it predicts the first of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.loader import DataLoader
from stepmark.training.model_labels import known_shift, label_names, label_rule, names_num_items
from stepmark.training.weighted_loss import MicroBatchLoss, Weight
from tests.support.label_models import make
from tests.support.programs import VOCABULARY, tiny_model


class OwnLoss(nn.Module):
    """A custom model with a mean cross entropy, whose labels are shifted or aligned."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, VOCABULARY)
        self.shifted = shifted

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        hidden = self.norm(self.dropout(self.embedding(input_ids)).transpose(1, 2)).transpose(1, 2)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        kept, targets = (logits[:, :-1], labels[:, 1:]) if self.shifted else (logits, labels)
        return {"loss": F.cross_entropy(kept.reshape(-1, VOCABULARY), targets.reshape(-1)), "logits": logits}


def micro_batch(**labels: Any) -> Any:
    tokens = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": row, "labels": row.clone()} for row in tokens]
    for index, value in labels.items():
        samples[0]["labels"][int(index[1:])] = value
    return next(iter(DataLoader(samples, 2, shuffle=False)))[0]


@pytest.mark.parametrize("shifted", [True, False])
def test_the_call_of_the_first_batch_shows_the_shift_of_a_custom_model(shifted: bool) -> None:
    model = OwnLoss(shifted).train()
    loss = MicroBatchLoss(model)
    assert loss.labels.causal_shift is None
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert targets(loss, model, micro_batch()) == (8 if shifted else 10)
    assert loss.causal_shift is shifted
    assert targets(loss, model, micro_batch(_1=-100)) == (7 if shifted else 9)
    assert len(calls) == 1


def targets(loss: MicroBatchLoss, model: nn.Module, batch: Any) -> int:
    loss.call_first(model, batch.inputs)
    return loss.count(batch)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("guess", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_what_the_first_call_finds_is_what_every_other_call_finds(shifted: bool, guess: bool, smoothing: float) -> None:
    """Loss, gradients, statistics and random numbers, to the last bit."""
    found = []
    for knows in (True, False):
        model, batch = OwnLoss(shifted).train(), micro_batch()
        loss = MicroBatchLoss(model, label_smoothing=smoothing)
        loss.guess = guess
        if knows:
            loss.decide(shifted)
        torch.manual_seed(7)
        loss.call_first(model, batch.inputs)
        count = torch.tensor(float(loss.count(batch)))
        value, _ = loss(model, batch.inputs, Weight(count, count * 2))
        value.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([value, *gradients, *model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(known, seen) for known, seen in zip(*found, strict=True))


def mean(logits: Tensor, labels: Tensor, items: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def divided(logits: Tensor, labels: Tensor, items: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items


def divided_by_a_number(logits: Tensor, labels: Tensor, items: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items.item()


def by_hand(logits: Tensor, labels: Tensor, items: Tensor) -> Tensor:
    """In place, by a mask and a gather."""
    labels = labels.clone()
    kept = labels != -100
    labels[~kept] = 0
    losses = -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    losses.mul_(kept)
    return losses.sum() / kept.sum()


def by_selection(logits: Tensor, labels: Tensor, items: Tensor) -> Tensor:
    chosen = labels != -100
    assert chosen.any()
    return F.cross_entropy(logits[chosen], labels[chosen])


def from_an_empty_tensor(logits: Tensor, labels: Tensor, items: Tensor) -> Tensor:
    targets = torch.zeros(labels.shape, dtype=torch.long)
    targets[:, :] = labels
    return torch.nn.CrossEntropyLoss()(logits.transpose(1, 2), targets)


class Focal(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        context.save_for_backward(logits)
        return (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") ** 2).mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return torch.ones_like(context.saved_tensors[0]) * gradient, None


def of_a_function(logits: Tensor, labels: Tensor, items: Tensor) -> Tensor:
    return Focal.apply(logits, labels)


FUNCTIONS = [mean, divided, divided_by_a_number, by_hand, by_selection, from_an_empty_tensor, of_a_function]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_one_call_of_a_users_function_shows_its_targets(function: Any, shifted: bool, causal: bool) -> None:
    """Whatever the class says; the loss is what it is where that is known."""
    calls = []

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        calls.append(1)
        logits = outputs["logits"].contiguous()
        logits, labels = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
        return function(logits, labels, num_items_in_batch)

    model = tiny_model(dropout=0.0) if causal else OwnLoss(True).eval()
    batch = micro_batch(_1=-100)
    losses = []
    for knows in (False, True):
        loss = MicroBatchLoss(model, compute_loss_func=compute)
        if knows:
            loss.decide(shifted)
        assert targets(loss, model, batch) == (7 if shifted else 9)
        count = torch.tensor(float(loss.count(batch)))
        losses.append(loss(model, batch.inputs, Weight(count, count))[0])
    assert len(calls) == 2
    torch.testing.assert_close(losses[0], losses[1])


def test_a_model_whose_class_shows_the_shift_is_not_called_first() -> None:
    causal = tiny_model()
    causal.register_forward_hook(lambda *_: pytest.fail("called"))
    assert targets(MicroBatchLoss(causal), causal, micro_batch()) == 8


def test_a_model_that_fails_without_targets_is_never_asked_without() -> None:
    class Fails(OwnLoss):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
            assert labels is not None
            assert (labels != -100).any(), "no targets"
            return super().forward(input_ids, labels)

    model = Fails(False)
    assert targets(MicroBatchLoss(model), model, micro_batch()) == 10


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("GPT2LMHeadModel", True),
        ("LlamaForCausalLM", True),
        ("BertForTokenClassification", False),
        ("BertForMaskedLM", False),
        ("T5ForConditionalGeneration", False),
        ("BartForCausalLM", None),
        ("Qwen2AudioForConditionalGeneration", None),  # listed with encoder-decoders, but it shifts
        ("LlamaForSequenceClassification", False),
    ],
)
def test_shift_known_from_the_class(name: str, shift: bool | None) -> None:
    assert known_shift(make(name).model) is shift


def test_a_loss_that_ignores_its_labels_leaves_the_shift_to_the_class() -> None:
    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return outputs["logits"].square().mean()

    for model, expected in ((tiny_model(), 8), (make("BertForTokenClassification").model, 10)):
        assert targets(MicroBatchLoss(model, compute_loss_func=compute), model, micro_batch()) == expected


def test_label_names() -> None:
    assert label_names(make("BertForQuestionAnswering").model) == ("start_positions", "end_positions")
    assert label_names(make("BertForSequenceClassification").model) == ("labels",)
    assert label_names(nn.Linear(1, 1)) == ("labels",)


def test_rules_of_particular_tasks() -> None:
    assert label_rule(make("SegformerForSemanticSegmentation").model).ignored == 255
    assert label_rule(make("Wav2Vec2ForCTC").model).by_sample
    assert label_rule(nn.Linear(1, 1)) == LabelRule(causal_shift=False, skips_ignored=False)


@pytest.mark.parametrize(
    ("name", "options", "skips"),
    [
        ("GPT2LMHeadModel", {}, True),
        ("BertForSequenceClassification", {}, True),
        ("BertForSequenceClassification", {"num_labels": 1}, False),
        ("BertForSequenceClassification", {"problem_type": "regression"}, False),
        ("BertForTokenClassification", {}, True),
        ("ViTForImageClassification", {}, True),
        ("ResNetForImageClassification", {}, False),
        ("MixtralForCausalLM", {}, True),
        ("MixtralForCausalLM", {"output_router_logits": True}, False),
    ],
)
def test_what_leaves_out_rows_with_ignored_labels(name: str, options: dict[str, Any], skips: bool) -> None:
    model = make(name).model
    for option, value in options.items():
        setattr(model.config, option, value)
    assert label_rule(model).skips_ignored is skips


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in torch 2.13
def test_the_model_inside_a_wrapper_decides() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def get_base_model(self) -> nn.Module:
            return self.inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    assert label_rule(Wrapper(tiny_model())).causal_shift is True
    compiled = torch.compile(make("BertForQuestionAnswering").model)
    assert label_rule(compiled).names == ("start_positions", "end_positions")


def test_models_may_declare_that_they_divide_by_num_items() -> None:
    class Says(nn.Linear):
        accepts_loss_kwargs = True

    class Names(nn.Linear):
        def forward(self, input: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
            return super().forward(input)

    class Swallows(nn.Linear):
        def forward(self, input: Tensor, **_: Any) -> Tensor:
            return super().forward(input)

    assert names_num_items(Says(1, 1))
    assert names_num_items(Names(1, 1))
    assert not names_num_items(Swallows(1, 1))
    assert not names_num_items(tiny_model())
