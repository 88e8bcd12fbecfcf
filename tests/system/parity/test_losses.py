"""Training loss, eval_loss and gradients of transformers' model classes are the means over targets or samples that
their logits give by hand, at batch sizes 1, 2 and 5 with a ragged last one, and accumulation 1 and 4."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.label_models import classes_with_labels
from tests.support.loss_checks import verdict

OF_TORCH = ("LevitForImageClassification",)  # whose gradients differ with the batch in a loop by hand, in float64 too
FAMILIES = [
    "BertForMultipleChoice",
    "BertForQuestionAnswering",
    "BertForTokenClassification",
    "GPT2LMHeadModel",
    "MixtralForCausalLM",
    "SegformerForSemanticSegmentation",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "Wav2Vec2ForCTC",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_of_a_model_class(name: str) -> None:
    found = verdict(name)
    assert (found.outcome, found.why) == ("equal", "")


@pytest.mark.prove
def test_losses_of_every_model_class(record_property: Callable[[str, object], None]) -> None:
    verdicts = [verdict(name) for name in classes_with_labels() if name not in OF_TORCH]
    record_property("classes", sum(found.outcome == "equal" for found in verdicts))
    assert [f"{found.name}: {found.why}" for found in verdicts if found.outcome == "different"] == []
    assert sum(found.outcome == "equal" for found in verdicts) > 600
