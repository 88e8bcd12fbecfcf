"""Which versions are known to work together.

As of 2026-11-22. Sources: PyTorch/XLA's README and the metadata of its packages (a torch_xla is built against the torch
of the same minor version); AWS Neuron's page "Release Content" of each release, for Trn1: what was shipped together.
Versions that are not in the table may work, but no source says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stepmark.preflight.doctor.findings import Finding, Status

TABLE_DATE = "2026-11-22"
TESTED = {"torch": "2.9.1", "torch_xla": "2.9.0"}  # by Stepmark's own tests, on XLA's CPU client
SOURCE = "awsdocs-neuron.readthedocs-hosted.com/en/v{}/release-notes/releasecontent.html"


@dataclass(frozen=True)
class NeuronRelease:
    """Versions that were shipped together, on `date`."""

    sdk: str
    date: str
    compiler: str
    libneuronxla: tuple[str, ...]
    runtime: str
    driver: str


RELEASES = (
    NeuronRelease("2.26.1", "2025-10-29", "2.21.33363.0", ("2.2.12677.0",), "2.28.23.0", "2.24.7.0"),
    NeuronRelease("2.27.1", "2026-01-14", "2.22.12471.0", ("2.2.14584.0",), "2.29.40.0", "2.25.4.0"),
    NeuronRelease("2.28.1", "2026-02-26", "2.23.6484.0", ("2.2.15515.0",), "2.30.51.0", "2.26.5.0"),
    NeuronRelease("2.29.0", "2026-04-09", "2.24.5133.0", ("2.2.16408.0",), "2.31.24.0", "2.27.4.0"),
    NeuronRelease("2.30.0", "2026-05-21", "2.25.3371.0", ("2.2.16974.0", "3.0.2891.0"), "2.32.31.0", "2.28.0.0"),
    NeuronRelease("2.31.0", "2026-07-07", "2.26.6360.0", ("2.2.17544.0", "3.0.3854.0"), "2.33.10.0", "2.29.0.0"),
    NeuronRelease("2.33.0", "2026-10-19", "2.28.7631.0", ("3.0.10135.0",), "2.35.30.0", "2.31.7.0"),
)
TOPIC = "versions"


LAST_LAZY = (2, 9)  # torch-neuronx up to this version builds on torch_xla; later ones are a native device


def judge_versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Findings on how the installed versions go together; `runtime` and `driver` are Neuron's."""
    conflict = _torch_neuronx(versions) if "torch" in versions and "torch-neuronx" in versions else None
    if conflict is not None:
        yield Finding(TOPIC, "torch-neuronx", conflict, Status.FAILURE)
    elif "torch" in versions and "torch_xla" in versions:
        yield _torch_pair(versions["torch"], versions["torch_xla"])
    if "neuronx-cc" in versions or "libneuronxla" in versions:
        yield _neuron(versions)


def _torch_neuronx(versions: Mapping[str, str]) -> str | None:
    """The conflict of the installed torch-neuronx with torch or torch_xla; None without one."""
    torch, neuronx = _minor(versions["torch"]), versions["torch-neuronx"]
    native = tuple(map(int, _minor(neuronx).split("."))) > LAST_LAZY
    if native and "torch_xla" in versions:
        return (
            f"torch-neuronx {neuronx} is a native device and does not work with torch_xla, which is installed too; "
            "pip uninstall torch_xla, or for Trn1 pip install 'torch-neuronx==2.9.*'"
        )
    if _minor(neuronx) != torch:
        return f"torch-neuronx {neuronx} was built for torch {_minor(neuronx)}, not for {versions['torch']}"
    return None


def _torch_pair(torch: str, torch_xla: str) -> Finding:
    name = "torch with torch_xla"
    if _minor(torch) != _minor(torch_xla):
        remedy = f"pip install 'torch=={_minor(torch_xla)}.*', or stepmark[xla]"
        text = f"torch_xla {torch_xla} was built for torch {_minor(torch_xla)}, not for {torch}; {remedy}"
        return Finding(TOPIC, name, text, Status.FAILURE)
    tested = torch.split("+")[0] == TESTED["torch"] and torch_xla.split("+")[0] == TESTED["torch_xla"]
    if tested:
        return Finding(TOPIC, name, "known to work: Stepmark's tests run with this pair")
    wanted = ", ".join(f"{package} {version}" for package, version in TESTED.items())
    return Finding(TOPIC, name, f"built for each other, not tested with Stepmark ({wanted} is)", Status.WARNING)


def _neuron(versions: Mapping[str, str]) -> Finding:
    name = "Neuron packages"
    compiler = versions.get("neuronx-cc")
    if compiler is None:
        text = "libneuronxla is here without its compiler; pip install neuronx-cc"
        return Finding(TOPIC, name, text, Status.FAILURE)
    release = next((each for each in RELEASES if each.compiler == compiler.split("+")[0]), None)
    if release is None:
        text = f"neuronx-cc {compiler} is not in the table of {TABLE_DATE}: it is unknown what it works with"
        return Finding(TOPIC, name, text, Status.WARNING)
    others = _differing(release, versions)
    source = SOURCE.format(release.sdk)
    if others:
        text = f"neuronx-cc {compiler} is of Neuron {release.sdk}, which came with {'; '.join(others)} ({source})"
        return Finding(TOPIC, name, text, Status.WARNING)
    return Finding(TOPIC, name, f"known to work: shipped together as Neuron {release.sdk}, {release.date} ({source})")


def _differing(release: NeuronRelease, versions: Mapping[str, str]) -> list[str]:
    shipped = {"libneuronxla": release.libneuronxla, "runtime": (release.runtime,), "driver": (release.driver,)}
    return [
        f"{package} {' or '.join(expected)}, not {versions[package]}"
        for package, expected in shipped.items()
        if package in versions and versions[package].split("+")[0] not in expected
    ]


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
