"""The fixed versions that `make demo`, `make test` and CI install: one file in constraints/ for each environment.

    python scripts/pin_versions.py            resolves the newest versions and writes these files
    python scripts/pin_versions.py --lowest   prints the lower bounds of pyproject.toml

A release of another package changes a test run only when these files are renewed, on purpose. `make test-latest`
shows what a renewal would bring.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
PROVE = ("gguf", "kubernetes-validate", "kubeflow-trainer-api")  # what `make prove` installs besides
OPTIONAL = ("bitsandbytes", "deepspeed", "lm_eval[hf]", "wheel")  # what `make test-optional` installs besides
# By file: torch, extras, further packages.
ENVIRONMENTS = {
    "torch-2.9.1": ("2.9.1", "xla,dev,docs", PROVE),
    "torch-2.13.0": ("2.13.0", "dev,docs", PROVE),
    "optional": ("2.13.0", "dev,sentence-transformers", OPTIONAL),
}
# Newest versions that do not work with each other, and why.
HELD_BACK = {"transformers<5.24": "5.24.0 refuses peft below 0.22.0; the newest is 0.21.2"}
# What the oldest versions need of other packages and do not say: pyarrow 26 takes no numpy below 2.
OF_THEIR_TIME = ("pyarrow==17.0.0",)
# torch pins its own, which differ between its CPU and CUDA builds.
OF_TORCH = re.compile(r"nvidia-|cuda-|triton$|torch$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowest", action="store_true", help="print the lower bounds of pyproject.toml")
    if parser.parse_args().lowest:
        print("\n".join(lowest()))
        return
    for name, (torch, extras, further) in ENVIRONMENTS.items():
        versions = resolve(torch, extras, further)
        path = ROOT / "constraints" / f"{name}.txt"
        path.write_text("\n".join([*_heading(torch), *(f"{each}=={version}" for each, version in versions), ""]))
        print(f"{path.relative_to(ROOT)}: {len(versions)} packages")


def _heading(torch: str) -> list[str]:
    held = [f"# {name}: {reason}" for name, reason in HELD_BACK.items()]
    return [f"# Made by scripts/pin_versions.py for torch {torch}.", *held]


def resolve(torch: str, extras: str, further: tuple[str, ...]) -> list[tuple[str, str]]:
    """Name and version of each package that pip would install with this torch, sorted. Downloads, installs nothing."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), f"{ROOT}[{extras}]", f"torch=={torch}", *further, *HELD_BACK]
        subprocess.run(command, check=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    pinned = {each["name"].lower(): each["version"] for each in found if not OF_TORCH.match(each["name"])}
    del pinned["stepmark"]
    return sorted({**pinned, "torch": torch}.items())


def lowest() -> list[str]:
    """The oldest versions that pyproject.toml allows users to have, but for torch's, which the Makefile chooses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["tensorboard"], *OF_THEIR_TIME]
    return [each.replace(">=", "==") for each in requirements if not each.startswith("torch>")]


if __name__ == "__main__":
    main()
