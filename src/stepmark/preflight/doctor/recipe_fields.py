"""Whether a run of the recipe would be refused for its fields, the files it names, or its model."""

from __future__ import annotations

import os
from collections.abc import Iterator

from stepmark.config.quiet_libraries import leave_out_torch_xla, quiet_libraries
from stepmark.config.recipe import Recipe
from stepmark.errors import StepmarkError
from stepmark.preflight.doctor.findings import Finding, Status

TOPIC = "recipe"


def look_at_recipe(path: str, recipe: Recipe, device: str) -> Iterator[Finding]:
    """Checks the recipe in the file `path` as a run on `device` does, before it reads data; the first fault counts."""
    before = os.environ.get("USE_TORCH_XLA")
    quiet_libraries()
    if device != "xla":
        leave_out_torch_xla()
    try:
        from stepmark.recipe.train import check_recipe

        check_recipe(recipe)
    except StepmarkError as error:
        yield Finding(TOPIC, path, str(error), Status.FAILURE)
    else:
        yield Finding(TOPIC, path, "its fields, the files that they name and the model are in order")
    finally:
        if before is None:
            os.environ.pop("USE_TORCH_XLA", None)
