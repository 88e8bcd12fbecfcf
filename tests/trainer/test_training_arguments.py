"""What scripts for transformers' Trainer read from their arguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.debug_utils import DebugOption

from stepmark import Trainer, TrainingArguments
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks


@dataclass
class ScriptArguments(TrainingArguments):
    """As many scripts have them."""

    margin: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.margin *= 2


def test_the_device_is_an_object_and_keeps_its_name() -> None:
    made = ScriptArguments(device="cpu", max_steps=3)
    assert made.device == torch.device("cpu")
    assert torch.zeros(1).to(made.device).device == made.device
    assert made.device_name == json.loads(made.to_json_string())["device"] == made.to_dict()["device"] == "cpu"
    assert "device='cpu'" in repr(TrainingArguments(device="cpu"))
    for other in (dataclasses.replace(made, max_steps=4), pickle.loads(pickle.dumps(made))):
        assert (other.device_name, other.device) == ("cpu", torch.device("cpu"))
    assert TrainingArguments(device=torch.device("cpu")).device_name == "cpu"  # type: ignore[arg-type]
    assert TrainingArguments().device_name == "auto"
    with pytest.raises(UsageError, match="^device: should be text, and is 3"):
        TrainingArguments(device=3)  # type: ignore[arg-type]


def test_a_subclass_may_have_a_device_of_its_own() -> None:
    @dataclass
    class OnTheCpu(ScriptArguments):
        device: str = "cpu"  # type: ignore[assignment, misc]

    for made in (OnTheCpu(), OnTheCpu(), dataclasses.replace(OnTheCpu(), max_steps=4)):
        assert (made.device_name, made.device) == ("cpu", torch.device("cpu"))
    assert OnTheCpu(device="warp").device_name == "warp"


def test_an_unknown_device_is_named_where_it_is_used() -> None:
    made = TrainingArguments(device="warp")
    assert "device='warp'" in repr(made)
    with pytest.raises(UsageError, match="^device: 'warp' is unknown"):
        made.device  # noqa: B018


def test_a_script_reads_what_it_is_to_do() -> None:
    parser = transformers.HfArgumentParser(ScriptArguments)  # type: ignore[arg-type]
    (made,) = parser.parse_args_into_dataclasses(
        ["--do_train", "--do_predict", "false", "--margin", "2", "--device", "cpu"]
    )
    assert (made.do_train, made.do_eval, made.do_predict, made.margin) == (True, False, False, 4.0)
    assert TrainingArguments(eval_strategy="epoch").do_eval


def test_values_are_those_that_scripts_compare() -> None:
    made = TrainingArguments(None, lr_scheduler_kwargs='{"factor": 0.5}', report_to="none")  # type: ignore[arg-type]
    assert Path(made.output_dir).name == "trainer_output"
    assert (made.lr_scheduler_kwargs, made.report_to) == ({"factor": 0.5}, [])
    assert TrainingArguments(report_to="tensorboard").report_to == ["tensorboard"]
    assert TrainingArguments().lr_scheduler_kwargs is None


def test_one_rank_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TrainingArguments(device="cpu", per_device_train_batch_size=3, per_device_eval_batch_size=5)
    assert (made.world_size, made.process_index, made.local_process_index, made.local_rank) == (1, 0, 0, -1)
    assert (made.n_gpu, made.should_log, made.should_save) == (0, True, True)
    assert (made.train_batch_size, made.eval_batch_size) == (3, 5)
    assert made.parallel_mode == transformers.training_args.ParallelMode.NOT_PARALLEL
    with made.main_process_first(desc="mapping"):
        pass
    assert TrainingArguments(log_level="info").get_process_log_level() == logging.INFO
    monkeypatch.setattr(TrainingArguments, "should_log", False)
    assert TrainingArguments(log_level="info").get_process_log_level() == logging.WARNING


def test_a_rank_that_the_launcher_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainingArguments(local_rank=0).local_rank == -1
    with pytest.raises(UsageError, match="^local_rank: is 2, but the launcher says -1"):
        TrainingArguments(local_rank=2)
    for name, value in {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    made = TrainingArguments(local_rank=1)
    assert (made.local_rank, made.process_index, made.world_size, made.should_save, made.should_log) == (
        1,
        3,
        4,
        False,
        False,
    )


def test_the_machines_of_a_run_log_and_save_as_the_arguments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of the second machine."""
    assert TrainingArguments(save_on_each_node=True).should_save
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert TrainingArguments().should_log
    made = TrainingArguments(log_on_each_node=False, log_level="info")
    assert (made.should_log, made.get_process_log_level()) == (False, logging.WARNING)
    with pytest.raises(UsageError, match="^save_on_each_node: output_dir is one folder that all machines see"):
        TrainingArguments(save_on_each_node=True)
    with pytest.raises(UsageError, match="^save_on_each_node: "):
        made.save_on_each_node = True


