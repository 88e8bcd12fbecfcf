"""The end of a process that a test has forked."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def run_and_exit(run: Callable[[], Any]) -> NoReturn:
    """Runs it and exits as Python would, without what the parent has registered for its own exit."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_script(words: list[str], folder: str) -> NoReturn:
    """Of `Ranks.script`: runs the program `words[0]` as `__main__`, prints in the folder, and ends as Python does."""
    logging.getLogger().handlers.clear()  # as in `commands.enter`
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *words[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        exec(words[0], main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError
