"""The metrics of an evaluation: loss, perplexity, the user's metrics, speed."""

from __future__ import annotations

import inspect
import json
import logging
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stepmark.errors import MetricsError, UsageError
from stepmark.evaluation.evaluator import Evaluation, perplexity
from stepmark.evaluation.predictions import SampleRows

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
    there is a loss, but no input is recognized as a label, a warning says that it is skipped. It may return text, lists
    and mappings too, which are recorded but never compared. Raises MetricsError for other values.
    """
    unlabelled = evaluation.predictions is not None and evaluation.labels is None
    if compute_metrics is not None and unlabelled and evaluation.loss is not None:
        name = name_of(compute_metrics)
        logger.warning("%s is skipped: no model input is known to be a label; set label_names", name)
    if evaluation.samples and not evaluation.tokens:
        logger.warning("%s: no label is a target, so there is no loss: look at what masks or cuts the labels", prefix)
    found: dict[str, float] = {}
    if evaluation.loss is not None:
        found["loss"] = evaluation.loss
        if causal and evaluation.of_targets:
            found["perplexity"] = perplexity(evaluation.loss)
    if evaluation.computed is not None:
        found |= plain_values(evaluation.computed, f"compute_metrics ({name_of(compute_metrics)})")
    elif compute_metrics is not None and evaluation.predictions is not None and evaluation.labels is not None:
        from transformers.trainer_utils import EvalPrediction

        computed = compute_metrics(EvalPrediction(*evaluation.rows))
        found |= plain_values(computed, f"compute_metrics ({name_of(compute_metrics)})")
    found["runtime"] = evaluation.seconds
    found["samples_per_second"] = evaluation.samples / evaluation.seconds
    found["steps_per_second"] = evaluation.batches / evaluation.seconds
    return with_prefix(found, prefix)


def check_by_batch(compute_metrics: Callable[..., Any]) -> None:
    """Raises UsageError for a function that `batch_eval_metrics` cannot call."""
    parameters = inspect.signature(compute_metrics).parameters
    if "compute_result" not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
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
    values: dict[str, Any] = {}
    for name, value in found.items():
        number = _number(value)
        plain = value.tolist() if number is None and hasattr(value, "tolist") else value
        if not isinstance(name, str) or (number is None and (only_numbers or not _is_json(plain))):
            raise MetricsError(f"{source} returned {_shown(value)} for {name!r}; {remedy}")
        values[name] = plain if number is None else number
    return values


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return value is not None


def name_of(function: Any) -> str:
    """The name of a function in messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        count = value.numel() if hasattr(value, "numel") else value.size
        value = value.item() if count == 1 else value
    return value if isinstance(value, numbers.Real) else None  # type: ignore[return-value]


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str):
        return repr(value if value is None else value[:40])
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
