"""docs/failures.md quotes messages that the source has, and the examples keep the rules of docs/schedulers.md."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import stepmark
from stepmark.config.training_fields import TrainingFields

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
FAILURES = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
SCRIPTS = sorted([*EXAMPLES.rglob("*.sbatch"), *EXAMPLES.rglob("*.sh")])
BATCH_SCRIPTS = [path for path in SCRIPTS if path.suffix == ".sbatch"]
MANIFESTS = [EXAMPLES / "aws" / "eks" / "job.yaml", *sorted((EXAMPLES / "kubernetes").glob("*.yaml"))]
OPTION = re.compile(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", re.MULTILINE)
SLURM_MAY_BE_EARLY = 60  # seconds
TORCHRUN_GIVES = 30  # seconds from SIGTERM to SIGKILL
SUPERVISOR_ADDS = 5  # seconds to signal_grace


def texts_of(source: str) -> list[str]:
    """Every string, with adjacent literals joined; of f-strings the parts between the values."""
    nodes = ast.walk(ast.parse(source))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def quoted_messages() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", FAILURES, re.MULTILINE)


def test_quoted_messages_are_in_the_source() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(stepmark.__file__).parent.rglob("*.py")]
    texts = cache(texts_of)

    def found(message: str) -> bool:
        """Only files that have its longest word, which no line break divides, are parsed."""
        longest = max(re.findall(r"\w+", message), key=len)
        return any(longest in source and any(message in text for text in texts(source)) for source in sources)

    assert len(quoted_messages()) > 10
    assert [message for message in quoted_messages() if not found(message)] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("script", BATCH_SCRIPTS, ids=lambda path: path.name)
def test_batch_scripts_are_signalled_in_time_and_queued_again(script: Path) -> None:
    text = script.read_text()
    options = dict(OPTION.findall(text))
    number, _, seconds = options["signal"].partition("@")
    assert number == "USR1"
    assert int(seconds) >= TrainingFields().signal_grace + SLURM_MAY_BE_EARLY
    assert {"requeue", "open-mode"} <= options.keys()
    assert "--resume_from_checkpoint true" in text or "resume_from_checkpoint: true" in recipe_beside(script)
    assert "75 | 138 | 143) [[ ${SLURM_RESTART_COUNT:-0} -ge $MAX_RESTARTS ]] || scontrol requeue" in text


def recipe_beside(script: Path) -> str:
    recipe = script.parent / "recipe.yaml"
    return recipe.read_text() if recipe.exists() else ""


def documents() -> list[Any]:
    return [
        pytest.param(document, id=f"{path.stem}-{document['kind']}")
        for path in MANIFESTS
        for document in YAML(typ="safe").load_all(path)
    ]


def jobs() -> list[Any]:
    return [parameter for parameter in documents() if parameter.values[0]["kind"] == "Job"]


@pytest.mark.parametrize("job", jobs())
def test_an_interrupted_pod_is_replaced(job: Any) -> None:
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    by_code = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert by_code == {75: "Ignore", 2: "FailJob"}
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
    assert container["command"][0] == "stepmark"


@pytest.mark.parametrize("job", jobs())
def test_a_pod_has_time_to_save_and_shared_memory(job: Any) -> None:
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(argument.removeprefix("--").split("=") for argument in container["args"])
    assert pod["terminationGracePeriodSeconds"] > int(flags["signal_grace"]) + SUPERVISOR_ADDS
    assert flags["resume_from_checkpoint"] == "true"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    in_bucket = flags.get("output_dir", "").startswith("s3://")  # what is left is on a disk of its own
    assert "emptyDir" in places["/scratch"] if in_bucket else "persistentVolumeClaim" in places["/shared"]


def test_every_pod_is_a_rank() -> None:
    service, job = (parameter.values[0] for parameter in documents()[-2:])
    pod = job["spec"]["template"]["spec"]
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    ranks = job["spec"]["completions"]
    assert (job["spec"]["parallelism"], variables["WORLD_SIZE"]) == (ranks, str(ranks))
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


TRAIN_JOB = YAML(typ="safe").load(EXAMPLES / "kubeflow" / "trainjob.yaml")


def test_torchrun_lets_the_ranks_of_a_train_job_save() -> None:
    """torchrun kills its ranks 30 seconds after SIGTERM, and Kubernetes kills torchrun later still."""
    flags = dict(argument.removeprefix("--").split("=") for argument in TRAIN_JOB["spec"]["trainer"]["args"])
    (patch,) = TRAIN_JOB["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert int(flags["signal_grace"]) < TORCHRUN_GIVES < pod["terminationGracePeriodSeconds"]
    assert flags["resume_from_checkpoint"] == "true"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in places["/shared"]


@pytest.mark.prove
def test_the_train_job_fits_the_models_of_kubeflow() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")

    def lost(given: Any, kept: Any) -> bool:
        if isinstance(given, dict):
            return any(name not in kept or lost(value, kept[name]) for name, value in given.items())
        if isinstance(given, list):
            return len(given) != len(kept) or any(map(lost, given, kept))
        return bool(given != kept)

    assert not lost(TRAIN_JOB, models.TrainerV1alpha1TrainJob.from_dict(TRAIN_JOB).to_dict())


@pytest.mark.prove
@pytest.mark.parametrize("version", ["1.31", "1.34"])
@pytest.mark.parametrize("document", documents())
def test_manifests_fit_the_schema_of_kubernetes(document: Any, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(document, version, strict=True)
