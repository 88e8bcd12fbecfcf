"""What callbacks see of a run, and what is logged of it: state, control, log files and progress bar."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import trainer_callback
from transformers.trainer_callback import (
    CallbackHandler,
    EarlyStoppingCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.filesystem.files import make_folder, make_own_folder
from stepmark.filesystem.json_files import read_lines, read_object, replace_json
from stepmark.liveness import console
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.components import TrainingComponents, count_epochs
from stepmark.trainer.run_folder.log_history import encode_state, pack
from stepmark.trainer.run_folder.output_folder import TRACKERS
from stepmark.trainer.run_folder.run_log import METRICS, RunLog
from stepmark.trainer.run_folder.status import DONE, RUNNING, RunStatus
from stepmark.trainer.telemetry.progress import ProgressDisplay
from stepmark.trainer.training_arguments import TrainingArguments

Metrics = dict[str, float]

logger = logging.getLogger("stepmark")
SHOWN = 100  # characters of a sample on the terminal
_INTEGRATIONS = "transformers.integrations"
_NOT_LISTED = ("flyte", "azure_ml")  # transformers does not say whether these are installed
_TRAINED = re.compile(rb'\{"step": (\d+),.*"loss": ')  # a line of metrics.jsonl about training
_OWN_STATES = ("TrainerControl",)  # in checkpoints of transformers' Trainer; not restored


class RunCallbacks:
    """Calls the callbacks, which set flags of `control`, and keeps `state`, the run's log and the progress bar.

    `before_hearing` is called before an event that a user's callback handles. `last_evaluation` is the step of the last
    evaluation of the Trainer's own data, with its metrics. `begun` is set once training has begun: from then on the end
    of the process is the end of the run. `training` is set until it has ended. `log` is the Trainer's, which a subclass
    may override; it calls `record`.
    """

    def __init__(
        self,
        args: TrainingArguments,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        model: nn.Module,
        processing_class: Any,
        run_log: RunLog,
        *,
        leads_node: bool,
        log: Callable[[Metrics], None],
    ) -> None:
        self.args = args
        self.run_log = run_log
        shows = _SHOWS[bool(args.disable_tqdm)]
        called = [DefaultFlowCallback, shows, *filter(takes_part, (*reporters(args), *callbacks))]
        self.handler: Any = CallbackHandler(called, model, processing_class, None, None)
        self.before_hearing: Callable[[], None] = lambda: None
        self._leads_node = leads_node
        self._log = log
        self._machine: Metrics = {}
        self._position: tuple[int, Any] | None = None  # of the evaluated model, while that is logged
        self.reset()

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds one, unless it takes no part."""
        if takes_part(callback):
            self.handler.add_callback(callback)

    def reset(self) -> None:
        """Starts over for a new run."""
        self.state = TrainerState(is_local_process_zero=self._leads_node, is_world_process_zero=self.run_log.writes)
        self.control = TrainerControl()
        self.progress = ProgressDisplay(shows=False, total=0, done=0)
        self.last_evaluation: tuple[int, Metrics] | None = None
        self.begun = self.training = False
        self._sent: dict[str, int] = {}  # up to which step trackers have each value, from before a resumption
        self.best_step: int | None = None  # where the model has the weights of the best one

    def model_position(self) -> tuple[int, Any]:
        """Step and epoch of the model's weights: the last ones, or those of the best model once it is loaded."""
        if self.best_step is None:
            return self.state.global_step, self.state.epoch
        epochs = [log.get("epoch") for log in self.state.log_history if log.get("step") == self.best_step]
        return self.best_step, epochs[-1] if epochs else self.state.epoch

    def show(self, parts: TrainingComponents, train_dataloader: Any) -> None:
        """Sets what transformers' callbacks expect to find."""
        state, handler = self.state, self.handler
        state.max_steps = parts.total_steps
        state.num_train_epochs = count_epochs(self.args, parts.loader)
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, parts.total_steps)
        self.intervals = {f"{kind}_steps": vars(state)[f"{kind}_steps"] for kind in ("logging", "eval", "save", "max")}
        handler.model, handler.optimizer, handler.lr_scheduler = parts.model, parts.optimizer.inner, parts.schedule
        handler.train_dataloader = train_dataloader

    def begin(self, total_steps: int) -> None:
        """Training begins, at the step of `state`."""
        console.install(self.args.log_format)
        if not extracting_graphs():
            console.keep_console(Path(self.args.output_dir))
        self.progress = ProgressDisplay(
            shows=self.run_log.writes and any(type(each) in _SHOWS for each in self.handler.callbacks),
            total=total_steps,
            done=self.state.global_step,
            bar=not self.args.disable_tqdm,
            log_format=self.args.log_format,
        )
        self.run_log.describe(total_steps=total_steps, process=os.getpid(), host=socket.gethostname(), **self._best())
        if self.args.mirror_to is not None:
            self.run_log.describe(mirror_to=self.args.mirror_to)
        if self.args.prometheus_file is not None:
            self.run_log.export(self.args.prometheus_file)
        before = RunStatus.read(self.run_log.folder)
        self.run_log.stays_done = self.state.global_step >= total_steps and before.state == DONE
        self.run_log.status(RUNNING, self.state.global_step)
        self.begun = self.training = True

    def close(self) -> None:
        """Training has ended, in one way or another."""
        self.training = False
        self.progress.close()

    # Events

    @property
    def _trackers(self) -> list[Any]:
        return [each for each in self.handler.callbacks if _is_reporter(type(each))]

    def train_begins(self) -> None:
        """Calls `on_train_begin`, for which trackers continue the runs of this folder."""
        joins = bool(self._trackers) and self.run_log.writes
        with same_runs(self.run_log.folder, self.args, self._trackers) if joins else nullcontext():
            self.event("on_train_begin")

    def resumed(self) -> None:
        """Steps that were logged before appear again; trackers have them."""
        if not self.run_log.writes or not self._trackers:
            return
        step = self.state.global_step  # what is not of training may be logged again for an earlier one
        lines = read_lines(
            self.run_log.folder / METRICS, lambda line: (match := _TRAINED.match(line)) is None or int(match[1]) >= step
        )
        for line in lines:
            if isinstance(line.get("step"), int):
                self._sent |= {name: max(line["step"], self._sent.get(name, -1)) for name in line}

    def _log_event(self, step: int, logs: Metrics) -> None:
        """Calls `on_log`, of trackers with the values that they do not have yet."""
        new = {name: value for name, value in logs.items() if self._sent.get(name, -1) < step}
        if len(new) == len(logs):
            self.event("on_log", logs)
            return
        every, trackers = self.handler.callbacks, self._trackers
        try:
            others = [each for each in every if each not in trackers]
            for told, values in ((others, logs), (trackers if new else [], new)):
                self.handler.callbacks = told
                self.event("on_log", values)
        finally:
            self.handler.callbacks = every

    def event(self, name: str, *values: Any) -> None:
        """Calls the method `name` of every callback; they may set flags of the control, and use the model."""
        if self.hears(name):
            self.before_hearing()
        self.control = getattr(self.handler, name)(self.args, self.state, self.control, *values)

    def hears(self, name: str) -> bool:
        """Whether a callback that is not the run's own defines the event `name`, and does not inherit it empty."""
        others = (each for each in self.handler.callbacks if type(each) not in (DefaultFlowCallback, *_SHOWS))
        methods = (getattr(each, name) for each in others)
        return any(getattr(each, "__func__", each) is not getattr(TrainerCallback, name) for each in methods)

    def heard(self, name: str) -> Callable[[], None] | None:
        """What calls the event `name`; None where only the run's own callback would hear it."""
        return partial(self.event, name) if self.hears(name) else None

    def evaluated(self, metrics: Metrics, prefix: str) -> None:
        """Logs the metrics of one set, whose keys begin with `prefix`, and calls `on_evaluate`."""
        self._position = self.model_position()
        try:
            self.log(metrics)
        finally:
            step, self._position = self._position[0], None
        self.progress.evaluated(step, metrics, prefix)
        self.event("on_evaluate", metrics)

    def sampled(self, prompt: str, written: str, shown: str) -> None:
        """Records how the model has continued one of `sample_prompts`; `shown`: with what is invisible."""
        self.run_log.event("sample", self.state.global_step, prompt=prompt, text=written, shown=shown)
        self.progress.line(f"sample   {' '.join((prompt + shown).split())[:SHOWN]}")

    def log(self, logs: Metrics, machine: Metrics | None = None) -> None:
        """Logs through the Trainer's method. `machine`, which describes the machine and not the model, is added to the
        log files and to the callbacks' logs, not to the history that checkpoints hold."""
        self._machine = machine or {}
        try:
            self._log(logs)
        finally:
            self._machine = {}

    def record(self, logs: Metrics) -> None:
        """Adds `logs` to the history, to metrics.jsonl and to the callbacks' logs, with the step and epoch."""
        step, epoch = self._position or (self.state.global_step, self.state.epoch)
        machine, self._machine = self._machine, {}
        self.state.log_history.append({**logs, "epoch": epoch, "step": step})
        logs = {**logs, **machine}
        self.run_log.metrics({"step": step, "epoch": epoch, **logs})
        if self.training:
            self.run_log.describe(eta_seconds=self.progress.seconds_left(step), **self._best())
            self.run_log.status(RUNNING, step)
        due = self.control.should_log  # which transformers' handler unsets, also for values that a program logs itself
        self._log_event(step, {**logs, "epoch": epoch})
        self.control.should_log |= due
        pack(self.state)

    # State

    def _best(self) -> dict[str, Any]:
        """What status.json says of the best evaluation so far."""
        return {} if self.state.best_global_step is None else {"best_metric": self.state.best_metric}

    def encode_state(self) -> Iterator[bytes]:
        """The content of trainer_state.json as `encode_state`, with the state of the callbacks which have one."""
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=self._exportable()).stateful_callbacks
        return encode_state(self.state)

    def restore_state(self, saved: TrainerState) -> None:
        """Restores the history, the best model and the callbacks' states from `saved`: their counters, and with
        `restore_callback_states_from_checkpoint` also their constructor arguments."""
        restored = "log_history total_flos num_input_tokens_seen best_metric best_global_step best_model_checkpoint"
        for name in restored.split():
            setattr(self.state, name, getattr(saved, name))
        if saved.best_global_step is not None:
            self.run_log.describe(best_metric=saved.best_metric)
        states: Any = saved.stateful_callbacks  # plain values, once they were read from a file
        # A class of which there are several has a list of them, in order.
        left = {name: list(found) if isinstance(found, list) else [found] for name, found in states.items()}
        for callback in self._exportable():
            for values in left.get(type(callback).__name__, [])[:1]:
                left[type(callback).__name__].pop(0)
                if self.args.restore_callback_states_from_checkpoint:
                    vars(callback).update(vars(type(callback)(**values.get("args", {}))))
                for name, value in values["attributes"].items():
                    setattr(callback, name, value)
        missing = sorted(name for name, states in left.items() if states and name not in _OWN_STATES)
        if missing:
            logger.warning("the checkpoint has the state of callbacks that this run lacks: %s", ", ".join(missing))

    def _exportable(self) -> list[Any]:
        return [callback for callback in self.handler.callbacks if isinstance(callback, ExportableState)]

    def out_of_patience(self) -> bool:
        """Whether early stopping has ended the run, as far as its evaluations say."""
        stopping = [each for each in self.handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        return any(each.early_stopping_patience_counter >= each.early_stopping_patience for each in stopping)


def reporters(args: TrainingFields) -> list[type[TrainerCallback]]:
    """transformers' callbacks for the `report_to` names. Raises UsageError where a package is not installed."""
    if not args.reporters:
        return []  # asking which are installed would import some of them
    from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

    installed = get_available_reporting_integrations()
    names = installed if args.reporters == ["all"] else args.reporters
    try:
        found = get_reporting_integration_callbacks(names)
    except ValueError as error:
        raise UsageError(f"report_to: {error}") from error
    if absent := [name for name in names if name not in (*installed, *_NOT_LISTED)]:
        raise UsageError(f"report_to: {absent[0]} is not installed; install its package, or leave it out of report_to")
    return found


def takes_part(callback: TrainerCallback | type[TrainerCallback]) -> bool:
    """Whether a callback is called. Reporters of transformers, such as TensorBoard's, and what is derived from one are
    not while the values are placeholders."""
    return not (extracting_graphs() and _is_reporter(callback if isinstance(callback, type) else type(callback)))


def _is_reporter(kind: type) -> bool:
    return any(each.__module__.startswith(_INTEGRATIONS) for each in kind.__mro__)


_EMPTY = {name: each for name, each in vars(TrainerCallback).items() if name.startswith("on_")}
# transformers' callbacks, which do nothing: a run shows its bar and its lines until a program removes them.
_SHOWS = [type(each.__name__, (each,), _EMPTY) for each in (ProgressCallback, PrinterCallback)]


class DefaultFlowCallback(trainer_callback.DefaultFlowCallback):
    """Sets the control's flags by the strategies of the arguments.

    `epoch` fires at the end of every epoch, also of one that `max_steps` or a callback ends early. `steps` also
    evaluates and saves at the end of the run, so that no training is lost. There are no evaluations before
    `eval_delay`.
    """

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        super().on_step_end(args, state, control)
        if state.global_step >= state.max_steps:
            end_run(args, control)
        return control


def end_run(args: TrainingFields, control: TrainerControl) -> None:
    """Lets the run end here, with what the strategy `steps` does at the end of a run."""
    control.should_training_stop = True
    control.should_evaluate |= args.eval_strategy == "steps"
    control.should_save |= args.save_strategy == "steps"


def is_better(args: TrainingFields, value: float, best: float) -> bool:
    """Whether the metric for the best model improved; NaN is never better."""
    return value > best if args.greater_is_better else value < best


@contextmanager
def same_runs(folder: Path, args: Any, callbacks: Sequence[Any]) -> Iterator[None]:
    """Inside the block, in which they begin, the callbacks continue the tracker runs of this folder, or name new ones;
    what a program has named itself stays. For rank 0.

    W&B takes a run's id from the environment. MLflow gives it, so it is noted at the end, with the server that it is
    of. trackio knows runs by their name, to which the id is added. TensorBoard's run is a folder.
    """
    path, kinds = folder / TRACKERS, {type(each).__name__: each for each in callbacks}
    known = read_object(path)
    known = known if str(known.get("id", "")).isalnum() else {"id": secrets.token_hex(4)}
    variables = {"WANDB_RUN_ID": known["id"], "WANDB_RESUME": "allow"} if "WANDB_RUN_ID" not in os.environ else {}
    mlflow, board = sys.modules.get("mlflow") if "MLflowCallback" in kinds else None, kinds.get("TensorBoardCallback")
    if mlflow is not None and mlflow.active_run() is None and "MLFLOW_RUN_ID" not in os.environ:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or mlflow.get_tracking_uri()
        variables |= {"MLFLOW_RUN_ID": known["mlflow"]} if known.get("mlflow_uri") == uri else {}
    if board is not None and board.logging_dir is None:
        for part in ("runs", f"runs/{known['id']}"):
            make_own_folder(folder / part)
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
    make_folder(folder)
    replace_json(path, known)