def test_fields_of_a_recipe_become_arguments(tmp_path: Path) -> None:
    """Callbacks read `args` as transformers' callbacks do."""
    trainer = Trainer(tiny_model(), TrainingFields(str(tmp_path), device="cpu", max_steps=2), train_dataset=Blocks(4))
    assert trainer.args.world_size == 1
    assert trainer.args.max_steps == 2
    given = TrainingArguments(str(tmp_path), device="cpu")
    assert Trainer(tiny_model(), given).args is given


def order_of_ranks(folder: str, local: bool, fails: bool) -> list[Any]:
    """What this rank found when its turn came."""
    args = TrainingArguments(folder, device="cpu")
    mark = Path(folder) / "prepared"
    try:
        with args.main_process_first(local=local, desc="mapping"):
            found = mark.exists()
            if args.process_index == 0:
                if fails:
                    raise ValueError("no disk")
                mark.touch()
    except (ValueError, UsageError) as error:
        return [args.process_index, f"{type(error).__name__}: {error}"]
    return [args.process_index, found]


@pytest.mark.parametrize("local", [True, False])
def test_the_first_rank_prepares_and_the_others_find_it(ranks: Ranks, tmp_path: Path, local: bool) -> None:
    found = ranks.run("tests.trainer.test_training_arguments:order_of_ranks", str(tmp_path), local, False, nproc=2)
    assert found.check() == [[0, False], [1, True]]


def test_others_do_not_wait_for_a_first_rank_that_fails(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("tests.trainer.test_training_arguments:order_of_ranks", str(tmp_path), False, True, nproc=2)
    assert found.check() == [
        [0, "ValueError: no disk"],
        [1, "UsageError: main_process_first: mapping has failed on rank 0: no disk"],
    ]


@dataclass
class ModelArguments:
    """As the example scripts of transformers have them."""

    dtype: str | None = field(default=None)


def test_a_script_may_have_a_dtype_of_its_own() -> None:
    parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))  # type: ignore[arg-type]
    script, made = parser.parse_args_into_dataclasses(["--dtype", "auto", "--parameter_dtype", "bfloat16"])
    assert (script.dtype, made.dtype, made.parameter_dtype) == ("auto", "bfloat16", "bfloat16")
    assert dataclasses.replace(made, max_steps=3).dtype == "bfloat16"
    given = TrainingArguments(dtype="bfloat16")  # type: ignore[call-arg]
    assert (given.dtype, given.parameter_dtype) == ("bfloat16", "bfloat16")
    assert TrainingArguments(dtype=torch.bfloat16).dtype == "bfloat16"  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="^dtype, parameter_dtype: they are the same"):
        TrainingArguments(dtype="bfloat16", parameter_dtype="float32")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="^dtype: 'float16' is unknown"):
        TrainingArguments(dtype="float16")  # type: ignore[call-arg]


def test_compilation_and_debugging_are_read_as_in_transformers() -> None:
    made = TrainingArguments(torch_compile_mode="reduce-overhead", debug="underflow_overflow")
    assert (made.torch_compile, made.torch_compile_backend, made.debug) == (
        True, "inductor", [DebugOption.UNDERFLOW_OVERFLOW],
    )  # fmt: skip
    assert (TrainingArguments(debug=None).debug, TrainingArguments().torch_compile_backend) == ([], None)
    assert TrainingArguments(debug=made.debug).debug == made.debug
    for name in ("tpu_metrics_debug", "underflow"):
        with pytest.raises(UsageError, match=f"^debug: .*{name}"):
            TrainingArguments(debug=name)


def test_a_job_of_kubeflow_reports_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainingArguments().report_to == []
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://here")
    assert TrainingArguments(report_to="tensorboard").report_to == ["tensorboard", "kubeflow"]
    assert TrainingArguments(report_to=["kubeflow"]).report_to == ["kubeflow"]
