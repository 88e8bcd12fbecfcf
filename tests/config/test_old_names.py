from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stepmark
from stepmark import Trainer, TrainingArguments
from stepmark.cli.main import run
from stepmark.config.fields import field_names
from stepmark.config.recipe import all_fields, read_recipe
from stepmark.config.refusals import refusals
from stepmark.errors import UsageError

FIELDS, EXPORTS, GONE = refusals("elsewhere"), refusals("export"), refusals("gone")
RECIPE = "config_name: gpt2\ntokenizer_name: bytes\ndataset_name: python-stdlib\n"
NAMED = re.compile(r"\buse ([a-z][a-z_0-9]+)")


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - all_fields().keys()))
def test_an_old_name_in_a_recipe_says_ours(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{RECIPE}{name}: 1\n")
    with pytest.raises(UsageError) as caught:
        read_recipe(str(path), {})
    assert str(caught.value).partition("; see https:")[0].endswith(FIELDS[name])


def test_what_is_named_instead_exists() -> None:
    ours = {*all_fields(), *field_names(TrainingArguments), *stepmark.__all__, "processing_class"}
    for message in (*FIELDS.values(), *(f"use {message}" for message in EXPORTS.values())):
        for name in NAMED.findall(message):
            assert name in ours, message


def test_an_old_flag_says_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--disable_sequence_parallel", "--disable-sequence-parallel"):
        assert run(["train", flag, "true"]) == 2
        assert "use sequence_parallel, which is false by default" in capsys.readouterr().err


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A command, an option or its value after their command, or a value after its field."""
    field, _, value = name.partition(": ")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    arguments = ["train", str(path), f"--{field}", value] if value else [*name.split(), "x"]
    assert run(arguments) == 2
    said = f"error: {name}" if value else f"error: {' '.join(name.split()[1:]) or name}:"
    assert capsys.readouterr().err.startswith(f"{said} is gone; {GONE[name]}")


def test_old_keywords_say_ours() -> None:
    with pytest.raises(UsageError, match="disable_embedding_parallelization: .*use parallelize_embedding"):
        TrainingArguments(disable_embedding_parallelization=True)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="Trainer: tokenizer: is not an argument; use processing_class"):
        Trainer(None, tokenizer=object())  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="Trainer: modell: is not an argument; did you mean model"):
        Trainer(modell=None)  # type: ignore[call-arg]


def test_a_subclass_of_the_trainer_explains_them_too() -> None:
    class Own(Trainer):
        def __init__(self, *args: object, **keywords: object) -> None:
            super().__init__(*args, **keywords)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="Own: tokenizer: is not an argument; use processing_class"):
        Own(tokenizer=object())


@pytest.mark.parametrize("name", EXPORTS)
def test_an_old_class_says_ours(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(f"{name}: is not in stepmark; use {EXPORTS[name]}")):
        getattr(stepmark, name)


def test_any_other_name_is_missing_as_usual() -> None:
    assert not hasattr(stepmark, "Gizmo")


def test_an_unknown_name_is_explained_without_importing_transformers() -> None:
    """Which takes seconds."""
    program = (
        "import sys; from stepmark.config.unknown_fields import unknown_fields as told;"
        "assert 'not support' in told(['streaming'], ()) and 'not support' in told(['tf32'], ());"
        "assert 'transformers field' in told(['deepspeed'], ());"
        "assert 'nproc' in told(['nproc_per_node'], ()) and 'config_overrides' in told(['n_layers'], ());"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
