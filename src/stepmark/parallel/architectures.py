"""The model types that compute the same in parallel as on one rank: the lists in `architectures.json`.

`scripts/architectures.py` writes them. docs/tables.md describes the comparisons, and why other types failed them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("architectures.json")
_LISTS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))

TENSOR_PARALLEL: frozenset[str] = frozenset(_LISTS["tensor_parallel"])
"""Those whose own tensor parallel plan is right."""

EXPERT_PARALLEL: frozenset[str] = frozenset(_LISTS["expert_parallel"])
"""Those whose experts can be divided over ranks."""

SEQUENCE_PARALLEL: frozenset[str] = frozenset(_LISTS["sequence_parallel"])
"""Those of `TENSOR_PARALLEL` that compute the same with the sequence sharded between blocks."""

STAGES: dict[str, str] = _LISTS["stages"]
"""Those that can be cut into pipeline stages, and what their layers return: see `StagePlan.returns`."""

ROUTER_LOSSES: frozenset[str] = frozenset(_LISTS["router_losses"])
"""Those in stages whose loss over the routers of all layers is the same, too."""
