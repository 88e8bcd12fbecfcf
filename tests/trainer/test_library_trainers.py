"""TRL's trainers on Stepmark's Trainer, against TRL's own."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from stepmark import Trainer
from stepmark.errors import UsageError
from stepmark.trainer.run_hooks import RunHooks
from tests.support.devices import HAS_XLA
from tests.support.ranks import Ranks

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing. is deprecated")


from tests.support import trl_programs  # noqa: E402
from tests.support.trl_programs import KINDS, logs, make, trained  # noqa: E402

TRAINED = "tests.support.trl_programs:trained"
OWN = {"tokens_per_second", "weights", "graph_compilations", "graph_executions"}


def same(found: list[dict[str, float]], expected: list[dict[str, float]], *names: str, within: float) -> None:
    """The logs of all steps, in the values of these names or in all."""
    assert [log["step"] for log in found] == [log["step"] for log in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for name in names or sorted(mine.keys() - OWN):
            assert mine[name] == pytest.approx(theirs[name], rel=within, abs=within), (mine["step"], name)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_metrics_are_those_of_plain_trl(tmp_path: Path, kind: str) -> None:
    plain, ours = make(kind, tmp_path / "plain", plain=True), make(kind, tmp_path / "ours")
    assert isinstance(ours, type(plain))
    assert isinstance(ours.args, type(plain.args))
    plain.train()
    ours.train()
    assert len(logs(ours)) == 20
    same(logs(ours), logs(plain), within=1e-6)
    assert logs(ours)[-1]["loss"] != logs(ours)[0]["loss"]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.prove] * (kind != "DPO")) for kind in KINDS])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    """Logs are means of three steps, so that the kill is in the middle of one."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3, "max_steps": 9}
    options |= {"async_save": True, "lora": kind == "DPO"}
    killed = ranks.run(TRAINED, kind, str(tmp_path / "killed"), {**options, "kill_at": 6})
    assert killed.codes == [-9]
    resumed = trained(kind, str(tmp_path / "killed"), {**options, "resume": True})
    complete = trained(kind, str(tmp_path / "complete"), options)
    for log in (*resumed, *complete):
        log.pop("tokens_per_second", None)
    assert resumed == complete
    assert (tmp_path / "killed" / "run" / "README.md").is_file()


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_split_a_model_have_the_losses_of_one(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    split = {"max_steps": 4, "tensor_parallel_size": 2, "parallelize_embedding": False}
    expected = trained(kind, str(tmp_path / "one"), {"max_steps": 4})
    for found in ranks.run(TRAINED, kind, str(tmp_path / "ours"), split, nproc=2).check():
        same(found, expected, within=1e-5)


@pytest.mark.prove
@pytest.mark.skipif(HAS_XLA, reason="plain TRL takes torch_xla's device, whatever use_cpu says")
@pytest.mark.parametrize("options", [{}, {"zero_1": True}, {"fsdp": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_losses_of_plain_trl(
    tmp_path: Path, ranks: Ranks, kind: str, options: dict[str, Any]
) -> None:
    plain = {"plain": True, "rows": 192}
    expected = ranks.run(TRAINED, kind, str(tmp_path / "plain"), plain, nproc=2).check()[0]
    found = ranks.run(TRAINED, kind, str(tmp_path / "ours"), {**options, "rows": 192}, nproc=2).check()
    for each in found:
        same(each, expected, within=1e-5)


@pytest.mark.skipif(HAS_XLA, reason="plain TRL takes torch_xla's device, whatever use_cpu says")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.prove] * (kind != "KTO")) for kind in KINDS])
def test_fillers_of_the_last_step_are_in_no_metric(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    """Which has one micro-batch of each rank where others have two."""
    options = {"rows": 44, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options |= {"max_steps": -1, "num_train_epochs": 1}
    expected = ranks.run(TRAINED, kind, str(tmp_path / "plain"), {**options, "plain": True}, nproc=2).check()[0]
    for found in ranks.run(TRAINED, kind, str(tmp_path / "ours"), options, nproc=2).check():
        same(found, expected, within=1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "KTO"])  # whose `kl` is of each rank's own batch
def test_two_ranks_evaluate_like_one(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    """Of eight samples in batches of eight, the second rank has none."""
    options = {"max_steps": 1, "eval_rows": 8, "eval_strategy": "steps", "eval_steps": 1}
    program = "tests.support.trl_programs:evaluated"
    (expected,) = ranks.run(program, kind, str(tmp_path / "one"), options).check()
    halves = {**options, "per_device_train_batch_size": 2}
    for found in ranks.run(program, kind, str(tmp_path / "two"), halves, nproc=2).check():
        assert found == pytest.approx(expected, rel=1e-4)


HOSTING: Any = [
    ("SFT", 3, 2, {}),
    ("SFT", 3, 1, {"fsdp": True}),
    ("SFT", 4, 2, {"zero_1": True}),
    ("SFT", 3, 2, {"fsdp": True, "packing": True}),
    ("DPO", 3, 2, {}),
    ("DPO", 3, 2, {"fsdp": True}),
    ("DPO", 4, 2, {"lora": True}),
    ("Reward", 3, 1, {}),
    ("Reward", 3, 2, {"fsdp": True}),
    ("Reward", 4, 2, {"zero_1": True}),
]


@pytest.mark.parametrize(
    ("kind", "replicas", "processes", "options"),
    [pytest.param(*cell, marks=[pytest.mark.prove] * (number > 0)) for number, cell in enumerate(HOSTING)],
)
def test_processes_that_host_ranks_have_the_bits_of_all(
    tmp_path: Path, ranks: Ranks, kind: str, replicas: int, processes: int, options: dict[str, Any]
) -> None:
    """Weights, losses and metrics, at the end of an epoch that some ranks have no samples of, and of evaluations."""
    options = {"data_parallel_replicas": replicas, "max_steps": 5, "rows": 4 * replicas + 2, "eval_rows": 9, **options}
    options |= {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    program = "tests.support.trl_programs:history"
    (expected, *_) = ranks.run(program, kind, str(tmp_path / "all"), options, nproc=replicas).check()
    assert {log["step"] for log in expected} == {2, 4, 5}
    for found in ranks.run(program, kind, str(tmp_path / "few"), options, nproc=processes).check():
        assert found == expected


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward"])
def test_a_hosted_run_goes_on_with_its_metrics_on_other_processes(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    """Saved in the middle of what a log is the mean of."""
    options: dict[str, Any] = {"data_parallel_replicas": 3, "logging_steps": 3, "max_steps": 6, "eval_rows": 3}
    options |= {"save_strategy": "steps", "save_steps": 4}
    program = "tests.support.trl_programs:history"
    (expected, *_) = ranks.run(program, kind, str(tmp_path / "all"), options, nproc=3).check()
    killed = ranks.run(TRAINED, kind, str(tmp_path / "few"), {**options, "kill_at": 5}, nproc=2)
    assert any(killed.codes)
    resumed = ranks.run(program, kind, str(tmp_path / "few"), {**options, "resume": True}, nproc=1).check()
    assert resumed == [expected]


def test_a_loss_that_joins_ranks_is_refused_where_a_process_hosts_several(tmp_path: Path) -> None:
    """KTO's subtracts the divergence over all ranks; a gather of a subclass's own is no metric of TRL's."""
    from stepmark.trl import SFTTrainer

    def compute_loss(self: Any, *given: Any, **options: Any) -> Any:
        loss = SFTTrainer.compute_loss(self, *given, **options)
        return loss + self.accelerator.gather(loss).mean()

    with pytest.raises(UsageError, match="data_parallel_replicas: .*losses .*join"):
        make("KTO", tmp_path / "kto", data_parallel_replicas=2).train()
    trainer = make("SFT", tmp_path / "sft", data_parallel_replicas=2)
    trainer.__class__ = type("Own", (SFTTrainer,), {"compute_loss": compute_loss, "__module__": __name__})
    with pytest.raises(UsageError, match="data_parallel_replicas: the loss joins what ranks have computed"):
        trainer.train()


def test_ranks_gather_what_each_has(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run("tests.support.trl_programs:gathered", nproc=2).check()):
        vectors, scalars, truths, *filled, read, first = found
        assert filled == [[0.0], [0.0, 1.0]]
        assert (vectors, scalars, truths) == ([0.0, 10.0, 11.0], [0, 1], [False, False, True])
        assert (read, first) == (list(range(9)), rank == 0)


def test_sft_on_a_lazy_device_has_one_graph_a_micro_step(tmp_path: Path, ranks: Ranks) -> None:
    pytest.importorskip("torch_xla")
    counted = ranks.run("tests.support.trl_programs:graphs", str(tmp_path)).check()[0]
    later = counted[-3:]
    assert {compilations for compilations, _ in later} == {later[0][0]}
    executions = [count for _, count in later]
    assert [b - a for a, b in itertools.pairwise(executions)] == [1, 1]


def test_evaluations_have_the_metrics_of_trl(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2}
    trainer = make("SFT", tmp_path, **options, eval_rows=8)
    trainer.train()
    history = trainer.state.log_history
    evaluated, trained = ([log for log in history if name in log] for name in ("eval_loss", "loss"))
    assert len(evaluated) == 2
    assert all("eval_entropy" in log and "entropy" not in log for log in evaluated)
    assert [log["entropy"] > 0 for log in trained] == [True]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"tensor_parallel_size": 2}, "parallelize_embedding"),
        ({"sequence_parallel": True, "tensor_parallel_size": 1}, "sequence_parallel"),
        ({"beta": 0.1}, "beta"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make("SFT", tmp_path, **options)


@pytest.mark.parametrize("own", [False, True])
def test_only_a_save_of_the_users_own_waits_for_the_disk(own: bool) -> None:
    """A subclass that overrides anything else keeps `async_save`."""
    from stepmark.trl import SFTTrainer

    body = {"_save_checkpoint": lambda self, model, trial: Trainer._save_checkpoint(self, model, trial)} if own else {}
    kind = type("Own", (SFTTrainer,), {**body, "__module__": __name__})
    calls: list[str] = []
    made = kind.__new__(kind)
    made._hooks = RunHooks(made)
    made._hooks._save = (lambda: calls.append("save"), lambda: calls.append("wait"))
    Trainer._save_checkpoint(made, None)  # type: ignore[arg-type]
    assert calls == (["save", "wait"] if own else ["save"])


@pytest.mark.parametrize("sharded", [{"fsdp": True}, {"tensor_parallel_size": 2, "parallelize_embedding": False}])
def test_what_needs_complete_weights_is_refused_where_they_are_sharded(tmp_path: Path, sharded: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="^sync_ref_model"):
        make("DPO", tmp_path, sync_ref_model=True, **sharded)
    if "fsdp" in sharded:
        with pytest.raises(UsageError, match="^precompute_ref_log_probs"):
            make("DPO", tmp_path, precompute_ref_log_probs=True, **sharded)


def test_a_cache_that_other_ranks_would_not_find_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    """TRL's file is beside the data, or in a folder of the process that has them in memory."""
    options = {"precompute_ref_log_probs": True, "max_steps": 1}
    for log in ranks.run(TRAINED, "DPO", str(tmp_path), options, nproc=2).logs:
        assert "UsageError: precompute_ref_log_probs: the data are in memory" in log


def test_a_run_state_of_a_subclass_needs_no_super(tmp_path: Path) -> None:
    """TRL's running sums are saved beside it."""
    from stepmark.trl import SFTTrainer

    made = make("SFT", tmp_path, max_steps=1)
    own: list[Any] = []
    body = {"run_state": lambda self: {"own": 3}, "load_run_state": lambda self, state: own.append(state["own"])}
    made.__class__ = type("Own", (SFTTrainer,), {**body, "__module__": __name__})
    made._metrics["train"]["entropy"].append(0.5)
    state = made._complete_run_state()
    made._metrics["train"].clear()
    made._load_complete_run_state(state)
    assert (own, dict(made._metrics["train"])) == ([3], {"entropy": [0.5]})
    made._load_complete_run_state({"own": 4})  # of a checkpoint that lacks the sums
    assert own == [3, 4]


def test_trainers_that_generate_are_refused_by_name() -> None:
    with pytest.raises(ImportError, match="GRPOTrainer: generates while it trains"):
        from stepmark.trl import GRPOTrainer  # noqa: F401


def test_configs_of_trl_and_of_stepmark_are_converted(tmp_path: Path) -> None:
    from stepmark import TrainingArguments
    from stepmark.trl import SFTConfig, SFTTrainer

    model = trl_programs.save_model(tmp_path / "model", "SFT")
    options: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "use_cpu": True, "learning_rate": 0.5}
    theirs = trl.SFTConfig(**options, bf16=False, max_length=7)
    for given, length in ((theirs, 7), (TrainingArguments(**options), 1024)):
        made: Any = SFTTrainer(str(model), given, train_dataset=trl_programs.dataset("SFT", 8))
        assert isinstance(made.args, SFTConfig)
        assert (made.args.learning_rate, made.args.max_length) == (0.5, length)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_replaced(tmp_path: Path, kind: str) -> None:
    import stepmark.trl

    fields: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    config = getattr(stepmark.trl, f"{kind}Config")(**fields, learning_rate=0.5)
    replaced = dataclasses.replace(config, max_length=7)
    assert (type(replaced), replaced.learning_rate, replaced.max_length) == (type(config), 0.5, 7)
    assert replaced.average_tokens_across_devices is False
    assert repr(dataclasses.replace(replaced, max_length=config.max_length)) == repr(config)
    with pytest.raises(UsageError, match="average_tokens_across_devices"):
        type(config)(**fields, average_tokens_across_devices=False)
    with pytest.raises(UsageError, match="tf32"):
        dataclasses.replace(config, tf32=True)


def test_without_trl_an_import_names_the_extra(ranks: Ranks) -> None:
    told = ranks.script("import sys; sys.modules['trl'] = None\nfrom stepmark.trl import SFTTrainer")
    assert (
        told.stderr.splitlines()[-1] == "ImportError: stepmark.trl: trl is not installed; pip install 'stepmark[trl]'"
    )
