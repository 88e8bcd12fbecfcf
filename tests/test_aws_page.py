"""The files of examples/aws fit AWS's own service models and keep the rules of docs/aws.md, and the commands of both
pages are operations and options that exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name
from botocore.model import Shape, StructureShape
from botocore.validate import ParamValidator
from ruamel.yaml import YAML

from examples import spot_notice
from stepmark.cli import train
from stepmark.cli.recipe_fields import recipe_of
from stepmark.config.training_fields import TrainingFields

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "examples" / "aws"
PAGES = [ROOT / "docs" / name for name in ("aws.md", "aws-clusters.md")]
AWS = botocore.session.get_session()
REQUESTS = {
    "batch/compute-environment.json": "batch create-compute-environment",
    "batch/job-definition.json": "batch register-job-definition",
    "batch/job-queue.json": "batch create-job-queue",
    "batch/launch-template.json": "ec2 create-launch-template",
    "eks/nodegroup.json": "eks create-nodegroup",
    "sagemaker/training-job.json": "sagemaker create-training-job",
}
DOCUMENTS = {  # given to one option: what it is in the service's model
    "lifecycle.json": "s3api put-bucket-lifecycle-configuration --lifecycle-configuration",
    "policy.json": "iam create-policy --policy-document",
    "trust.json": "iam create-role --assume-role-policy-document",
}
OF_THE_CLI = ("aws s3 ", "aws logs tail ", "aws ecr get-login-password")  # no operations, or none of their options
EVERYWHERE = {"query", "cli-input-json"}
NOTICE = 120.0  # seconds
SUPERVISOR_ADDS = 5.0  # seconds to signal_grace
ASKED_WITHIN = spot_notice.EVERY + 2 * 2.0  # seconds: a pause, and two requests that take as long as they may
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def load(name: str) -> Any:
    return json.loads((FILES / name).read_text(encoding="utf-8"))


def input_of(service: str, command: str) -> StructureShape:
    """What an operation takes, by its name on the command line."""
    model = AWS.get_service_model("s3" if service == "s3api" else service)
    (operation,) = (name for name in model.operation_names if xform_name(name, "-") == command)
    shape: StructureShape = model.operation_model(operation).input_shape
    return shape


def misfits(shape: Shape, value: Any, at: str = "") -> Iterator[str]:
    """What botocore leaves to the service: values of enumerations, patterns, and the longest and largest."""
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from misfits(shape.members[name], member, f"{at}.{name}")
    elif shape.type_name in ("list", "map"):
        inner = shape.member if shape.type_name == "list" else shape.value
        for each in value if shape.type_name == "list" else value.values():
            yield from misfits(inner, each, f"{at}[]")
    elif shape.type_name == "string":
        if shape.enum and value not in shape.enum:
            yield f"{at}: {value} is none of {shape.enum}"
        pattern = shape.metadata.get("pattern", "")
        if "\\p{" not in pattern and not re.fullmatch(pattern or ".*", value, re.DOTALL):
            yield f"{at}: {value} is not {pattern}"
        if len(value) > shape.metadata.get("max", len(value)):
            yield f"{at}: {value} is too long"
    elif shape.type_name in ("integer", "long") and value > shape.metadata.get("max", value):
        yield f"{at}: {value} is too large"


def check_fits(shape: Shape, value: Any) -> None:
    assert ParamValidator().validate(value, shape).generate_report() == ""
    assert list(misfits(shape, value)) == []


def test_every_file_is_checked() -> None:
    others = {"Dockerfile", "recipe.yaml", "eks/job.yaml", "slurm/parallelcluster.yaml", "slurm/train.sbatch"}
    found = {path.relative_to(FILES).as_posix() for path in FILES.rglob("*") if path.is_file()}
    assert found == {*REQUESTS, *DOCUMENTS, *others}


@pytest.mark.parametrize(("name", "operation"), REQUESTS.items())
def test_a_request_fits_the_model_of_its_service(name: str, operation: str) -> None:
    check_fits(input_of(*operation.split()), load(name))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("batch/job-definition.json", {"retryStrategy": {"evaluateOnExit": [{"onExitCode": "75"}]}}, "action"),
        ("batch/job-definition.json", {"kind": "container"}, "kind"),
        ("batch/compute-environment.json", {"type": "Managed"}, "Managed"),
        ("sagemaker/training-job.json", {"TrainingJobName": "stepmark_first"}, "stepmark_first"),
    ],
)
def test_a_request_that_does_not_fit_is_found(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_fits(input_of(*REQUESTS[name].split()), {**load(name), **change})


def test_the_lifecycle_rule_fits_and_deletes_no_checkpoint() -> None:
    rules = load("lifecycle.json")
    shape = input_of("s3api", "put-bucket-lifecycle-configuration").members["LifecycleConfiguration"]
    check_fits(shape, rules)
    assert any(rule.get("AbortIncompleteMultipartUpload") == {"DaysAfterInitiation": 1} for rule in rules["Rules"])
    kept = {"ID", "Status", "Filter", "AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration"}
    assert all(rule.keys() <= kept for rule in rules["Rules"])


def allowed(policy: Any) -> dict[str, set[str]]:
    """Actions by resource, whose bucket and path are left out."""
    found: dict[str, set[str]] = {}
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        actions = statement["Action"]
        kind = "objects" if statement["Resource"].endswith("/*") else "bucket"
        found.setdefault(kind, set()).update([actions] if isinstance(actions, str) else actions)
    return found


def test_the_policy_allows_what_the_page_about_buckets_says() -> None:
    page = (ROOT / "docs" / "object-storage.md").read_text(encoding="utf-8").split("## Permissions")[1]
    (documented,) = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    policy = load("policy.json")
    assert policy["Version"] == json.loads(documented)["Version"]
    assert allowed(policy) == allowed(json.loads(documented))
    (statement,) = load("trust.json")["Statement"]
    assert set(statement["Action"]) == {"sts:AssumeRole", "sts:TagSession"}  # Pod Identity needs both
    assert {"pods.eks.amazonaws.com", "ecs-tasks.amazonaws.com", "sagemaker.amazonaws.com", "ec2.amazonaws.com"} == set(
        statement["Principal"]["Service"]
    )


# Commands of containers and of the Slurm script


def container(name: str) -> list[str]:
    """Its command line."""
    if name == "eks/job.yaml":
        *_, job = YAML(typ="safe").load_all(FILES / name)
        (found,) = job["spec"]["template"]["spec"]["containers"]
        return [*found["command"], *found["args"]]
    if name == "batch/job-definition.json":
        return list(load(name)["containerProperties"]["command"])
    algorithm = load(name)["AlgorithmSpecification"]
    return [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]


def fields_of(command: list[str]) -> TrainingFields:
    """The training fields of `stepmark train ...`, whose recipe is that of the image."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    words = [str(FILES / "recipe.yaml") if word == "/recipes/recipe.yaml" else word for word in command]
    return recipe_of(parser.parse_args(words[words.index("train") + 1 :])).training


