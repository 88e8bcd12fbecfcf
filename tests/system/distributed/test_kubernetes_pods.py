"""The containers of examples/kubernetes, as processes of this machine: with the pods' variables and command lines they
form one run, and when one is asked to stop, all save and exit with the code that the Job ignores. Jobs with fewer pods,
or with more again, go on with it."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stepmark.filesystem.json_files import read_lines
from stepmark.launch.signal_listener import INTERRUPTED
from stepmark.trainer.run_folder.run_log import EVENTS
from tests.support.braked_run import LONG, BrakedRun
from tests.support.buckets import make_bucket, object_store
from tests.support.processes import free_port
from tests.support.ranks import ROOT
from tests.support.recipes import write_recipe
from tests.support.run_folders import model_digest

pytestmark = pytest.mark.prove

MANIFESTS = ROOT / "examples" / "kubernetes"
STEPS = 60
PODS = 2


class Pods(BrakedRun):
    """The pods of a Job, where /shared is the run's folder."""

    def __init__(self, folder: Path, manifest: str, pods: int) -> None:
        super().__init__(folder)
        *_, job = YAML(typ="safe").load_all(MANIFESTS / manifest)
        (self._container,) = job["spec"]["template"]["spec"]["containers"]
        self.pods = pods
        self.places = dict.fromkeys(("/shared", "/recipes", "/scratch"), str(folder))
        write_recipe(folder, logging_steps=1, max_steps=STEPS, save_strategy="steps", save_steps=5)

    def start(self, *, slowly: bool = False) -> list[subprocess.Popen[bytes]]:
        if slowly:
            self.brake.touch()
        port = str(free_port())
        started = [self._start(index, port) for index in range(self.pods)]
        if slowly:
            self.wait_until_it_trains()
        return started

    def _start(self, index: int, port: str) -> subprocess.Popen[bytes]:
        words = [*self._container["command"], *self._container["args"]]
        command = [self._filled(word).replace("--nproc=8", "--nproc=2") for word in words]
        with open(self.folder / f"log-{index}", "ab") as log:
            return subprocess.Popen(command, env=self._variables(index, port), stdout=log, stderr=log)

    def _variables(self, index: int, port: str) -> dict[str, str]:
        """The container's, with what the cluster would fill in and the size and address of this one."""
        here = {"WORLD_SIZE": str(self.pods), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        filled = {each["name"]: self._filled(_value(each, index)) for each in self._container["env"]}
        return self.environment(**{**filled, **{name: here[name] for name in here if name in filled}})

    def _filled(self, text: str) -> str:
        for name, place in self.places.items():
            text = text.replace(name, place)
        return text

    def evict(self) -> None:
        """Starts the pods, and asks the last one to stop once they train."""
        started = self.start(slowly=True)
        started[-1].send_signal(signal.SIGTERM)
        assert [process.wait(timeout=LONG) for process in started] == [INTERRUPTED] * self.pods, self.log()

    def end(self, processes: list[subprocess.Popen[bytes]]) -> list[int]:
        self.brake.unlink(missing_ok=True)
        return [process.wait(timeout=LONG) for process in processes]


def _value(variable: Any, index: int) -> str:
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    if path is not None:
        assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return str(index) if path is not None else str(variable["value"]).replace("$(RANK)", str(index))


@pytest.mark.parametrize(("manifest", "pods"), [("one_pod.yaml", 1), ("several_pods.yaml", PODS)])
def test_an_evicted_pod_costs_nothing(tmp_path: Path, manifest: str, pods: int) -> None:
    undisturbed, run = (Pods(tmp_path / name, manifest, pods) for name in ("undisturbed", "evicted"))
    assert undisturbed.end(undisturbed.start()) == [0] * pods, undisturbed.log()
    run.evict()
    assert run.end(run.start()) == [0] * pods, run.log()
    assert run.losses() == undisturbed.losses()
    assert run.resumptions()


def test_a_pod_without_a_volume_goes_on_from_the_bucket(tmp_path: Path) -> None:
    undisturbed = Pods(tmp_path / "undisturbed", "one_pod.yaml", 1)
    assert undisturbed.end(undisturbed.start()) == [0], undisturbed.log()
    run = Pods(tmp_path / "evicted", "one_pod_bucket.yaml", 1)
    with object_store() as proxy:
        address = f"{make_bucket(proxy)}/run"
        run.places["s3://my-bucket/run"] = address
        run.out = run.folder / "cache" / "runs" / address.replace("://", "/")
        run.evict()
        shutil.rmtree(run.folder / "cache")
        assert run.end(run.start()) == [0], run.log()
    assert run.losses() == undisturbed.losses()
    assert run.resumptions()


def test_a_job_is_made_again_with_another_parallelism(tmp_path: Path) -> None:
    undisturbed, run = (Pods(tmp_path / name, "several_pods.yaml", PODS) for name in ("undisturbed", "made-again"))
    assert undisturbed.end(undisturbed.start()) == [0] * PODS, undisturbed.log()
    for pods in (PODS, 1):
        run.pods = pods
        run.evict()
    run.pods = PODS
    assert run.end(run.start()) == [0] * PODS, run.log()
    meshes = [line["ranks"] for line in read_lines(run.out / EVENTS) if line["event"] == "started"]
    assert meshes == [PODS, 1, PODS]
    assert run.losses() == undisturbed.losses()
    assert model_digest(run.out) == model_digest(undisturbed.out)
