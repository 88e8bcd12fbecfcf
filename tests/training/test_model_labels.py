"""Which inputs of a model are labels, and whether it predicts the first of a row."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BartForCausalLM

from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.loader import DataLoader
from stepmark.errors import UsageError
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


def mean(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


class Declares(OwnLoss):
    causal_shift = True


def declaring(shift: bool) -> Any:
    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return mean(outputs, labels, num_items_in_batch)

    compute.causal_shift = shift  # type: ignore[attr-defined]
    return compute


@pytest.mark.parametrize(
    ("shift", "loss"),
    [
        (False, lambda: MicroBatchLoss(OwnLoss(True))),  # nothing says so
        (True, lambda: MicroBatchLoss(Declares(True))),
        (True, lambda: MicroBatchLoss(tiny_model())),
        (True, lambda: MicroBatchLoss(tiny_model(), compute_loss_func=mean)),  # as its model does
        (False, lambda: MicroBatchLoss(tiny_model(), compute_loss_func=declaring(False))),
        (True, lambda: MicroBatchLoss(Declares(True), compute_loss_func=mean)),
        (False, lambda: MicroBatchLoss(Declares(True), compute_loss_func=declaring(False))),
        (True, lambda: MicroBatchLoss(OwnLoss(True), compute_loss_func=declaring(False), declared_by=Declares)),
        (False, lambda: MicroBatchLoss(Declares(True), declared_by=Declares, causal_shift=False)),
        (True, lambda: MicroBatchLoss(torch.compile(Declares(True)))),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in torch 2.13
def test_the_field_comes_before_what_is_declared_and_that_before_the_class(shift: bool, loss: Any) -> None:
    assert loss().causal_shift is shift


def test_what_is_declared_is_true_or_false() -> None:
    with pytest.raises(UsageError, match="causal_shift: should be True or False, and is 'yes'"):
        MicroBatchLoss(OwnLoss(True), declared_by=SimpleNamespace(causal_shift="yes"))


def test_an_undeclared_shift_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, batch, one = OwnLoss(True), micro_batch(), torch.tensor(10.0)
    loss = MicroBatchLoss(model)
    assert loss.count(batch) == 10
    for _ in range(2):
        loss(model, batch.inputs, Weight(one, one))
    assert [each.getMessage() for each in caplog.records] == [
        "nothing says whether position t predicts label t + 1, so that the first label of a row is no target; set "
        "causal_shift to true or false"
    ]
    caplog.clear()
    told = MicroBatchLoss(model)
    assert told.weighting(batch).endswith("; set causal_shift to true or false")
    told(model, batch.inputs, Weight(one, one))
    assert not caplog.records


@pytest.mark.parametrize("labels", [torch.tensor([1, 2]), torch.tensor([[1], [2]]), torch.rand(2, 3)])
def test_labels_of_one_position_need_no_declaration(labels: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    class Classifies(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x).mean(), "logits": super().forward(x)}

    model, one = Classifies(3, 3), torch.tensor(1.0)
    MicroBatchLoss(model)(model, {"x": torch.ones(2, 3), "labels": labels}, Weight(one, one))
    assert not caplog.records


def test_labels_are_not_smoothed_before_their_shift_is_declared() -> None:
    model, batch, one = OwnLoss(True), micro_batch(), torch.tensor(10.0)
    model.register_forward_hook(lambda *_: pytest.fail("called"))
    loss = MicroBatchLoss(model, label_smoothing=0.1)
    assert loss.weighting(batch)  # as a run says before its first step
    with pytest.raises(UsageError, match="label_smoothing_factor: nothing says .*; set causal_shift to true or false"):
        loss(model, batch.inputs, Weight(one, one))


class Kept(BartForCausalLM):
    """Of a class that only the table has."""


class Passing(BartForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Replaced(BartForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return self.model(input_ids=input_ids)


def test_a_subclass_has_the_shift_of_its_base_unless_it_replaces_forward() -> None:
    config = make("BartForCausalLM").model.config
    assert known_shift(Kept(config)) is False
    assert known_shift(Passing(config)) is False
    assert known_shift(Replaced(config)) is None


def test_the_type_of_a_loss_says_whether_it_shifts() -> None:
    class Own(nn.Module):
        def __init__(self, loss_type: str) -> None:
            super().__init__()
            self.loss_type = loss_type

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return labels

    found = [known_shift(Own(name)) for name in ("ForCausalLM", "ForTokenClassification", "Other")]
    assert found == [True, False, None]


def test_a_loss_of_the_users_needs_no_hash() -> None:
    @dataclass
    class Focal:
        power: float = 2.0

        def __call__(self, logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
            return logits.sum()

    model = make("LlamaForCausalLM").model
    model.loss_function = Focal()
    assert known_shift(model) is True


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("GPT2LMHeadModel", True),
        ("LlamaForCausalLM", True),
        ("BertForTokenClassification", False),
        ("BertForMaskedLM", False),
        ("T5ForConditionalGeneration", False),
        ("BartForCausalLM", False),
        ("Qwen2AudioForConditionalGeneration", True),  # listed with encoder-decoders, but it shifts
        ("LlamaForSequenceClassification", False),
    ],
)
def test_shift_known_from_the_class(name: str, shift: bool | None) -> None:
    assert known_shift(make(name).model) is shift


def test_label_names() -> None:
    assert label_names(make("BertForQuestionAnswering").model) == ("start_positions", "end_positions")
    assert label_names(make("BertForSequenceClassification").model) == ("labels",)
    assert label_names(nn.Linear(1, 1)) == ()


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
