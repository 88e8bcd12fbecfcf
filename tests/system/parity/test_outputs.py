"""Models, and layers of them, that return values of every kind: on each sharding as on one rank, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.output_programs import FORMS, KINDS
from tests.support.ranks import Ranks
from tests.system.parity.test_hooks import TOLERANCE, differs

PROGRAM = "tests.support.output_programs:outputs"


SAMPLE = {"fsdp, layers": KINDS, "fsdp, one group": ("tuple", "object"), "shard_grad_op": ("dataclass", "scalar")}
SAMPLE |= {"compile": ("ModelOutput", "tuple"), "pp": ("dict", "object"), "ep": ("tuple", "dataclass")}


@pytest.mark.parametrize("form", SAMPLE)
def test_outputs_of_every_kind(ranks: Ranks, tmp_path: Path, form: str) -> None:
    kinds = SAMPLE[form]
    one = ranks.run(PROGRAM, str(tmp_path / "one"), "one rank", form, kinds).check()[0]
    other = ranks.run(PROGRAM, str(tmp_path / "form"), form, form, kinds, nproc=FORMS[form][0]).check()[0]
    wrong = {
        kind: differs(*pair, TOLERANCE["float32"])
        for kind, pair in zip(kinds, zip(one, other, strict=True), strict=True)
    }
    assert not any(wrong.values()), wrong
    assert not any(isinstance(each, str) for each in one), one
