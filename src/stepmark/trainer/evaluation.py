"""Evaluations of a Trainer's data: the sets, their metrics, and evaluations that a signal may stop."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset

from stepmark.data.loader.own_state import generators_kept_by, own_state, set_own_state, shuffles_of
from stepmark.errors import PeerFailed, PredictionsTooLarge, UsageError
from stepmark.evaluation.evaluator import Evaluation, Evaluator
from stepmark.evaluation.metrics import by_batch, summarize
from stepmark.evaluation.prompt_samples import PromptSampler
from stepmark.filesystem.sizes import size
from stepmark.liveness.process_exit import say
from stepmark.parallel.optimizer.pending_gathers import of_known_libraries
from stepmark.runtime.seeds import derive_seed, seed_generators
from stepmark.trainer.callbacks import RunCallbacks
from stepmark.trainer.loaders import LoaderFactory
from stepmark.trainer.training_arguments import TrainingArguments
from stepmark.training.model_labels import evaluating
from stepmark.training.pipelined_forward import EvaluationPaused

Metrics = dict[str, float]

logger = logging.getLogger("stepmark")


class EvaluationProgress:
    """The progress of an evaluation that a signal may stop between two batches, and that a resumed run continues.

    `completed` has the metrics of each finished set, by the prefix of its keys (numbered where a prefix occurs again);
    these sets are not evaluated again. `metrics_failed`: `compute_metrics` has raised an error on at least one rank.
    """

    def __init__(
        self, may_continue: Callable[[], bool] = lambda: True, earlier: Mapping[str, Metrics] | None = None
    ) -> None:
        self.metrics_failed = False
        self._may_continue = may_continue
        self.completed = {prefix: dict(metrics) for prefix, metrics in (earlier or {}).items()}
        self._begun: Counter[str] = Counter()

    def key(self, prefix: str) -> str:
        """The key in `completed` of the next set, whose metrics begin with `prefix`."""
        self._begun[prefix] += 1
        return prefix if self._begun[prefix] == 1 else f"{prefix} ({self._begun[prefix]})"

    def before_batch(self) -> None:
        """Raises EvaluationPaused, on all ranks before the same batch, where the run stops."""
        if not self._may_continue():
            raise EvaluationPaused


@dataclass(frozen=True)
class TrainerEvaluation:
    """Evaluates batches with what a Trainer has now, as its arguments say. Every call is collective."""

    evaluator: Evaluator
    args: TrainingArguments
    callbacks: RunCallbacks
    loaders: LoaderFactory
    compute_metrics: Callable[..., Any] | None
    pause: EvaluationProgress | None = None  # that of the run, inside of which this is

    def run(
        self,
        batches: Any,
        *,
        gather: bool,
        loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        announces: bool = True,
    ) -> Evaluation:
        """Evaluates what `get_eval_dataloader` returned; see `Evaluator`. `announces`: calls `on_prediction_step`."""
        loss_only = self.args.prediction_loss_only if loss_only is None else loss_only
        by_batches = self.compute_metrics if self.args.batch_eval_metrics and not loss_only else None
        self.callbacks.handler.eval_dataloader = batches
        inside = getattr(batches, "before_prepare", batches)
        shuffles = self.evaluator.host.all_gather(shuffles_of(getattr(inside, "dataset", None)))
        if any(each != shuffles[0] for each in shuffles):
            raise UsageError("a stream is shuffled without a seed: each rank would evaluate others of its samples")
        kept = own_state(inside)  # also of a stream that is trained on, and each evaluation draws the same
        try:
            return self.evaluator(
                self.loaders.steps_of(batches),
                gather=gather and not loss_only,
                joined=self.args.eval_do_concat_batches,
                include=self.args.include_for_metrics or (),
                batch_metrics=None if by_batches is None else by_batch(by_batches),
                ignore_keys=ignore_keys,
                before_batch=(self.pause or EvaluationProgress()).before_batch,
                after_batch=lambda: self.callbacks.event("on_prediction_step") if announces else None,
            )
        finally:
            set_own_state(kept, inside)

    def metrics(self, evaluation: Evaluation, prefix: str) -> Metrics:
        """The metrics, with `compute_metrics` those of rank 0. Where it fails on one rank, all ranks raise an error."""
        error, metrics, causal = None, None, self.evaluator.loss.has_perplexity
        try:
            metrics = summarize(evaluation, prefix, causal=causal, compute_metrics=self.compute_metrics)
        except Exception as raised:
            error = raised
        results: list[Any] = [metrics] if self.compute_metrics is None else self.evaluator.host.all_gather(metrics)
        if self.pause is not None:
            self.pause.metrics_failed = None in results
        if error is not None:
            raise error
        if None in results:
            raise PeerFailed(f"rank {results.index(None)}: compute_metrics has failed there; look at its error")
        return dict(results[0])

    def of_set(
        self,
        batches: Callable[[], Any],
        prefix: str,
        ignore_keys: list[str] | None,
        loop: Callable[[], Metrics] | None = None,
    ) -> Metrics:
        """Evaluates one set, unless it is complete already, and logs its metrics. `loop`: a subclass's own."""
        pause = self.pause or EvaluationProgress()
        key = pause.key(prefix)
        if key not in pause.completed:
            if self.pause is not None:  # in training: where it was stopped between two sets, the second draws the same
                step = self.callbacks.state.global_step
                own = generators_kept_by(self.compute_metrics)
                seed_generators(self.evaluator.runtime, derive_seed(self.args.seed, step, prefix), own)
            began = time.perf_counter()
            metrics = self._metrics_of(batches, prefix, ignore_keys) if loop is None else dict(loop())
            metrics.setdefault(f"{prefix}_runtime", time.perf_counter() - began)
            _, epoch = self.callbacks.model_position()
            if epoch is not None:
                metrics["epoch"] = epoch
            pause.completed[key] = metrics
            with evaluating(self.evaluator.model):  # by which a subclass's `log` tells what is logged
                self.callbacks.evaluated(metrics, prefix)
        return dict(pause.completed[key])

    def _metrics_of(self, batches: Callable[[], Any], prefix: str, ignore_keys: list[str] | None) -> Metrics:
        """In training, predictions that memory has become too small for are left out, and so are metrics."""
        gather = self.compute_metrics is not None and not self.args.batch_eval_metrics
        found = None
        try:
            found = self.run(batches(), gather=gather, ignore_keys=ignore_keys)
        except PredictionsTooLarge as error:
            if self.pause is None:  # outside of training
                raise
            logger.warning("this evaluation is without compute_metrics: %s", error)
        if found is None:  # once the error is gone, and what it holds
            found = self.run(batches(), gather=False, ignore_keys=ignore_keys)
        metrics = self.metrics(found, prefix)
        if found.loss is None and found.tokens and self.evaluator.prediction_step is None:
            names = ", ".join(self.evaluator.loss.labels.names)
            logger.warning("%s: no loss: no input is a label (%s); name those that are in label_names", prefix, names)
        return metrics

    def prompt_sampler(self) -> PromptSampler | None:
        """Continues `sample_prompts`; None without any. Raises UsageError where it cannot."""
        given, model = self.args.sample_prompts, self.evaluator.model
        prompts = [given] if isinstance(given, str) else list(given or [])
        if not prompts:
            return None
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise UsageError(
                f"sample_prompts: {type(model).__name__} is an encoder-decoder, which continues no text; leave them "
                "out, or use Seq2SeqTrainer with predict_with_generate"
            )
        positions = getattr(config, "max_position_embeddings", None)
        tokenizer, options = self.loaders.processing_class, self.args.parsed_options("sample_options")
        return PromptSampler(tokenizer, prompts, self.args.sample_tokens, positions, options)

    def sample_texts(self) -> list[tuple[str, str, str]]:
        """`sample_prompts` with the model's continuations, as they are and with what is invisible shown; on ranks other
        than 0, or without prompts, an empty list. A step's are drawn alike in every process."""
        each = self.evaluator
        sampler = None if each.host.rank != 0 else self.prompt_sampler()
        if sampler is None:
            return []
        seed = derive_seed("samples", self.args.seed, self.callbacks.model_position()[0])
        texts = sampler.texts(each.model, each.runtime, each.autocast_dtype, seed)
        return [(prompt, *both) for prompt, both in zip(sampler.prompts, texts, strict=True)]

    def foretell_memory(self, datasets: Iterable[Any], batches: Callable[[Any], Any]) -> None:
        """Evaluates two samples of each dataset, where that calls no code of the user's, which may keep sums. Raises
        PredictionsTooLarge where the predictions of a whole set would not fit into host memory."""
        each = self.evaluator
        theirs = self.loaders.own_loss or self.loaders.data_collator is not None or each.preprocess_logits is not None
        theirs |= each.loss.replaces_own or not of_known_libraries(each.model)
        if self.compute_metrics is None or self.args.batch_eval_metrics or theirs:
            return
        for dataset in datasets:
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                continue
            two = range(min(2, len(dataset)))
            given = dataset.select(two) if hasattr(dataset, "select") else Subset(dataset, two)
            found = self.run(batches(given), gather=True, announces=False)
            rows = found.rows.bytes * len(dataset) / max(found.samples, 1)
            need = each.check_memory(rows, joined=self.args.eval_do_concat_batches)
            if self.callbacks.run_log.writes:
                say(f"metrics  predictions of an evaluation take {size(need)} of host memory on each rank")


def logged_evaluation(
    history: Sequence[dict[str, float]], step: int, prefixes: Iterable[str]
) -> dict[str, float] | None:
    """The metrics of an evaluation of all sets at this step from the history, which resumed runs have too."""
    metrics: dict[str, float] = {}
    logs = [log for log in history if log["step"] == step]
    for prefix in prefixes:
        log = next((log for log in reversed(logs) if f"{prefix}_runtime" in log), None)
        if log is None:
            return None
        metrics |= {name: value for name, value in log.items() if name != "step"}
    return metrics
