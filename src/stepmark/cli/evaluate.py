"""`stepmark evaluate CHECKPOINT_OR_RUN_OR_FOLDER [--watch] …`"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.filesystem.local_paths import ALL
from stepmark.launch.ending_at_signals import ending_at_signals
from stepmark.launch.rank_count import RankCount
from stepmark.launch.supervisor import follow_supervisor, start_ranks
from stepmark.launch.world import World
from stepmark.liveness.process_exit import say

if TYPE_CHECKING:
    from stepmark.watcher.evaluation_data import Request

TAKES = {"path": ALL}
HELP = "evaluate a checkpoint, or every checkpoint of a run as it is committed"
ENDS_AT_SIGNALS = True  # with exit code 75, since the same command continues


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    path = "a checkpoint-N folder, a Hugging Face model folder, a run's folder, or the address of one"
    add("path", metavar="PATH", type=Path, help=path)
    add("--watch", action="store_true", help="continue until the run has ended and all checkpoints are evaluated")
    add("--until", type=int, metavar="STEP", help="stop after this step or a later one is evaluated")
    add("--patience", type=int, metavar="N", help="ask the run to stop after N evaluations without improvement")
    data = "a file, a folder, a pattern, or a dataset (its validation split, if any); repeatable with names "
    data += "(default: the validation data of the run)"
    add("--data", action="append", default=[], metavar="[NAME=]SOURCE", help=data)
    add("--text_column", metavar="NAME", help="column of --data that holds the texts (default: as in the run)")
    add("--messages_column", metavar="NAME", help="column of --data that holds messages (default: as in the run)")
    answers = "compute the loss on assistant messages only (default: as in the run)"
    add("--assistant_only_loss", nargs="?", const="true", choices=("true", "false"), help=answers)
    add("--block_size", type=int, metavar="INT", help="tokens per sample (default: as in the run)")
    limit = "maximum number of samples per set (default: as in the run; all of --data)"
    add("--max_samples", type=int, metavar="INT", help=limit)
    add("--batch_size", type=int, metavar="INT", help="samples per rank and batch (default: as in the run)")
    metrics = "compute_metrics(EvalPrediction), a dict of numbers (default: as in the run; none: no metrics)"
    add("--metrics", metavar="MODULE:FUNCTION", help=metrics)
    add("--evaluator", metavar="MODULE:FUNCTION", help="evaluate(model, tokenizer, context), a dict of numbers")
    best = "metric that selects the best checkpoint (default: as in the run, else the loss)"
    add("--metric", metavar="NAME", help=best)
    add("--greater_is_better", choices=("true", "false"), help="whether greater values of that metric are better")
    moved = "update the run's `best` although --data is not the data of the run"
    add("--update_best", action="store_true", help=moved)
    add("--device", default="auto", metavar="STR", help="auto, xla, cpu, or an accelerator of torch's (default: auto)")
    add("--trust_remote_code", action="store_true", help="execute Python code that came with the model")
    base = "an adapter's base model: a folder, an address or a name of the hub (default: as in its configuration)"
    add("--base-model", "--base_model", metavar="MODEL", help=base)
    attention = "attention, by transformers' name, such as sdpa or eager (default: as in the run)"
    add("--attn_implementation", metavar="NAME", help=attention)
    add("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    add("--interval", type=float, default=2.0, metavar="SECONDS", help="between checks for checkpoints (default: 2)")
    add("--json", action="store_true", help="print JSON; with --watch one object per line")


def run(parsed: argparse.Namespace) -> int:
    """Returns 0, or 1 if an evaluation failed."""
    if parsed.nproc is not None:
        _request(parsed).check()
        return start_ranks(parsed, RankCount(parsed.nproc, now=parsed.nproc), signal_grace=10.0, resumable=True)
    follow_supervisor()
    with ending_at_signals("evaluation is incomplete; run the same command to continue", _say_interrupted):
        from stepmark.watcher.command import evaluate_command

        return evaluate_command(_request(parsed))


def _say_interrupted(reason: str) -> None:
    if World.from_environment().rank == 0:
        say(f"interrupted by {reason}")


def _request(parsed: argparse.Namespace) -> Request:
    from stepmark.watcher.evaluation_data import Request

    given = {each.name: getattr(parsed, each.name) for each in fields(Request)}
    words = {"true": True, "false": False, None: None}
    switches = {name: words[given[name]] for name in ("assistant_only_loss", "greater_is_better")}
    return Request(**{**given, **switches})
