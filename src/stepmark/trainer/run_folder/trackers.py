"""One run in each experiment tracker for all processes of a run: what transformers' callbacks need to find it again."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepmark.filesystem.json_files import replace_json

TRACKERS = "trackers.json"  # in the run's folder


@contextmanager
def same_runs(folder: Path, args: Any, callbacks: Sequence[Any]) -> Iterator[None]:
    """Inside the block, in which they begin, the callbacks continue the tracker runs of this folder, or name new ones;
    what a program has named itself stays. For rank 0.

    W&B takes a run's id from the environment. MLflow gives it, so it is noted at the end, with the server that it is
    of. trackio knows runs by their name, to which the id is added. TensorBoard's run is a folder.
    """
    path, kinds = folder / TRACKERS, {type(each).__name__: each for each in callbacks}
    known = json.loads(path.read_text()) if path.is_file() else {"id": secrets.token_hex(4)}
    variables = {"WANDB_RUN_ID": known["id"], "WANDB_RESUME": "allow"} if "WANDB_RUN_ID" not in os.environ else {}
    mlflow, board = sys.modules.get("mlflow") if "MLflowCallback" in kinds else None, kinds.get("TensorBoardCallback")
    if mlflow is not None and mlflow.active_run() is None and "MLFLOW_RUN_ID" not in os.environ:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or mlflow.get_tracking_uri()
        variables |= {"MLFLOW_RUN_ID": known["mlflow"]} if known.get("mlflow_uri") == uri else {}
    if board is not None and board.logging_dir is None:
        board.logging_dir = str(folder / "runs" / known["id"])
    before, name = {each: os.environ.get(each) for each in variables}, args.run_name
    os.environ.update(variables)
    if "TrackioCallback" in kinds:
        args.run_name = f"{name or folder.name}-{known['id']}"
    try:
        yield
    finally:
        args.run_name = name
        for each, value in before.items():
            os.environ.pop(each, None)
            os.environ.update({} if value is None else {each: value})
    if mlflow is not None and mlflow.active_run() is not None:
        known |= {"mlflow": mlflow.active_run().info.run_id, "mlflow_uri": mlflow.get_tracking_uri()}
    folder.mkdir(parents=True, exist_ok=True)
    replace_json(path, known)
