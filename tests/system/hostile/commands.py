"""The commands that read a stranger's folder, and what each of them does to the machine while it runs."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from stepmark.__main__ import main
from tests.support.commands import enter
from tests.support.ranks import Ranks
from tests.system.hostile.forge import Place

COMMANDS: Mapping[str, str] = {
    "inspect": "inspect {c}",
    "inspect-json": "inspect {c} --json",
    "inspect-run": "inspect {run}",
    "inspect-model": "inspect {model}",
    "verify": "verify {c}",
    "verify-run": "verify {run}",
    "verify-model": "verify {model}",
    "report": "report {run} --out report.html --csv tables",
    "report-inside": "report {run}",
    "rows": "rows {run} --step 1",
    "evaluate": "evaluate {c} --device cpu",
    "evaluate-run": "evaluate {run} --device cpu",
    "evaluate-inside": "evaluate checkpoint-3 --device cpu",
    "evaluate-model": "evaluate {model} --data {text} --block_size 16 --device cpu",
    "evaluate-adapter": "evaluate {adapter} --data {text} --block_size 16 --device cpu",
    "evaluate-data": "evaluate {c} --data {text} --block_size 16 --device cpu",
    "evaluate-chats": "evaluate {c} --data {chats} --messages_column messages --device cpu",
    "consolidate": "consolidate {c} out",
    "consolidate-run": "consolidate {run} out",
    "export-dcp": "export {c} out --to dcp",
    "export-trainer": "export {c} out --to hf-trainer",
    "import": "import {model} out --model-only",
    "import-file": "import {file} out --model-only",
    "resume": "train recipe.yaml --output_dir {run} --resume_from_checkpoint true --max_steps 4",
    "resume-named": "train recipe.yaml --output_dir again --resume_from_checkpoint {c} --max_steps 4",
    "train": "train recipe.yaml --output_dir {run}",
    "train-model": "train tuned.yaml --output_dir new --model_name_or_path {model}",
    "plan": "plan {place}/recipe.yaml --nproc 1",
    "doctor": "doctor --recipe {place}/recipe.yaml --json",
    "load": "python load {file}",
    "restore": "python restore {saved}",
    "dcp": "python dcp {saved}/checkpoint-2",
}
WRITES = {  # what commands write into the stranger's folder
    "resume": ("run/",),
    "train": ("run/",),
    "report-inside": ("run/report.html",),
    "evaluate-run": ("run/evaluations.", "run/.stepmark", "run/best", "run/runs/"),
    "restore": ("saved/",),
}
SECONDS, BYTES = 10.0, 500_000_000
HANGS_AFTER = 30.0  # seconds by the wall's clock, on a machine that may be busy
_ADDRESSES = 3 << 30  # bytes that a command may map beyond what its parent has, so that it cannot take the machine's
_FILE = 1 << 30  # bytes of a file that it may write, so that a copy of a hollow file cannot fill the disk


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, None where it hung; what it printed; seconds of the processor, and bytes that
    it took at most; what it opened; the hosts that it looked up."""

    code: int | None
    out: str
    err: str
    seconds: float
    memory: int
    opened: list[str]
    looked_up: list[str]


def run(ranks: Ranks, place: Place, command: str) -> Outcome:
    """Runs one of `COMMANDS`."""
    words = [
        word.format(
            c=place.checkpoint,
            run=place.run,
            model=place.model,
            saved=place.saved,
            adapter=place.adapter,
            place=place.root / "place",
            text=place.work / "text.txt",
            chats=place.work / "chats.jsonl",
            file=place.root / "place" / "file.pt",
        )
        for word in COMMANDS[command].split()
    ]
    cwd = place.run if command.endswith("inside") else place.work
    environment = {"STEPMARK_CACHE": str(place.work / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    started = ranks.run(
        "tests.system.hostile.commands:call", words, str(place.work), str(cwd),
        timeout=HANGS_AFTER, environment=environment,
    )  # fmt: skip
    measured: dict[str, Any] = {"seconds": 0.0, "memory": 0, "opened": [], "looked_up": []}
    if (path := place.work / "measured.json").exists():
        measured = json.loads(path.read_text())
        path.unlink()
    told = [(place.work / name).read_text(errors="surrogateescape") for name in ("stdout", "stderr")]
    return Outcome(started.codes[0], *told, **measured)


def call(words: list[str], folder: str, cwd: str) -> None:
    """The command, in a child of the zygote."""
    enter(folder, True)
    os.chdir(cwd)
    opened: list[str] = []
    looked_up: list[str] = []
    huggingface_hub.constants.HF_HUB_OFFLINE = False  # which would hide that it asks

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            opened.append(os.fsdecode(arguments[0]))
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            looked_up.append(str(arguments[0]))

    sys.addaudithook(hear)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESSES, size + _ADDRESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
    before, began = peak(), time.process_time()
    try:
        main(words) if words[0] != "python" else program(*words[1:])
    finally:
        measured = {
            "seconds": time.process_time() - began,
            "memory": peak() - before,
            "opened": opened,
            "looked_up": looked_up,
        }
        (Path(folder) / "measured.json").write_text(json.dumps(measured))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def program(name: str, path: str) -> None:
    """What a program does with the public functions; an error is shown as the command line shows it."""
    from stepmark.errors import StepmarkError

    try:
        PROGRAMS[name](path)
    except StepmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _load(path: str) -> None:
    import stepmark

    print(type(stepmark.load(path)))


def _restore(path: str) -> None:
    import torch

    from stepmark import Checkpointer

    layer = torch.nn.Linear(2, 2, bias=False)
    with Checkpointer(path) as checkpointer:
        print(checkpointer.restore({"model": layer}))


def _dcp(path: str) -> None:
    import torch

    from stepmark.checkpoint import dcp

    dcp.load({"weight": torch.zeros(2, 2)}, checkpoint_id=path)


PROGRAMS = {"load": _load, "restore": _restore, "dcp": _dcp}


def tree(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything in a folder: kind, permissions, size, and the content of small files."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file() and status.st_blocks * 512 < 1 << 24 and status.st_size < 1 << 26:
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = (status.st_mode, 0 if path.is_dir() else status.st_size, content)
    return found
