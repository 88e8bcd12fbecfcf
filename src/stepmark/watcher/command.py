"""`stepmark evaluate` in one rank: one checkpoint, or the checkpoints of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.checkpoint.coordination.leases import reading
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, resolve_link, step_of
from stepmark.config.quiet_libraries import leave_out_torch_xla, quiet_libraries
from stepmark.config.recipe import Recipe
from stepmark.errors import CheckpointNotFound
from stepmark.evaluation.run_options import RunOptions
from stepmark.filesystem.cache_folder import fetched_root, with_addresses
from stepmark.filesystem.json_files import finite
from stepmark.filesystem.printable import printable
from stepmark.liveness.gc_pause import quick_imports
from stepmark.recipe.used_recipe import USED_RECIPE, find_recipe
from stepmark.runtime.xla_environment import extracting_graphs, prepare_environment, warn_not_saved
from stepmark.trainer.telemetry.progress import QUIET, aligned
from stepmark.watcher.evaluation_data import Request
from stepmark.watcher.evaluation_records import EVALUATED, FAILED, TABLE


def evaluate_command(request: Request) -> int:
    """Carries out the request. Returns 0, or 1 where an evaluation failed. Collective."""
    request.check()
    quiet_libraries()
    prepare_environment()
    with quick_imports():
        from stepmark.runtime.compile_cache import open_compile_cache, prepare_compile_cache
        from stepmark.runtime.context import start
        from stepmark.runtime.mesh import Mesh
        from stepmark.watcher.setup import check_functions

    check_functions(request)
    recipe = _recipe_of(request)
    cache = None if recipe is None else recipe.training.compile_cache  # where its evaluations' graphs are found
    prepare_compile_cache(cache)
    context = start(request.device)
    open_compile_cache(context.runtime, cache, context.world)
    if not context.runtime.lazy:
        leave_out_torch_xla()
    mesh = Mesh.create(context=context)
    return _of_run(request, mesh) if request.is_run and not extracting_graphs() else _of_one(request, mesh)


def _recipe_of(request: Request) -> Recipe | None:
    """That of the run: in its folder, or the copy in its newest checkpoint. None before the run has begun."""
    path = request.path
    folders = (path, next(iter(checkpoints(path)), path)) if request.is_run else (path.absolute().parent, path)
    return find_recipe(*folders, trusts_code=request.trust_remote_code)[0]


def _newest(request: Request) -> Path:
    """The newest checkpoint of a run; of another path that itself. Raises CheckpointNotFound for a run without."""
    if not request.is_run:
        return resolve_link(request.path)
    newest = next(iter(checkpoints(request.path)), None)
    if newest is None:
        raise CheckpointNotFound(f"{request.path} has no checkpoint")
    return newest


def _of_one(request: Request, mesh: Any) -> int:
    """Evaluates one checkpoint or model. While graphs are extracted, nothing is printed: values are placeholders."""
    from stepmark.watcher.setup import EvaluationSetup

    leads = mesh.context.host.rank == 0
    path = mesh.context.host.broadcast(_newest(request))
    with reading(path, "once") if leads else contextlib.nullcontext():
        recipe, file = find_recipe(path, path.absolute().parent, trusts_code=request.trust_remote_code)
        setup = EvaluationSetup.prepare(request, mesh, recipe, path)
        if leads:
            _say(setup.summary(_origin(request, file, path, RunOptions.of_checkpoint(path))))
        metrics = setup.evaluate(path)
    if extracting_graphs():
        warn_not_saved(f"the evaluation of {path}")
    elif leads:
        samples = {name or "": len(each.blocks) for name, each in setup.sets.items()}
        content = {"path": str(path), "step": step_of(path), "samples": samples, **finite(metrics)}
        print(json.dumps(content) if request.json else _table_of_model(path, samples, metrics))
    return 0


def _origin(request: Request, recipe: Path | None, path: Path, options: RunOptions | None) -> str:
    """Where the block size of an evaluation comes from, and warnings where it may differ from those of the run.
    `options`: what the checkpoint says, where it says how its run evaluated."""
    given = request.block_size is not None
    if recipe is not None:
        return "block_size as given" if given else f"block_size from {recipe}"
    default = "" if given else " is the most that the model takes, up to 1024, and"
    unknown = f"block_size{default} may differ from the run's; --block_size sets it"
    if options is None:
        return f"warning: {path} has no {USED_RECIPE} that says how its run evaluated: {unknown}"
    if given or options.block_size is not None:
        notes = ["block_size as given" if given else f"block_size from {path}"]
    else:
        notes = [f"warning: {path} does not say its run's block_size: {unknown}"]
    if options.metrics is not None and request.metrics is None:
        notes.append(f"without the run's own metrics, which are added by {options.metrics_flag}")
    if options.loss is not None:
        notes.append(f"warning: the loss is the model's, and that of the run was {options.loss}")
    return "; ".join(notes)


def _of_run(request: Request, mesh: Any) -> int:
    from stepmark.watcher.setup import EvaluationSetup
    from stepmark.watcher.watcher import Watcher

    leads = mesh.context.host.rank == 0

    def make_setup(checkpoint: Path) -> tuple[EvaluationSetup, Request]:
        recipe, file = find_recipe(request.path, checkpoint, trusts_code=request.trust_remote_code)
        setup = EvaluationSetup.prepare(request, mesh, recipe, checkpoint)
        if leads:
            _say(setup.summary(_origin(request, file, checkpoint, RunOptions.of_checkpoint(checkpoint))))
            if not setup.moves_best:
                _say(f"{request.path / 'best'} stays as it is: --data is not the data of the run; see --update_best")
        return setup, _with_metric(request, recipe)

    stream = request.json and request.watch

    def show(line: dict[str, Any], best: bool) -> None:
        if stream:
            print(json.dumps(line), flush=True)
        elif not request.json:
            print(_line_of(line, best), flush=True)

    say = _say if leads else lambda text: None
    watcher = Watcher(request, mesh, make_setup, show, say)
    failures = watcher.run()
    if watcher.recorder is not None and not stream:
        lines, best = watcher.recorder.records.sorted(), watcher.recorder.best
        content = {"path": str(request.path), "best": best, "evaluations": lines}
        print(json.dumps(content) if request.json else _table_of_run(request.path, lines, best))
    return 1 if failures else 0


def _with_metric(request: Request, recipe: Recipe | None) -> Request:
    """With the metric for the best checkpoint of the run's recipe, unless one is given."""
    if request.metric is not None or recipe is None or recipe.training.metric_for_best_model is None:
        return request
    own, greater = recipe.training, request.greater_is_better
    greater = own.greater_is_better if greater is None else greater
    return replace(request, metric=own.best_metric_key, greater_is_better=greater)


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


