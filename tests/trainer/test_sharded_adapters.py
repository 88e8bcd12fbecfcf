"""LoRA adapters in a tensor parallel model: what is saved, that it resumes on any mesh, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")

from transformers import AutoModelForCausalLM  # noqa: E402

from stepmark.cli.main import run as call  # noqa: E402
from tests.support.independent_reader import assemble, read_file, read_manifest  # noqa: E402
from tests.support.models import build  # noqa: E402
from tests.support.ranks import Ranks  # noqa: E402
from tests.trainer.compat.test_strategies import steps  # noqa: E402

pytestmark = [  # in peft
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
PROGRAMS = "tests.support.lora_programs:"
LLAMA = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj", "lm_head"], "modules_to_save": ["norm"]}
GPT2 = {"target_modules": ["c_attn", "c_proj"], "modules_to_save": ["ln_f", "lm_head"]}
SHARDED = {"tensor_parallel_size": 2, "per_device_train_batch_size": 4}


def base(folder: Path, kind: str = "llama") -> str:
    build(kind, tie_word_embeddings=False).save_pretrained(folder)
    return str(folder)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(8)[None]).logits
    return found


def loaded(pretrained: str, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained), adapter)


def check_written(pretrained: str, folder: Path, expected: torch.Tensor, out: Path) -> None:
    """The written adapter, the consolidated checkpoint and the merged model compute what the live model does."""
    assert call(["consolidate", str(folder / "checkpoint-6"), str(out / "adapter")]) == 0
    assert call(["consolidate", str(folder / "checkpoint-6"), str(out / "merged"), "--merge-adapters"]) == 0
    for adapter in (folder, out / "adapter"):
        assert [path.name for path in adapter.glob("*model*.safetensors*")] == ["adapter_model.safetensors"]
        torch.testing.assert_close(logits(loaded(pretrained, adapter)), expected, rtol=1e-5, atol=1e-5)
    assert not list((out / "merged").glob("adapter_*"))
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


def stored_tensors(folder: Path) -> dict[str, dict[str, Any]]:
    """Group to name to complete tensor, without the run's other sections."""
    manifest = read_manifest(folder)
    stored = [read_file(folder, manifest, file) for file in manifest["files"]]
    return {
        group: {name: assemble(name, entry, stored) for name, entry in tensors.items()}
        for group, tensors in manifest["tensors"].items()
        if not group.startswith("state/")
    }


def check_equal(saved: Path, again: Path) -> None:
    """The adapter and the optimizer's states are bit for bit the same."""
    expected, found = stored_tensors(saved), stored_tensors(again)
    assert set(found) == {"adapter_model", "optimizer/optimizer"}
    for group, tensors in found.items():
        assert tensors.keys() == expected[group].keys()
        assert len(tensors) > 5
        for name, value in tensors.items():
            assert value.tobytes() == expected[group][name].tobytes(), name
            assert value.shape == expected[group][name].shape


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for step, values in expected["losses"].items():
        assert found["losses"][step] == pytest.approx(values, rel=1e-5), step


