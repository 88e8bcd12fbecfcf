"""The metrics of an evaluation: loss, perplexity, the user's metrics, speed."""

from __future__ import annotations

import json
import logging
import numbers
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stepmark.errors import MetricsError, UsageError
from stepmark.evaluation.evaluator import Evaluation, perplexity
from stepmark.evaluation.predictions import SampleRows
from stepmark.training.model_labels import accepts

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalPrediction

logger = logging.getLogger("stepmark")

ComputeMetrics = Callable[["EvalPrediction"], Mapping[str, Any]]


def summarize(
    evaluation: Evaluation, prefix: str, *, causal: bool, compute_metrics: ComputeMetrics | None = None
) -> dict[str, float]:
    """All numbers of an evaluation, under names that begin with `prefix` and "_".

    `causal`: the model is a causal language model, so perplexity is reported where labels were counted.
    `compute_metrics` is called where predictions were gathered and the dataset has labels, as in transformers; where
    there is a loss, but no input is a label or no output a prediction, a warning says that it is skipped. It may return
    text, lists and mappings too, which are recorded but never compared. Raises MetricsError for other values.
    """
    predicted, labelled = evaluation.rows.predictions is not None, evaluation.rows.labels is not None
    if compute_metrics is not None and predicted != labelled and evaluation.loss is not None:
        lacks = "no model input is known to be a label; set label_names"
        lacks = lacks if predicted else "no output is a prediction; look at what the model returns, and at ignore_keys"
        logger.warning("%s is skipped: %s", name_of(compute_metrics), lacks)
    if evaluation.samples and not evaluation.tokens:
        logger.warning("%s: no label is a target, so there is no loss: look at what masks or cuts the labels", prefix)
    found: dict[str, float] = {}
    if evaluation.loss is not None:
        found["loss"] = evaluation.loss
        if causal and evaluation.of_targets:
            found["perplexity"] = perplexity(evaluation.loss)
    if evaluation.computed is not None:
        found |= plain_values(evaluation.computed, f"compute_metrics ({name_of(compute_metrics)})")
    elif compute_metrics is not None and predicted and labelled:
        from transformers.trainer_utils import EvalPrediction

        computed = compute_metrics(EvalPrediction(*evaluation.rows))
        found |= plain_values(computed, f"compute_metrics ({name_of(compute_metrics)})")
    found["runtime"] = seconds = time.perf_counter() - evaluation.began  # that of `compute_metrics` too
    found["samples_per_second"] = evaluation.samples / seconds
    found["steps_per_second"] = evaluation.batches / seconds
    return with_prefix(found, prefix)


def check_by_batch(compute_metrics: Callable[..., Any]) -> None:
    """Raises UsageError for a function that `batch_eval_metrics` cannot call."""
    if not accepts(compute_metrics, "compute_result"):
        raise UsageError(
            f"batch_eval_metrics: {name_of(compute_metrics)} has no argument compute_result, true for the last batch "
            "alone; add it"
        )


def by_batch(compute_metrics: Callable[..., Any]) -> Callable[[SampleRows, bool], Any]:
    """Calls `compute_metrics(prediction, compute_result=…)` with each batch's tensors, as `batch_eval_metrics` asks;
    the result is None for all but the last."""
    from transformers.trainer_utils import EvalPrediction

    def compute(rows: SampleRows, last: bool) -> Any:
        if rows.predictions is None or rows.labels is None:
            return None
        found = compute_metrics(EvalPrediction(*rows.as_tensors()), compute_result=last)
        return found if last else None

    return compute


def with_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Puts `prefix` and "_" before every name that does not begin with them."""
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}


def plain_values(found: Any, source: str, *, only_numbers: bool = False) -> dict[str, Any]:
    """The result of a user's function as Python numbers, or with `only_numbers` unset as any values that JSON can hold.
    Scalars of numpy and torch are converted; arrays become lists.

    Raises MetricsError, which begins with `source` and names the metric, for anything else.
    """
    remedy = f"it has to return a dict of names and numbers{'' if only_numbers else ', text, lists or dicts'}"
    if not isinstance(found, Mapping):
        raise MetricsError(f"{source} returned {_shown(found)}; {remedy}")
    values: dict[str, Any] = _plain(found)
    for name, value in values.items():
        fits = isinstance(value, numbers.Real) if only_numbers else _is_json(value)
        if not isinstance(name, str) or not fits:
            raise MetricsError(f"{source} returned {_shown(found[name])} for {name!r}; {remedy}")
    return values


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers and their arrays as lists, also inside of lists and mappings."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        count = value.numel() if hasattr(value, "numel") else value.size
        return value.item() if count == 1 else value.tolist()
    return value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return value is not None


def name_of(function: Any) -> str:
    """The name of a function in messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str):
        return repr(value if value is None else value[:40])
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
