"""Which versions work together, by PyTorch/XLA's README and the metadata of its packages: a torch_xla is built against
the torch of the same minor version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepmark.preflight.doctor.findings import Finding, Status

TESTED = {"torch": "2.9.1", "torch_xla": "2.9.0"}  # by Stepmark's own tests, on XLA's CPU client
TOPIC = "versions"
LAST_LAZY = (2, 9)  # torch-neuronx up to this version builds on torch_xla; later ones are a native device


def judge_versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    conflict = _torch_neuronx(versions) if "torch" in versions and "torch-neuronx" in versions else None
    if conflict is not None:
        yield Finding(TOPIC, "torch-neuronx", conflict, Status.FAILURE)
    elif "torch" in versions and "torch_xla" in versions:
        yield _torch_pair(versions["torch"], versions["torch_xla"])
    if "libneuronxla" in versions and "neuronx-cc" not in versions:
        text = "libneuronxla is here without its compiler; pip install neuronx-cc"
        yield Finding(TOPIC, "Neuron packages", text, Status.FAILURE)


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


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
