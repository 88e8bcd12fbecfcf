"""Evaluating and predicting with a Trainer: transformers' methods and their conventions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from stepmark.data.loader.stream_loader import check_readable_again
from stepmark.errors import DataError, PeerFailed, UsageError
from stepmark.evaluation.evaluator import Evaluation, Evaluator
from stepmark.evaluation.metrics import by_batch, summarize
from stepmark.evaluation.prompt_samples import PromptSampler
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.trainer.compat.evaluation_sets import evaluation_sets, logged_evaluation
from stepmark.trainer.interruption.pausable_evaluation import PausableEvaluation
from stepmark.trainer.results import EvalLoopOutput, PredictionOutput
from stepmark.training.pipelined_forward import PipelinedForward

logger = logging.getLogger("stepmark")

SHOWN = 100  # characters of a sample on the terminal


class EvaluationMethods:
    """`evaluate`, `predict` and what a subclass overrides of them; all are collective."""

    args: Any
    model: nn.Module
    context: Any
    mesh: Any
    loss: Any
    state: Any
    eval_dataset: Any
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    get_eval_dataloader: Any
    get_test_dataloader: Any
    _autocast_dtype: Any
    _callbacks: Any
    _loaders: Any
    _overridden: Callable[[str], bool]
    _pausable: PausableEvaluation | None
    processing_class: Any
    _memory_tracker: Any

    @property
    def evaluator(self) -> Evaluator:
        """Evaluates with the loss and the functions that the Trainer has now."""
        return Evaluator(
            self.model,
            self.loss,
            self.context.runtime,
            self.context.host,
            self._autocast_dtype,
            self.preprocess_logits_for_metrics,
            reporting=self.mesh.reporting_ranks,
            prediction_step=self._overridden_step if self._overridden("prediction_step") else None,
            stages=self._pipelined_forward(),
        )

    def _pipelined_forward(self) -> PipelinedForward | None:
        """Runs evaluations where the model is cut into stages."""
        if staged(self.model) is None:
            return None
        return PipelinedForward(self.model, self.loss, self.mesh, self._autocast_dtype)

    def evaluate(
        self,
        eval_dataset: str | Dataset | Mapping[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Computes loss and metrics over exactly the samples of a dataset. Collective.

        A subclass may override it; evaluations in training are made by it too. Several datasets are evaluated by a call
        for each.

        Args:
            eval_dataset: The data, or several datasets by name, or the name of one of the Trainer's sets; default: the
                Trainer's own.
            ignore_keys: Outputs of the model that are not predictions, besides the loss and caches. Default: those that
                its configuration names.
            metric_key_prefix: What the metrics' names begin with; the names of several datasets are appended to it.

        Returns:
            The metrics by name; runtimes are in seconds.

        Raises:
            UsageError: There is no evaluation data.
            DataError: A dataset is empty.
        """
        self._memory_tracker.start()
        if not isinstance(eval_dataset, str):
            self._eval_sets(eval_dataset)  # raises where there is no data
        own = eval_dataset is None
        data = self.eval_dataset if own else eval_dataset
        if isinstance(data, Mapping):
            metrics: dict[str, float] = {}
            for name, dataset in data.items():
                metrics |= self.evaluate(
                    eval_dataset=name if own else dataset,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=f"{metric_key_prefix}_{name}",
                )
        else:
            metrics = self._evaluate_set(eval_dataset, ignore_keys, metric_key_prefix)
        self._memory_tracker.stop_and_update_metrics(metrics)
        if own and metric_key_prefix == "eval":
            self._callbacks.last_evaluation = (self._callbacks.model_position()[0], metrics)
        return metrics

    def _evaluate_own_data(self, evaluation: PausableEvaluation) -> dict[str, float]:
        """An evaluation in training, which a signal may stop."""
        self._pausable = evaluation
        try:
            metrics = self.evaluate()
        finally:
            self._pausable = None
        self._callbacks.last_evaluation = (self.state.global_step, metrics)
        self._record_samples()
        return metrics

    @cached_property
    def prompt_sampler(self) -> PromptSampler | None:
        """Continues `sample_prompts`; None without any. Raises UsageError where it cannot."""
        prompts, config = _listed(self.args.sample_prompts), getattr(self.model, "config", None)
        if prompts and getattr(config, "is_encoder_decoder", False):
            raise UsageError(
                f"sample_prompts: {type(self.model).__name__} is an encoder-decoder, which continues no text; leave "
                "them out, or use Seq2SeqTrainer with predict_with_generate"
            )
        positions = getattr(config, "max_position_embeddings", None)
        return PromptSampler(self.processing_class, prompts, self.args.sample_tokens, positions) if prompts else None

    def sample_texts(self) -> list[str]:
        """What the model writes after `sample_prompts`, on the first rank; nothing on others, or without prompts."""
        if self.prompt_sampler is None or self.context.host.rank != 0:
            return []
        return self.prompt_sampler.texts(self.model, self.context.runtime, self._autocast_dtype)

    def _record_samples(self) -> None:
        for prompt, written in zip(_listed(self.args.sample_prompts), self.sample_texts(), strict=False):
            self._callbacks.run_log.event("sample", self.state.global_step, prompt=prompt, text=written)
            self._callbacks.progress.line(f"sample   {' '.join((prompt + written).split())[:SHOWN]}")

    def _evaluate_set(self, dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        evaluation = self._pausable or PausableEvaluation()
        key = evaluation.key(prefix)
        if key not in evaluation.completed:
            found = self.run_evaluation(
                self.get_eval_dataloader(dataset),
                gather=self.compute_metrics is not None and not self.args.batch_eval_metrics,
                ignore_keys=ignore_keys,
                before_batch=evaluation.before_batch,
            )
            try:
                metrics = self._metrics(found, prefix)
            except Exception:
                evaluation.metrics_failed = True
                raise
            _, epoch = self._callbacks.model_position()
            if epoch is not None:
                metrics["epoch"] = epoch
            evaluation.completed[key] = metrics
            self._callbacks.evaluated(metrics, prefix)
        return dict(evaluation.completed[key])

    def _eval_sets(self, given: Any = None) -> list[tuple[str, Any]]:
        """The sets to evaluate, each with the prefix of its metrics."""
        dataset = self.eval_dataset if given is None else given
        if dataset is None and self._overridden("get_eval_dataloader"):
            return [("eval", None)]
        sets = evaluation_sets(dataset)
        for _, each in sets if given is None else ():
            check_readable_again("eval_dataset", each)
        return sets

    def final_evaluation(self) -> dict[str, float]:
        """Returns the metrics of the model as it is at the end of training; evaluates it where that was not done yet.

        With `load_best_model_at_end` these are the metrics of the best model. Collective.
        """
        step, _ = self._callbacks.model_position()
        last = self._callbacks.last_evaluation
        if last is not None and last[0] == step:
            return last[1]
        return logged_evaluation(self.state.log_history, step, self._eval_sets()) or self.evaluate()

    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Computes predictions, labels and metrics over exactly the samples of a dataset. Collective.

        Args:
            test_dataset: The data.
            ignore_keys: Outputs of the model that are not predictions, besides the loss and caches. Default: those that
                its configuration names.
            metric_key_prefix: What the metrics' names begin with.

        Returns:
            Numpy arrays of all samples in order, and the metrics by name.

        Raises:
            DataError: The dataset is empty.
        """
        if hasattr(test_dataset, "__len__") and not len(test_dataset):
            raise DataError("test_dataset: it is empty; pass one with samples")
        self._memory_tracker.start()
        evaluation = self.run_evaluation(self.get_test_dataloader(test_dataset), gather=True, ignore_keys=ignore_keys)
        metrics = self._metrics(evaluation, metric_key_prefix)
        self._memory_tracker.stop_and_update_metrics(metrics)
        self._callbacks.event("on_predict", metrics)
        return PredictionOutput(evaluation.predictions, evaluation.labels, metrics)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Evaluates one batch. A subclass may override it.

        Args:
            model: The model.
            inputs: A batch on the device.
            prediction_loss_only: Return no predictions and labels.
            ignore_keys: Outputs of the model that are not predictions, besides the loss and caches. Default: those that
                its configuration names.

        Returns:
            The batch's mean loss, a 0-dim tensor (None without labels), predictions and labels: tensors, or tuples.
        """
        loss, predictions, labels = replace(self.evaluator, model=model).predict_batch(inputs, ignore_keys)
        return (loss, None, None) if prediction_loss_only else (loss, predictions, labels)

    def _overridden_step(
        self, inputs: Any, loss_only: bool, ignore_keys: Sequence[str] | None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Calls a subclass's `prediction_step`."""
        given = dict(inputs) if isinstance(inputs, Mapping) else inputs
        return self.prediction_step(self.model, given, loss_only, ignore_keys)  # type: ignore[arg-type]

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str = "",
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluates batches and returns all that was found, for subclasses whose `evaluate` or `predict` works on the
        predictions. A subclass may call it, not override it. Collective.

        Args:
            dataloader: What `get_eval_dataloader` or `get_test_dataloader` returned, or batches of one's own.
            description: Not used: the progress bar shows evaluations in one way. transformers' signature has it.
            prediction_loss_only: Compute the loss alone. Default: the argument of this name.
            ignore_keys: Outputs of the model that are not predictions, besides the loss and caches. Default: those that
                its configuration names.
            metric_key_prefix: What the metrics' names begin with.

        Returns:
            Numpy arrays of all samples in order (None with `prediction_loss_only`), the metrics, those of
            `compute_metrics` included, and the number of samples.
        """
        found = self.run_evaluation(
            dataloader,
            gather=True,
            loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            before_batch=(self._pausable or PausableEvaluation()).before_batch,
        )
        metrics = self._metrics(found, metric_key_prefix)
        return EvalLoopOutput(found.predictions, found.labels, metrics, found.samples)

    def run_evaluation(
        self,
        batches: Any,
        *,
        gather: bool,
        loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        before_batch: Callable[[], None] = lambda: None,
        announces: bool = True,
    ) -> Evaluation:
        """Evaluates what `get_eval_dataloader` returned; see `Evaluator`. `announces`: callbacks hear of each batch.
        Collective."""
        loss_only = self.args.prediction_loss_only if loss_only is None else loss_only
        by_batches = self.compute_metrics if self.args.batch_eval_metrics and not loss_only else None
        return self.evaluator(
            self._loaders.steps_of(batches),
            gather=gather and not loss_only,
            joined=self.args.eval_do_concat_batches,
            include=self.args.include_for_metrics or (),
            batch_metrics=None if by_batches is None else by_batch(by_batches),
            ignore_keys=ignore_keys,
            before_batch=before_batch,
            after_batch=lambda: self._callbacks.event("on_prediction_step") if announces else None,
        )

    def try_metrics(self) -> None:
        """Calls `compute_metrics` with two samples of each evaluation set, so that one that fails does so before
        training and not hours later. One that needs more samples than two gets the whole set. Collective."""
        if self.compute_metrics is None or self.args.batch_eval_metrics or self._overridden("evaluate"):
            return
        for _, dataset in self._eval_sets():
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                continue
            two = range(min(2, len(dataset)))
            try:
                self._try_metrics(dataset.select(two) if hasattr(dataset, "select") else Subset(dataset, two))
            except Exception as error:
                if self.context.host.rank == 0:
                    told = f"{type(error).__name__}: {error}"
                    logger.warning("compute_metrics fails with two samples (%s); it is tried with all", told)
                self._try_metrics(dataset)

    def _try_metrics(self, dataset: Any) -> None:
        self._metrics(self.run_evaluation(self.get_eval_dataloader(dataset), gather=True, announces=False), "eval")

    def _metrics(self, evaluation: Evaluation, prefix: str) -> dict[str, float]:
        """The metrics. Where `compute_metrics` fails on one rank, all ranks raise an error."""
        error, metrics = None, {}
        try:
            metrics = summarize(
                evaluation, prefix, causal=self.loss.has_perplexity, compute_metrics=self.compute_metrics
            )
        except Exception as raised:
            error = raised
        failed = [] if self.compute_metrics is None else self.context.host.all_gather(error is not None)
        if error is not None:
            raise error
        if any(failed):
            raise PeerFailed(f"rank {failed.index(True)}: compute_metrics has failed there; look at its error")
        return metrics


def _listed(prompts: str | Sequence[str] | None) -> list[str]:
    return [prompts] if isinstance(prompts, str) else list(prompts or [])
