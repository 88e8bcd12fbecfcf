"""Plain threads, for work that may continue while the interpreter exits, when executors accept no more tasks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """`[function(item) for item in items]`, with this thread and `threads - 1` others.

    After an error no further item is started; the first error is raised once all that were started have ended.
    """
    todo = list(enumerate(items))[::-1]
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                index, item = todo.pop()
            except IndexError:
                return
            try:
                results[index] = function(item)
            except BaseException as error:
                errors.append(error)

    helpers: list[threading.Thread] = []
    wanted = min(threads, len(todo)) - 1
    with contextlib.suppress(RuntimeError):  # the limit of threads, or the interpreter is ending: this one does it all
        while len(helpers) < wanted:
            helper = threading.Thread(target=work, name="stepmark-worker", daemon=True)
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(results))]
