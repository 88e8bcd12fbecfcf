from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.preflight.doctor.examine import examine
from stepmark.runtime import versions
from stepmark.runtime.versions import installed_version, software_versions
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe


def test_installed_software_has_versions() -> None:
    found = software_versions()
    assert {"stepmark", "torch", "transformers", "python"} <= found.keys()
    assert installed_version("no-such-distribution") is None


def test_nothing_is_imported_for_them() -> None:
    program = "import sys, stepmark.runtime.versions as v; v.software_versions(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_checkpoints_and_the_first_event_record_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run("tests.support.memory_programs:trained", str(write_recipe(tmp_path, save_steps=2))).check()
    recorded = read_manifest(tmp_path / "out" / "checkpoint-2").software
    expected = software_versions()
    assert recorded.keys() == expected.keys()
    assert recorded["transformers"] == expected["transformers"]
    lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    (started,) = [event for event in map(json.loads, lines) if event["event"] == "started"]
    assert started["software"] == recorded


def test_a_peft_that_transformers_refuses_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"peft": "0.0.1", "transformers": "5.99.0"}
    monkeypatch.setattr(versions, "installed_version", installed.get)
    said = versions.refused_peft() or ""
    assert "peft 0.0.1" in said
    assert "'transformers<5.99.0'" in said
    (finding,) = [each for each in examine(None) if each.name == "transformers with peft"]
    assert finding.text == said
    installed["peft"] = "99.0"
    assert versions.refused_peft() is None
