"""The containers of examples/kubernetes and examples/aws, as processes of this machine: with their variables and
command lines they form one run, and when one is asked to stop, all save and exit with the code that is ignored or
retried. Jobs with fewer pods, or with more again, go on with it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stepmark.checkpoint.places import verify_there
from stepmark.filesystem.json_files import read_lines
from stepmark.launch.signal_listener import INTERRUPTED
from stepmark.trainer.run_folder.run_log import EVENTS
from tests.support.braked_run import LONG, BrakedRun
from tests.support.buckets import make_bucket, object_store
from tests.support.metadata_service import Service, metadata_service
from tests.support.processes import free_port
from tests.support.ranks import ROOT
from tests.support.recipes import write_recipe
from tests.support.run_folders import model_digest

pytestmark = pytest.mark.prove

EXAMPLES = ROOT / "examples"
AGENT = "/opt/stepmark/spot_notice.py"  # in the image
STEPS = 60
PODS = 2


def container_of(path: Path) -> Any:
    """Command, arguments and variables of a container, in the words of Kubernetes."""
    if path.suffix == ".yaml":
        *_, job = YAML(typ="safe").load_all(path)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        return container
    request = json.loads(path.read_text())
    if "containerProperties" in request:  # AWS Batch
        batch = request["containerProperties"]
        return {"command": batch["command"], "args": [], "env": batch["environment"]}
    algorithm = request["AlgorithmSpecification"]  # SageMaker
    variables = [{"name": name, "value": value} for name, value in request["Environment"].items()]
    return {"command": algorithm["ContainerEntrypoint"], "args": algorithm["ContainerArguments"], "env": variables}


class Pods(BrakedRun):
    """The pods of a Job, where /shared is the run's folder."""

    def __init__(self, folder: Path, manifest: str, pods: int) -> None:
        super().__init__(folder)
        self._container = container_of(EXAMPLES / manifest)
        self.pods = pods
        self.places = dict.fromkeys(("/shared", "/recipes", "/scratch", "/tmp"), str(folder))
        self.variables: dict[str, str] = {}  # that the container's machine would add
        self.own_disks = False  # of each pod
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
        if self.own_disks:
            self.places["/scratch"] = str(self.folder / f"disk-{index}")
        here = {AGENT: str(EXAMPLES / "spot_notice.py"), "--nproc=8": "--nproc=2", "--nproc=auto": "--nproc=2"}
        command = [here.get(word, self._filled(word)) for word in words]
        with open(self.folder / f"log-{index}", "ab") as log:
            return subprocess.Popen(command, env=self._variables(index, port), stdout=log, stderr=log)

    def _variables(self, index: int, port: str) -> dict[str, str]:
        """The container's, with what the cluster would fill in and the size and address of this one."""
        here = {"WORLD_SIZE": str(self.pods), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        filled = {each["name"]: self._filled(_value(each, index)) for each in self._container["env"]}
        return self.environment(**{**filled, **{name: here[name] for name in here if name in filled}, **self.variables})

    def _filled(self, text: str) -> str:
        names = "|".join(map(re.escape, sorted(self.places, key=len, reverse=True)))
        return re.sub(names, lambda found: self.places[found[0]], text)

    def evict(self, service: Service | None = None) -> None:
        """Starts the pods, and once they train, asks the last one to stop, or lets `service` announce the end."""
        started = self.start(slowly=True)
        if service is None:
            started[-1].send_signal(signal.SIGTERM)
        else:
            service.begun.set()
        assert [process.wait(timeout=LONG) for process in started] == [INTERRUPTED] * self.pods, self.log()

    def end(self, processes: list[subprocess.Popen[bytes]]) -> list[int]:
        self.brake.unlink(missing_ok=True)
        return [process.wait(timeout=LONG) for process in processes]


def _value(variable: Any, index: int) -> str:
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    if path is not None:
        assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return str(index) if path is not None else str(variable["value"]).replace("$(RANK)", str(index))


@pytest.mark.parametrize(("manifest", "pods"), [("kubernetes/one_pod.yaml", 1), ("kubernetes/several_pods.yaml", PODS)])
def test_an_evicted_pod_costs_nothing(tmp_path: Path, manifest: str, pods: int) -> None:
    undisturbed, run = (Pods(tmp_path / name, manifest, pods) for name in ("undisturbed", "evicted"))
    assert undisturbed.end(undisturbed.start()) == [0] * pods, undisturbed.log()
    run.evict()
    assert run.end(run.start()) == [0] * pods, run.log()
    assert run.losses() == undisturbed.losses()
    assert run.resumptions()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Pods:
    run = Pods(tmp_path_factory.mktemp("undisturbed"), "kubernetes/one_pod.yaml", 1)
    assert run.end(run.start()) == [0], run.log()
    return run


@pytest.mark.parametrize(
    "manifest",
    [
        "kubernetes/one_pod_bucket.yaml",
        "aws/eks/job.yaml",
        "aws/batch/job-definition.json",
        "aws/sagemaker/training-job.json",
    ],
)
def test_a_container_without_a_volume_goes_on_from_the_bucket(tmp_path: Path, undisturbed: Pods, manifest: str) -> None:
    """SIGTERM, or AWS's notice where nobody sends one; then the disk is gone, and the same command goes on."""
    run = Pods(tmp_path / "evicted", manifest, 1)
    with object_store() as proxy, metadata_service() as service:
        run.variables["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = service.address
        address = f"{make_bucket(proxy)}/run"
        run.places |= {"s3://my-bucket/run": address, "s3://my-bucket/runs/first": address}
        run.out = run.folder / "cache" / "runs" / address.replace("://", "/")
        run.evict(service if "batch" in manifest else None)
        shutil.rmtree(run.folder / "cache")
        service.begun.clear()
        assert run.end(run.start()) == [0], run.log()
    assert run.losses() == undisturbed.losses()
    assert run.resumptions()
    assert model_digest(run.out) == model_digest(undisturbed.out)


def test_pods_that_share_no_volume_go_on_from_the_bucket(tmp_path: Path) -> None:
    undisturbed = Pods(tmp_path / "undisturbed", "kubernetes/several_pods.yaml", PODS)
    assert undisturbed.end(undisturbed.start()) == [0] * PODS, undisturbed.log()
    run = Pods(tmp_path / "evicted", "kubernetes/several_pods_bucket.yaml", PODS)
    run.own_disks = True
    with object_store() as proxy:
        address = f"{make_bucket(proxy)}/run"
        run.places["s3://my-bucket/run"] = address
        run.out = run.folder / "disk-0" / "cache" / "runs" / address.replace("://", "/")
        run.evict()
        for index in range(PODS):
            shutil.rmtree(run.folder / f"disk-{index}")
        assert run.end(run.start()) == [0] * PODS, run.log()
        assert [report.faults for report in verify_there(address)] == [()] * (STEPS // 5 + 1)
    assert run.losses() == undisturbed.losses()
    assert run.resumptions()
    assert model_digest(run.out) == model_digest(undisturbed.out)


def test_a_job_is_made_again_with_another_parallelism(tmp_path: Path) -> None:
    undisturbed, run = (
        Pods(tmp_path / name, "kubernetes/several_pods.yaml", PODS) for name in ("undisturbed", "made-again")
    )
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
