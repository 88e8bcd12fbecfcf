"""Tasks of lm_eval, EleutherAI's Language Model Evaluation Harness, on a model in memory."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from stepmark.errors import MetricsError, UsageError
from stepmark.evaluation.metric_functions import describe


@dataclass(frozen=True)
class Benchmarks:
    """Names or patterns of tasks; the options have the names and meanings of lm_eval's command."""

    tasks: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None

    def check(self) -> None:
        """Raises UsageError for what lm_eval cannot evaluate, before a model is read."""
        if importlib.util.find_spec("lm_eval") is None:
            raise UsageError("--tasks: lm_eval is not installed; pip install 'stepmark[lm-eval]'")
        if self.include_path is not None and not self.include_path.is_dir():
            raise UsageError(f"--include_path: {self.include_path} is not a folder; name that of the tasks' files")
        if (self.num_fewshot or 0) < 0 or (self.limit is not None and self.limit <= 0):
            raise UsageError("--num_fewshot and --limit: should be numbers of examples, 0 or more, and above 0")

    def manager(self) -> Any:
        """lm_eval's TaskManager. Raises UsageError for a task that it does not find."""
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        manager = TaskManager(include_path=None if self.include_path is None else str(self.include_path))
        missing = [task for task in self.tasks if not manager.match_tasks([task])]
        if missing:
            raise UsageError(
                f"--tasks: lm_eval has no task {missing[0]!r}; `lm_eval ls tasks` lists them, and --include_path "
                "names a folder with others"
            )
        return manager

    def describe(self) -> dict[str, Any]:
        """What results depend on, besides the model: with a checksum of the tasks' own files."""
        files = sorted(self.include_path.rglob("*")) if self.include_path is not None else []
        content = b"".join(path.read_bytes() for path in files if path.suffix in (".yaml", ".py", ".json", ".jsonl"))
        return {**asdict(self), "include_path": xxhash.xxh3_64_hexdigest(content)}

    def evaluate(self, model: Any, tokenizer: Any, batch_size: int) -> dict[str, float]:
        """The numbers of all tasks and groups: `TASK_METRIC`, and for a filter `TASK_METRIC_FILTER`.

        Raises MetricsError where lm_eval fails.
        """
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        from stepmark.training.model_labels import unwrapped

        manager, given = self.manager(), unwrapped(model)
        try:
            found = simple_evaluate(
                HFLM(pretrained=given, tokenizer=tokenizer, batch_size=batch_size),
                tasks=manager.match_tasks(list(self.tasks)),
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                log_samples=False,
                task_manager=manager,
            )
        except Exception as error:  # tasks are code of anybody's
            raise MetricsError(f"--tasks {','.join(self.tasks)}: lm_eval raised {describe(error)}") from error
        metrics = {}
        for task, numbers in found["results"].items():
            for name, value in numbers.items():
                metric, comma, filtered = name.partition(",")
                if comma and isinstance(value, (int, float)):
                    metrics[f"{task}_{metric}" + ("" if filtered == "none" else f"_{filtered}")] = float(value)
        return metrics