@pytest.mark.parametrize(
    ("kind", "lora", "options"),
    [
        ("llama", LLAMA, {}),
        pytest.param("gpt2", GPT2, {"sequence_parallel": True}, marks=pytest.mark.prove),
        pytest.param("qwen3", LLAMA, {"zero_1": True, "nproc": 4}, marks=pytest.mark.prove),
    ],
)
def test_saves_and_resumes_on_other_meshes(
    ranks: Ranks, tmp_path: Path, kind: str, lora: dict[str, Any], options: dict[str, Any]
) -> None:
    """Trained on 2 or 4 ranks, resumed on one, and the other way round: each rank restores what was saved bit for bit,
    and losses are those of one rank."""
    count = options.pop("nproc", 2)
    common = {"base": base(tmp_path / "base", kind), "lora": lora, **steps("save", 3)}
    single = {**common, "per_device_train_batch_size": 4, "data_parallel_replicas": 1}
    sharded = {**common, **SHARDED, **options, "per_device_train_batch_size": 8 // count}
    first = [
        {**sharded, "output_dir": str(tmp_path / "sharded")},
        {**sharded, "output_dir": str(tmp_path / "to-one"), "stop_at": 3},
    ]
    stopped = [
        {**single, "output_dir": str(tmp_path / "one")},
        {**single, "output_dir": str(tmp_path / "to-sharded"), "stop_at": 3},
    ]
    complete, _ = ranks.run(PROGRAMS + "several", first, nproc=count).check()[0]
    alone, _ = ranks.run(PROGRAMS + "several", stopped).check()[0]
    close(complete, alone)
    assert complete["identity"] == alone["identity"]
    check_written(common["base"], tmp_path / "sharded", torch.tensor(complete["logits"]), tmp_path / "out")
    to_one = {**single, "output_dir": str(tmp_path / "to-one"), "resume": True}
    to_sharded = {**sharded, "output_dir": str(tmp_path / "to-sharded"), "resume": True}
    close(ranks.run(PROGRAMS + "train", to_one).check()[0], alone)
    close(ranks.run(PROGRAMS + "train", to_sharded, nproc=count).check()[0], alone)
    for folder in (tmp_path / "to-one", tmp_path / "to-sharded"):
        check_equal(folder / "checkpoint-3", folder / "again" / "checkpoint-3")


def test_adapters_that_ranks_have_drawn_for_themselves(ranks: Ranks) -> None:
    model = {"kind": "llama", "lora": {"target_modules": ["q_proj", "o_proj"]}}
    one, other = ranks.run(PROGRAMS + "drawn_apart", model, nproc=2).check()
    assert one == other
    assert len(set(one)) == 4


def test_dropout_of_adapters(ranks: Ranks) -> None:
    """Equal on both ranks where the input is replicated, different where it is sharded, and new for each layer and each
    batch."""
    lora = {"target_modules": ["q_proj", "v_proj", "o_proj"], "lora_dropout": 0.5}
    for options in ({}, {"sequence_parallel": True}):
        one, other = ranks.run(PROGRAMS + "dropped", {"kind": "llama", "lora": lora}, options, nproc=2).check()
        for name, values in one["first"].items():
            assert (values == other["first"][name]) == ("o_proj" not in name), name
            assert values != one["second"][name]
        assert len({tuple(values) for values in one["first"].values()}) == len(one["first"])


@pytest.mark.parametrize(
    ("lora", "options", "words"),
    [
        ({"use_dora": True}, {}, "q_proj has an adapter of type lora.DoraLinearVariant"),
        ({"trainable_token_indices": [1, 2]}, {}, "trainable_token_indices"),
        ({"modules_to_save": ["mlp"]}, {}, "mlp.gate_proj is inside a module that modules_to_save"),
        ({}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}, "pipeline_parallel_size"),
    ],
)
def test_unsupported_adapters_are_refused(
    ranks: Ranks, lora: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    model = {"kind": "llama", "lora": {"target_modules": ["q_proj"], **lora}}
    for message in ranks.run(PROGRAMS + "refusal", model, {"tensor_parallel_size": 2, **options}, nproc=2).check():
        assert words in message
        assert "\n" not in message


@pytest.mark.parametrize("how", ["peft", "transformers"])
@pytest.mark.parametrize("targets", [["q_proj"], ["lm_head"]])
def test_adapters_added_to_a_sharded_model_are_refused(
    ranks: Ranks, tmp_path: Path, how: str, targets: list[str]
) -> None:
    arguments: list[Any] = ["llama", {"target_modules": targets}, how, str(tmp_path)]
    for found in ranks.run(PROGRAMS + "added_afterwards", *arguments, nproc=2).check():
        said = ("after", "already sharded", "use peft.get_peft_model")
        assert all(any(each in message for each in said) for message in found.values()), found
