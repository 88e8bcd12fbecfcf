"""Models of transformers on the lazy device: one execution a step, no compilation once warm, no read of the device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.lazy_devices import EXPECTED, KINDS, TIMEOUT, read_rows
from tests.support.ranks import ROOT, Ranks
from tests.support.xla_flags import FASTER

COUNT = "tests.support.lazy_models:count"
LIMIT = 5 * TIMEOUT  # seconds; some compile hundreds of graphs
UNDISTURBED = dict(zip(KINDS, EXPECTED, strict=True))
COUNTED = {name: row for name, row in read_rows().items() if row[1]}
pytestmark = pytest.mark.xla


def readme_recipe() -> dict[str, Any]:
    """The fields of the first recipe in docs/using.md."""
    from stepmark.config.yaml_file import parse_yaml

    block = re.search(
        r"```yaml\n# recipe.yaml\n(.*?)```", (ROOT / "docs" / "using.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert block is not None
    return parse_yaml(block.group(1))


def train_readme_recipe(folder: str) -> dict[str, Any]:
    """The recipe of docs/using.md, small and short, and what the device does in each step and evaluation batch."""
    import stepmark.trainer.trainer as trainer_module
    from stepmark.config.recipe import read_recipe
    from stepmark.recipe.train import train
    from tests.support.lazy_models import CountDevice

    count = CountDevice()

    class Counted(trainer_module.Trainer):
        def __init__(self, *args: Any, callbacks: list[Any], **options: Any) -> None:
            super().__init__(*args, callbacks=[*callbacks, count], **options)
            count.trainer = self

    trainer_module.Trainer = Counted
    small = {"config_overrides": {"n_layer": 1, "n_embd": 32, "n_head": 2}, "block_size": 32, "max_eval_samples": 20}
    short = {"output_dir": folder, "max_steps": 6, "eval_steps": 3, "max_train_samples": 100, "disable_tqdm": True}
    path = Path(folder) / "recipe.json"
    path.write_text(json.dumps({**readme_recipe(), **small, **short, "device": "xla"}))
    train(read_recipe(str(path), {}))
    return {"steps": count.steps, "batches": count.batches}


def test_the_readme_recipe_executes_once_a_step(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(train_readme_recipe, str(tmp_path)).check()
    assert [executions for _, executions, _ in found["steps"]] == [1] * 6
    assert found["steps"][2:] == [[0, 1, 0]] * 4
    assert found["batches"]
    assert found["batches"] == [[0, 1, 0]] * len(found["batches"])


def train_a_model_that_reads() -> dict[str, Any]:
    """The model looks at its loss in every forward pass."""
    from transformers import GPT2LMHeadModel

    from tests.support.lazy_models import causal, packed, run

    class Reads(GPT2LMHeadModel):
        def forward(self, *args: Any, **options: Any) -> Any:
            outputs = super().forward(*args, **options)
            assert outputs.loss > 0  # read here
            return outputs

    return run(Reads(causal("gpt2").config), packed)


def test_a_run_warns_once_of_the_line_that_reads_the_device(ranks: Ranks) -> None:
    (found,) = ranks.run(train_a_model_that_reads).check()
    # The first is traced, and the second makes the graphs.
    assert found["steps"][2:] == [[0, 2, 1]] * 4
    (warning,) = found["warnings"]
    text = Path(__file__).read_text()
    line = text[: text.index("# read here")].count("\n") + 1
    assert f"tests/system/parity/test_lazy_models.py:{line} (aten._local_scalar_dense.default)" in warning


def test_a_model_is_undisturbed(ranks: Ranks) -> None:
    assert counted(ranks, "gpt2") == {**UNDISTURBED, "lines": []}


def train_blocks_of_experts() -> dict[str, Any]:
    """What the device does with 2 of 16 experts a token, and the loss of routers. Batches are small: gathered weights
    cost nothing."""
    from scripts.small_models import small_model
    from stepmark.training.one_graph_per_step import experts
    from tests.support.lazy_models import packed, run

    experts.BLOCK_COST = 0
    taken: set[int] = set()
    forward = experts.padded_blocks_forward

    def counted_forward(*given: Any) -> Any:
        taken.add(given[-1])
        return forward(*given)

    experts.padded_blocks_forward = counted_forward
    sizes = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = small_model("qwen3_moe", {**sizes, "output_router_logits": True})
    return {**run(model, packed), "rows": sorted(taken)}


def test_padded_blocks_of_experts_are_one_graph(ranks: Ranks) -> None:
    (found,) = ranks.run(train_blocks_of_experts, environment={"XLA_FLAGS": FASTER}).check()
    assert found["rows"] == [8]
    assert found["steps"][2:] == [[0, 1, 0]] * 4
    assert found["batches"] == [[0, 1, 0]] * len(found["batches"])
    assert found["warnings"] == []


@pytest.mark.prove
@pytest.mark.parametrize("name", COUNTED)
def test_every_model_is_as_the_table_says(ranks: Ranks, name: str, record_property: Any) -> None:
    """docs/data/lazy-devices.json, which scripts/lazy_devices.py writes."""
    row = COUNTED[name]
    found = counted(ranks, name)
    assert [found[kind] for kind in KINDS] == list(row[1:4])
    assert "; ".join(f"`{line}`" for line in found["lines"]) == row[4]
    record_property("models", 1)


def counted(ranks: Ranks, name: str) -> dict[str, Any]:
    """Executions, compilations and transfers as the table has them, and the lines that read."""
    (found,) = ranks.run(COUNT, name, timeout=LIMIT, environment={"XLA_FLAGS": FASTER}).check()
    counts = {kind: ", ".join(str(found[kind][index]) for index in (1, 0, 2)) for kind in KINDS}
    return {**counts, "lines": found["lines"]}
