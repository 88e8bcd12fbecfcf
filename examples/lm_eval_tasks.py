"""Tasks of lm_eval, EleutherAI's Language Model Evaluation Harness, on every checkpoint of a run.

    pip install 'lm_eval[hf]'
    stepmark evaluate runs/first --watch --evaluator lm_eval_tasks:evaluate --metric hellaswag_acc_norm

in the folder of a copy of this file, in which the tasks are yours. The numbers are those of lm_eval's own command on
the exported model: `eval_hellaswag_acc`, and for a filter `eval_gsm8k_exact_match_strict-match`. It runs in one process
on an eager device (`--device cpu` on a machine with lazy ones); several watchers share the work.
"""

from __future__ import annotations

from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

TASKS = ["hellaswag", "arc_easy"]  # names or patterns; `lm_eval ls tasks` lists them
FOLDER: str | None = None  # with files of further tasks
FEW_SHOT: int | None = None  # examples in a task's prompts; None: the task's
LIMIT: float | None = None  # examples per task; below 1: a fraction; None: all
BATCH_SIZE = 8


def evaluate(model: Any, tokenizer: Any, context: Any) -> dict[str, float]:
    """The numbers of all tasks, and the loss on the run's data where there are some."""
    manager = TaskManager(include_path=FOLDER)
    if missing := [task for task in TASKS if not manager.match_tasks([task])]:
        raise ValueError(f"lm_eval has no task {missing[0]!r}")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft, with its adapters
    found = simple_evaluate(
        HFLM(pretrained=base, tokenizer=tokenizer, batch_size=BATCH_SIZE),
        tasks=manager.match_tasks(TASKS),
        num_fewshot=FEW_SHOT,
        limit=LIMIT,
        log_samples=False,
        task_manager=manager,
    )
    numbers = context.evaluate() if context.datasets else {}
    for task, results in found["results"].items():
        for name, value in results.items():
            metric, comma, filtered = name.partition(",")
            if comma and isinstance(value, (int, float)):
                numbers[f"{task}_{metric}" + ("" if filtered == "none" else f"_{filtered}")] = float(value)
    return numbers
