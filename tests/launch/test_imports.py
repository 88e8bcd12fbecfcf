from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from stepmark.launch.imports import quick_imports


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_imported_is_not_collected_and_the_collector_goes_on_as_before(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    gc.unfreeze()
    try:
        with quick_imports():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() > 0
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() > 0  # what comes later is collected
    finally:
        gc.enable()


def test_names_of_stepmark_are_imported_without_collections() -> None:
    """In a process of its own, which has imported nothing."""
    code = (
        "import gc, sys, stepmark, stepmark.launch.imports\n"
        "name, seen = 'stepmark.config.data_arguments', []\n"
        "gc.callbacks.append(lambda phase, _: hasattr(sys.modules.get(name), 'DataArguments') or seen.append(phase))\n"
        "stepmark.DataArguments\n"
        "print(name in sys.modules, seen, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True [] True\n"
