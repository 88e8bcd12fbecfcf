"""Starts real ranks for tests, from a warm parent (zygote.py)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "torch",
    "transformers",
    "stepmark.trainer.trainer",
    "stepmark.recipe.model",
    "torch.distributed.checkpoint.state_dict",
    "transformers.data.data_collator",
    "transformers.integrations.integration_utils",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
    "rich.console",
    "tests.support.models",
    "tests.support.programs",
)
EAGER_MODULES = (*MODULES, "pytest")  # which the modules of tests import


@dataclass(frozen=True)
class Outcome:
    """Each rank's exit code (None: killed at the deadline), result and output."""

    codes: list[int | None]
    results: list[Any]
    logs: list[str]

    def check(self) -> list[Any]:
        """The results; fails if a rank did, first with one that has failed by itself."""
        for rank, code in sorted(enumerate(self.codes), key=lambda each: each[1] is None):
            assert code == 0, f"rank {rank} exited with {code}:\n{self.logs[rank]}"
        return self.results


class Zygote:
    """The parent of ranks, as a process for all processes of the tests."""

    def __init__(self, *modules: str, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: of its environment, from before it imports torch."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PJRT_DEVICE": "CPU"}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the supervisor starts its ranks
        environment |= variables or {}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # to a name that the system chooses, which is no file's
            listener.listen()
            self.address = listener.getsockname()[1:].decode()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.zygote", str(listener.fileno()), *modules],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env=environment,
                cwd=ROOT,
            )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


class Ranks:
    """Runs jobs in a fork of the zygote at an address, one at a time."""

    def __init__(self, address: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(f"\0{address}")
        self._file = self._connection.makefile("rw")
        self._answer()

    def _answer(self) -> Any:
        line = self._file.readline()
        assert line, "the zygote ended"
        return json.loads(line)

    def run(
        self,
        function: str | Callable[..., Any],
        *arguments: Any,
        nproc: int = 1,
        timeout: float = 180,
        environment: dict[str, str] | None = None,
    ) -> Outcome:
        """Calls a function of a module, or `module:name`, with plain arguments in `nproc` ranks."""
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__name__}"
        with tempfile.TemporaryDirectory() as folder:
            job = {
                "function": function,
                "arguments": arguments,
                "nproc": nproc,
                "timeout": timeout,
                "folder": folder,
                "environment": environment or {},
            }
            print(json.dumps(job), file=self._file, flush=True)
            answer = self._answer()
            logs = [(Path(folder) / f"rank-{rank}.log").read_text(errors="replace") for rank in range(nproc)]
        return Outcome(answer["codes"], answer["results"], logs)

    def script(
        self, program: str, *arguments: str, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Like `python -c PROGRAM ARGUMENTS...`, in a child of the zygote, which ends as Python does: after threads and
        exit functions. `variables`: of its environment."""
        with tempfile.TemporaryDirectory() as folder:
            given = ([program, *arguments], folder)
            (code,) = self.run("tests.support.forked:run_script", *given, timeout=timeout, environment=variables).codes
            told = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
        assert code is not None, f"longer than {timeout} seconds:\n{told[1]}"
        return subprocess.CompletedProcess([program, *arguments], code, *told)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a signal to the whole group has ended it
            print("null", file=self._file, flush=True)  # closing alone may not do: a forked process may hold it open
            self._file.close()
        self._connection.close()