def pod_grace() -> float:
    *_, job = YAML(typ="safe").load_all(FILES / "eks/job.yaml")
    return float(job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


@pytest.mark.parametrize(
    ("name", "agent", "given"),
    [
        ("eks/job.yaml", False, pod_grace()),
        ("batch/job-definition.json", True, NOTICE - ASKED_WITHIN),
        ("sagemaker/training-job.json", False, NOTICE),
    ],
)
def test_a_container_saves_in_the_time_that_it_is_given(name: str, agent: bool, given: float) -> None:
    command = container(name)
    fields = fields_of(command)
    assert fields.signal_grace + SUPERVISOR_ADDS <= given <= NOTICE
    assert fields.resume_from_checkpoint is True
    assert fields.mirror_to == "s3://my-bucket/runs/first"  # as output_dir
    assert command[: command.index("stepmark")] == (["python", "/opt/stepmark/spot_notice.py"] if agent else [])


def test_batch_retries_what_may_end_otherwise_the_next_time() -> None:
    rules = load("batch/job-definition.json")["retryStrategy"]["evaluateOnExit"]

    def action(code: str, reason: str) -> str:
        """Of the first rule that fits; without one, Batch retries."""
        of = {"onExitCode": code, "onStatusReason": reason}
        fits = (rule for rule in rules if all(fnmatchcase(of[key], rule[key]) for key in of if key in rule))
        return str(next(fits, {"action": "RETRY"})["action"])

    ended = "Essential container in task exited"
    assert {code: action(code, ended) for code in ("75", "2", "1", "137")} == {
        "75": "RETRY",
        "2": "EXIT",
        "1": "RETRY",
        "137": "RETRY",
    }
    assert {"onExitCode": "75", "action": "RETRY"} in rules  # said, though it is what happens where no rule fits
    assert {"onStatusReason": "Host EC2*", "action": "RETRY"} in rules
    assert action("", "Host EC2 (instance i-0123456789abcdef0) terminated.") == "RETRY"


@pytest.mark.parametrize(
    ("hyperpod", "exits", "restarts", "queued"),
    [(False, 75, 0, True), (True, 75, 0, True), (False, 1, 0, False), (False, 75, 100, False)],
)
def test_the_slurm_script_asks_for_the_notice_or_lets_hyperpod_resume(
    tmp_path: Path, hyperpod: bool, exits: int, restarts: int, queued: bool
) -> None:
    """srun is a program that starts one task, and scontrol one that notes what it is told."""
    programs = {
        "srun": f'echo "$@" > {tmp_path}/step; while [[ $1 != python && $1 != stepmark ]]; do shift; done; exec "$@"',
        "scontrol": f'echo "$@" > {tmp_path}/scontrol',
        "stepmark": f'echo "$@" > {tmp_path}/command; exit {exits}',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, body in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    (tmp_path / "spot_notice.py").write_bytes((ROOT / "examples" / "spot_notice.py").read_bytes())
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "VENV": str(tmp_path)}
    variables |= {"PATH": "/usr/bin:/bin", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}
    variables |= {"HYPERPOD": str(tmp_path)} if hyperpod else {"HYPERPOD": str(tmp_path / "none")}
    done = subprocess.run(
        ["bash", str(FILES / "slurm" / "train.sbatch"), str(FILES / "recipe.yaml")], env=variables, cwd=tmp_path
    )
    assert done.returncode == exits
    assert (tmp_path / "scontrol").exists() == queued
    assert not queued or (tmp_path / "scontrol").read_text() == "requeue 7\n"
    step = (tmp_path / "step").read_text().split()
    assert "--ntasks=8" in step
    assert ("--auto-resume=1" in step, "python" in step) == (hyperpod, not hyperpod)
    fields = fields_of((tmp_path / "command").read_text().split())
    assert fields.signal_grace + ASKED_WITHIN < NOTICE
    assert fields.resume_from_checkpoint is True


def test_the_cluster_has_the_partition_and_folder_that_the_page_uses() -> None:
    cluster = YAML(typ="safe").load(FILES / "slurm" / "parallelcluster.yaml")
    (queue,) = cluster["Scheduling"]["SlurmQueues"]
    (storage,) = cluster["SharedStorage"]
    (policy,) = queue["Iam"]["AdditionalIamPolicies"]
    text = PAGES[1].read_text(encoding="utf-8")
    assert queue["CapacityType"] == "SPOT"
    assert f"--partition={queue['Name']} " in text
    assert f"--output_dir {storage['MountDir']}/first" in text
    assert policy["Policy"].endswith(":policy/stepmark-runs")


# The image


def instructions() -> list[tuple[str, str]]:
    lines = (FILES / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line and not line.startswith("#")]


def test_the_image_has_what_the_commands_name() -> None:
    kinds = [kind for kind, _ in instructions()]
    assert kinds[0] == "FROM"
    assert set(kinds) == {
        "FROM",
        "ENV",
        "ARG",
        "RUN",
        "WORKDIR",
        "COPY",
        "CMD",
    }  # ENTRYPOINT would come before a command
    (folder,) = (told for kind, told in instructions() if kind == "WORKDIR")
    copied = set()
    for kind, told in instructions():
        if kind == "COPY":
            *sources, target = told.split()
            assert [source for source in sources if not (ROOT / source).exists()] == []
            copied |= {f"{folder}/{Path(each).name}" for each in sources} if target == "./" else {target}
    named = {word for name in ("batch/job-definition.json", "sagemaker/training-job.json") for word in container(name)}
    assert {word for word in named if word.startswith("/")} <= copied
    user = load("batch/job-definition.json")["containerProperties"]["user"]
    assert any(
        kind == "RUN" and told.startswith("useradd ") and told.endswith(f" {user}") for kind, told in instructions()
    )


def test_the_image_installs_the_versions_of_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installs = [told for kind, told in instructions() if kind == "RUN" and told.startswith("pip install ")]
    (torch,) = re.findall(r" torch==(\S+)$", installs[0])
    (constraint,) = re.findall(r"--constraint (\S+)", installs[1])
    assert f"\ntorch=={torch}\n" in (ROOT / constraint).read_text()
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"$', installs[1])
    assert {"s3"} <= set(extras.split(",")) <= project["optional-dependencies"].keys()
    (python,) = re.findall(r"^python:(\d+\.\d+)-", instructions()[0][1])
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]


