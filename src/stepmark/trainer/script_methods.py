"""What scripts do with a Trainer besides training and evaluating: metrics, and attributes that they read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.telemetry.progress import metric_lines


class ScriptMethods:
    """Methods and attributes with transformers' names that need nothing of a Trainer's own.

    Attributes:
        model_accepts_loss_kwargs: Not used: losses are means in any case. Some scripts set it.
    """

    args: Any
    model: nn.Module
    _callbacks: Any
    _results: Any
    is_world_process_zero: Any
    _write_state: Any
    model_accepts_loss_kwargs = False
    is_deepspeed_enabled = False
    is_fsdp_enabled = False
    is_model_parallel = False
    place_model_on_device = True

    @property
    def model_wrapped(self) -> nn.Module:
        """The model: nothing is wrapped around it."""
        return self.model

    @property
    def label_smoother(self) -> Any:
        """transformers' LabelSmoother where `label_smoothing_factor` asks for one, for a `compute_loss` of a subclass
        that calls it; otherwise None."""
        factor = self.args.label_smoothing_factor
        if not factor:
            return None
        from transformers.trainer_pt_utils import LabelSmoother

        return LabelSmoother(epsilon=factor)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints metrics on rank 0.

        Args:
            split: The heading: `train`, `eval` or `predict` for example.
            metrics: The metrics by name.
        """
        if self.is_world_process_zero():
            print("\n".join(metric_lines(split, metrics)), flush=True)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes metrics to `<split>_results.json` in the run's folder, on rank 0.

        Args:
            split: `train`, `eval` or `predict` for example.
            metrics: The metrics by name.
            combined: Also add them to all_results.json. Default: True.

        Raises:
            StepmarkError: The folder cannot be written to.
        """
        with self._results.writing():
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self._callbacks.run_log.results(split, dict(metrics), combined=combined)

    def save_state(self) -> None:
        """Writes trainer_state.json to the run's folder, on rank 0; training does so itself.

        Raises:
            StepmarkError: The folder cannot be written to.
        """
        if self.is_world_process_zero() and not extracting_graphs():
            with self._results.writing():
                self._write_state(Path(self.args.output_dir))
