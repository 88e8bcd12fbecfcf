from __future__ import annotations

import gc

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