# What is printed: a line for each evaluation as it completes, a table at the end, or JSON

Lines = Sequence[Mapping[str, Any]]


def _line_of(line: Mapping[str, Any], best: bool) -> str:
    """A line of evaluations.jsonl in readable form."""
    if line["status"] != EVALUATED:
        return f"step {line['step']}: {line['status']}: {line['reason']}"
    shown = [f"{name.removeprefix('eval_')} {_number(line[name])}" for name in _metrics([line])]
    return f"step {line['step']}: {', '.join(shown)}{' (best so far)' if best else ''}"


def _table_of_model(path: Path, samples: Mapping[str, int], metrics: Mapping[str, float]) -> str:
    """All numbers of one model; `samples` are those of each set."""
    count = ", ".join(f"{count} samples" + (f" of {name}" if name else "") for name, count in samples.items())
    head = f"{path}: {count}" if count else str(path)
    return "\n".join([head, *aligned([(name, _number(value)) for name, value in metrics.items()], right=(1,))])


def _table_of_run(run: Path, lines: Lines, best: int | None) -> str:
    """A row for each evaluation, and the number of each status."""
    evaluated = [line for line in lines if line["status"] == EVALUATED]
    failed = sum(line["status"] == FAILED for line in lines)
    skipped = len(lines) - len(evaluated) - failed
    last = f"{len(evaluated)} evaluated, {skipped} skipped, {failed} failed"
    if not with_addresses(str(run)).startswith(str(fetched_root())):  # else it goes with what was downloaded
        last += f"; see {run / TABLE}"
    if not evaluated:
        return last
    names = _metrics(evaluated)
    rows = [["step", *names]]
    for line in evaluated:
        step = f"{line['step']} (best)" if line["step"] == best else str(line["step"])
        rows.append([step, *(_number(line.get(name)) for name in names)])
    return "\n".join([*aligned(rows, right=range(1, len(names) + 1)), last])


def _metrics(evaluated: Lines) -> list[str]:
    names = dict.fromkeys(name for line in evaluated for name in line if name.startswith("eval_"))
    return [name for name in names if not name.endswith(QUIET)]


def _number(value: Any) -> str:
    if value is None:
        return "not finite"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
