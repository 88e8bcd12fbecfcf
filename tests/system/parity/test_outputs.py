"""Models, and layers of them, that return values of every kind: on each sharding as on one rank, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.output_programs import FORMS, KINDS
from tests.support.ranks import Ranks
from tests.system.parity.test_hooks import TOLERANCE, differs

PROGRAM = "tests.support.output_programs:outputs"


@pytest.mark.parametrize("form", [form for form in FORMS if form != "one rank"])
def test_outputs_of_every_kind(ranks: Ranks, tmp_path: Path, form: str) -> None:
    one = ranks.run(PROGRAM, str(tmp_path / "one"), "one rank", form, KINDS).check()[0]
    other = ranks.run(PROGRAM, str(tmp_path / "form"), form, form, KINDS, nproc=FORMS[form][0]).check()[0]
    wrong = {
        kind: differs(*pair, TOLERANCE["float32"])
        for kind, pair in zip(KINDS, zip(one, other, strict=True), strict=True)
    }
    assert not any(wrong.values()), wrong
    assert not any(isinstance(each, str) for each in one), one
