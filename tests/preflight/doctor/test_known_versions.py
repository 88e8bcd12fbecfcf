from __future__ import annotations

import pytest

from stepmark.preflight.doctor.findings import Status
from stepmark.preflight.doctor.known_versions import judge_versions


@pytest.mark.parametrize(
    ("torch", "torch_xla", "status"),
    [
        ("2.9.1+cu128", "2.9.0", Status.OK),
        ("2.9.0", "2.9.0", Status.WARNING),
        ("2.8.0", "2.8.1", Status.WARNING),
        ("2.13.0", "2.9.0", Status.FAILURE),
    ],
)
def test_torch_with_torch_xla(torch: str, torch_xla: str, status: Status) -> None:
    (finding,) = judge_versions({"torch": torch, "torch_xla": torch_xla})
    assert finding.status == status


def test_neuron_without_its_compiler_fails() -> None:
    (finding,) = judge_versions({"libneuronxla": "2.2.1"})
    assert finding.status == Status.FAILURE


def test_without_them_there_is_nothing_to_say() -> None:
    assert list(judge_versions({"torch": "2.13.0"})) == []


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"torch": "2.9.1", "torch_xla": "2.9.0", "torch-neuronx": "2.14.0"}, Status.FAILURE),
        ({"torch": "2.14.0", "torch-neuronx": "2.14.0"}, None),
        ({"torch": "2.13.0", "torch-neuronx": "2.14.0"}, Status.FAILURE),
        ({"torch": "2.9.1", "torch_xla": "2.9.0", "torch-neuronx": "2.9.0.2"}, Status.OK),
    ],
    ids=["native beside lazy", "native", "native for another torch", "lazy"],
)
def test_torch_neuronx_beside_torch(versions: dict[str, str], status: Status | None) -> None:
    assert [each.status for each in judge_versions(versions)] == ([] if status is None else [status])
