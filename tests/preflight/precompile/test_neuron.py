"""Neuron's compiler: its tool starts the command again to extract graphs, and its cache is where the recipe says.

There is no Neuron device here. A program takes the place of `neuron_parallel_compile`: like the real one it takes its
own options out of the command, sets the variable by which it asks for graphs alone, and runs the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stepmark.cli.main import run
from tests.support.ranks import ROOT, Ranks
from tests.support.recipes import write_recipe

HERE = "tests.preflight.precompile.test_neuron"
TOOL = """#!{python}
import argparse, json, os, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("--command", choices=["collect-and-compile", "collect", "compile"])
parser.add_argument("--log_level", choices=["INFO", "DEBUG", "ERROR", "WARNING"])
_, command = parser.parse_known_args()
names = ("NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS")
found = {{name: os.environ.get(name) for name in names}}
with open({seen!r}, "w") as file:
    json.dump({{"command": command, **found}}, file)
sys.exit(subprocess.run(command, env={{**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1"}}).returncode)
"""


def command_line(*arguments: str) -> int:
    """`stepmark` in a rank."""
    return run(list(arguments))


def host_command(*arguments: str) -> None:
    """`stepmark` where a Neuron device seems to be, in a rank."""
    with (
        mock.patch("stepmark.preflight.precompile.neuron.neuron_device_present", return_value=True),
        mock.patch("stepmark.runtime.compile_cache.neuron_device_present", return_value=True),
    ):
        sys.exit(run(list(arguments)))


def trained_on_neuron(recipe: str, compiles: bool = True) -> list[dict[str, Any]]:
    """Trains where a Neuron device seems to be; the log lines. With `compiles` a stand-in for Neuron's compiler keeps
    what each new graph is compiled to, unless its cache has it."""
    import torch_xla

    from stepmark.config.recipe import read_recipe
    from stepmark.recipe.train import train
    from stepmark.runtime.xla import graph_counts, pending_graph

    run_graph = torch_xla.sync

    def sync(wait: bool = False) -> None:
        before, text = graph_counts().compiled, pending_graph()
        run_graph(wait=wait)
        if compiles and graph_counts().compiled > before:
            version = Path(os.environ["NEURON_COMPILE_CACHE_URL"]) / "neuronxcc-2.21.33363.0+82129205"
            keep_graph(version / f"MODULE_{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}+e30acd3a")

    with (
        mock.patch("stepmark.runtime.compile_cache.neuron_device_present", return_value=True),
        mock.patch("stepmark.runtime.compile_cache._runs_on_neuron", return_value=True),
        mock.patch.object(torch_xla, "sync", sync),
    ):
        given = read_recipe(recipe, {})
        train(given)
    lines = (Path(given.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def keep_graph(folder: Path, size: int = 2048) -> None:
    """As Neuron's compiler keeps a graph."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.neff").write_bytes(bytes(size))
    if size > 1024:
        (folder / "model.done").touch()


def on_a_neuron_host(ranks: Ranks, folder: Path, *arguments: str, tool: bool = True) -> tuple[int | None, str]:
    """`host_command` with the stand-in for the tool on the PATH; the exit code, and what was printed."""
    programs = folder / "bin"
    programs.mkdir()
    if tool:
        path = programs / "neuron_parallel_compile"
        path.write_text(TOOL.format(python=sys.executable, seen=str(folder / "seen.json")))
        path.chmod(0o755)
    environment = {"PATH": f"{programs}{os.pathsep}/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = ranks.run(f"{HERE}:host_command", *arguments, environment=environment)
    return done.codes[0], done.logs[0]


@pytest.mark.xla
def test_precompile_runs_under_neurons_tool(ranks: Ranks, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, device="xla", compile_cache="s3://bucket/graphs")
    code, printed = on_a_neuron_host(ranks, tmp_path, "precompile", str(recipe), "--log_level", "warning")
    assert code == 0, printed
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["NEURON_COMPILE_CACHE_URL"] == "s3://bucket/graphs"
    words = shlex.split(seen["command"][-1])
    assert words[2:] == ["-m", "stepmark", "precompile", str(recipe), "--log_level", "warning"]
    assert "extracted" in printed
    assert "in None" not in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.xla
def test_without_the_tool_there_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    code, printed = on_a_neuron_host(
        ranks, tmp_path, "precompile", str(write_recipe(tmp_path, device="xla")), tool=False
    )
    assert code == 1
    assert (
        printed
        == "error: precompile: neuron_parallel_compile is not on the PATH; install torch-neuronx, which brings it\n"
    )


@pytest.mark.xla
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.prove)])
def test_train_under_neurons_tool_makes_the_graphs_and_trains_nothing(ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    """The recipe asks for a million steps, and its data is not there."""
    fields = {
        "max_steps": 1_000_000,
        "train_file": str(tmp_path / "none.txt"),
        "compile_cache": str(tmp_path / "cache"),
    }
    recipe = write_recipe(tmp_path, device="xla", **fields)
    environment = {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}
    found = ranks.run(f"{HERE}:command_line", "train", str(recipe), nproc=nproc, environment=environment)
    assert found.check() == [0] * nproc
    assert "extracted" in found.logs[0]
    assert not (tmp_path / "out").exists()


def test_an_eager_device_compiles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["precompile", str(write_recipe(tmp_path))]) == 2
    assert "error: device: cpu runs operations as they come and compiles no graphs" in capsys.readouterr().err
    assert run(["precompile", str(write_recipe(tmp_path, compile_cache=False))]) == 2
    assert "error: compile_cache: is false, so no graph would be kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "given", "expected"),
    [
        (None, {}, {"NEURON_COMPILE_CACHE_URL": "CACHE/graphs/neuron", "NEURON_CC_FLAGS": None}),
        (True, {"NEURON_COMPILE_CACHE_URL": "/u"}, {"NEURON_COMPILE_CACHE_URL": "CACHE/graphs/neuron"}),
        (None, {"NEURON_COMPILE_CACHE_URL": "/u"}, {"NEURON_COMPILE_CACHE_URL": "/u"}),
        (None, {"NEURON_CC_FLAGS": "--cache_dir=/f"}, {"NEURON_COMPILE_CACHE_URL": None}),
        ("s3://b/c", {}, {"NEURON_COMPILE_CACHE_URL": "s3://b/c"}),
        ("/f", {"NEURON_CC_FLAGS": "--cache_dir=/f -O1"}, {"NEURON_COMPILE_CACHE_URL": None}),
        ("~/graphs", {}, {"NEURON_COMPILE_CACHE_URL": "CACHE/graphs"}),
        ("graphs", {}, {"NEURON_COMPILE_CACHE_URL": "CACHE/graphs"}),
        (False, {"NEURON_CC_FLAGS": "-O1"}, {"NEURON_CC_FLAGS": "-O1 --no_cache", "NEURON_COMPILE_CACHE_URL": None}),
    ],
)
def test_the_variables_of_neurons_cache(
    setting: Any,
    given: dict[str, str],
    expected: dict[str, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stepmark.runtime import compile_cache

    monkeypatch.setattr(compile_cache, "neuron_device_present", lambda: True)
    for name in ("STEPMARK_CACHE", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS"):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    compile_cache.prepare_compile_cache(setting)
    found = {name: os.environ.get(name) for name in expected}
    assert found == {name: value and value.replace("CACHE", str(tmp_path)) for name, value in expected.items()}


def test_precompile_keeps_what_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepmark.runtime import compile_cache

    monkeypatch.delenv("XLA_PERSISTENT_CACHE_PATH", raising=False)
    assert [compile_cache.switched_on(each) for each in (None, "/f", False)] == [True, "/f", False]
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", "/own")
    assert compile_cache.switched_on(None) is None
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_PATH")
    monkeypatch.setattr(compile_cache, "neuron_device_present", lambda: True)
    assert compile_cache.switched_on(None) is None


def test_two_caches_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepmark.errors import UsageError
    from stepmark.runtime import compile_cache

    monkeypatch.setattr(compile_cache, "neuron_device_present", lambda: True)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=/a")
    with pytest.raises(UsageError, match="they name /b and /a; leave one of them out"):
        compile_cache.prepare_compile_cache("/b")


@pytest.mark.xla
def test_a_run_logs_which_graphs_neurons_cache_had(ranks: Ranks, tmp_path: Path) -> None:
    fields = {"device": "xla", "logging_steps": 1, "compile_cache": str(tmp_path / "cache")}
    logged = []
    for attempt in range(2):
        recipe = write_recipe(tmp_path, output_dir=str(tmp_path / f"run-{attempt}"), **fields)
        (lines,) = ranks.run(f"{HERE}:trained_on_neuron", str(recipe)).check()
        logged.append([(each["graph_cache_hits"], each["graph_cache_misses"]) for each in lines])
        assert sum(logged[-1][-1]) == lines[-1]["graph_compilations"] > 0
    assert [hits for hits, _ in logged[0]] == [0, 0]
    assert [misses for _, misses in logged[1]] == [0, 0]
    assert logged[0][-1][1] == logged[1][-1][0]


def test_lookups_in_neurons_cache(tmp_path: Path) -> None:
    from stepmark.runtime.neuron.neuron_cache import CacheLookups

    version = tmp_path / "neuronxcc-2.21"
    keep_graph(version / "MODULE_old")
    keep_graph(version / "MODULE_failed", size=10)
    lookups = CacheLookups(tmp_path, requested=2)
    assert lookups.count(2) == (0, 0)
    assert lookups.count(5) == (3, 0)
    keep_graph(version / "MODULE_new")
    keep_graph(version / "MODULE_failed")  # tried again
    assert lookups.count(5) == (3, 0)  # another process's, so far
    assert lookups.count(8) == (4, 2)
    keep_graph(version / "MODULE_of_this_rank")
    keep_graph(version / "MODULE_of_another_rank")
    assert lookups.count(9) == (4, 3)
    assert lookups.count(10) == (5, 3)


@pytest.mark.parametrize("setting", ["s3://bucket/graphs", False])
def test_lookups_that_cannot_be_seen_are_not_counted(
    setting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from stepmark.launch.world import World
    from stepmark.runtime import compile_cache
    from stepmark.runtime.eager import EagerRuntime

    monkeypatch.setattr(compile_cache, "neuron_device_present", lambda: True)
    for name in ("NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS"):
        monkeypatch.setenv(name, "")
    compile_cache.prepare_compile_cache(setting)
    counted: list[Path] = []
    runtime = mock.Mock(spec=EagerRuntime, lazy=True, host_memory=False, count_in_neuron_cache=counted.append)
    for given in (setting, None):
        compile_cache.open_compile_cache(runtime, given, World.from_environment())
    assert (counted, compile_cache.kept_in()) == ([], None if setting is False else setting)