# The pages


def commands(page: Path) -> Iterator[str]:
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        yield from block.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_operations_and_options_that_exist(page: Path) -> None:
    checked = 0
    for command in commands(page):
        words = shlex.split(command.split(" | ")[0])
        named = [word.removeprefix("file://") for word in words if word.startswith("file://")]
        named += [after for before, after in pairwise(words) if before in ("-f", "--file")]
        assert [name for name in named if not (FILES / name).is_file()] == [], command
        if words[0] != "aws" or command.startswith(OF_THE_CLI):
            continue
        _, service, operation, *rest = words
        if operation == "wait":
            waiters = AWS.get_waiter_model(service)
            (waiter,) = (each for each in waiters.waiter_names if xform_name(each, "-") == rest[0])
            operation, rest = xform_name(waiters.get_waiter(waiter).operation, "-"), rest[1:]
        members = {xform_name(name, "-"): name for name in input_of(service, operation).members}
        options = {word[2:] for word in rest if word.startswith("--")}
        assert options <= members.keys() | EVERYWHERE, command
        for option, name in pairwise(rest):
            if name.startswith("file://"):
                file = name.removeprefix("file://")
                of = REQUESTS[file] if option == "--cli-input-json" else DOCUMENTS[file].rpartition(" ")[0]
                assert of == f"{service} {operation}", command
        required = {xform_name(name, "-") for name in input_of(service, operation).required_members}
        assert "cli-input-json" in options or required <= options, command
        checked += 1
    assert checked >= 4


def test_all_name_the_same_account_bucket_and_resources() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, *FILES.rglob("*")) if path.is_file()]
    assert {found for text in texts for found in re.findall(r"\b\d{12}\b", text)} == {"111122223333"}
    assert {found for text in texts for found in re.findall(r"(?:s3://|:s3:::)([\w-]+)", text)} == {"my-bucket"}
    roles = {found for text in texts for found in re.findall(r":(?:role|instance-profile)/([\w-]+)", text)}
    made = set(re.findall(r"--(?:role|instance-profile)-name ([\w-]+)", texts[0]))
    assert roles - {"eks-node"} == made  # which the cluster has already
    names = [load(f"batch/{name}.json") for name in ("launch-template", "compute-environment", "job-queue")]
    assert names[1]["computeResources"]["launchTemplate"]["launchTemplateName"] == names[0]["LaunchTemplateName"]
    assert names[2]["computeEnvironmentOrder"][0]["computeEnvironment"] == names[1]["computeEnvironmentName"]
    assert f"--job-queue {names[2]['jobQueueName']} " in texts[0]
    assert f"--compute-environment {names[1]['computeEnvironmentName']}\n" in texts[0]
