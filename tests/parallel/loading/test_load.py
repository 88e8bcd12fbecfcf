"""Models created shard by shard: the bits of the unsharded model, from few bytes, and precise errors."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    Qwen3Config,
)

from stepmark import Mesh
from stepmark.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    StepmarkError,
    UsageError,
)
from stepmark.parallel.loading.load import ModelFactory, load_for_parallelism, patched_constructors
from stepmark.parallel.loading.tensor_source import open_folder
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.module_placement import replace
from stepmark.sharding.layout import Box, Layout, annotate, layout_of
from tests.support.counted_reads import counted_reads

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "gpt2": lambda **more: GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=0, **more
    ),
    "llama": lambda **more: LlamaConfig(**SIZES, **more),
    "qwen3": lambda **more: Qwen3Config(**SIZES, head_dim=8, **more),
    "gemma": lambda **more: GemmaConfig(**SIZES, head_dim=8, **more),
    # Files hold the gate, the values and the output of every expert by themselves.
    "mixtral": lambda **more: MixtralConfig(**SIZES, num_local_experts=12, **more),
    "opt": lambda **more: OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=16, **more),
    "gpt_neox": lambda **more: GPTNeoXConfig(**SIZES, **more),
    "phi": lambda **more: PhiConfig(**SIZES, **more),
}
RUNTIME = EagerRuntime(torch.device("cpu"))


def cut(model: nn.Module, rank: int, size: int) -> None:
    """Leaves a rank its parameters: of matrices rows or columns, padded, in two boxes; vectors complete."""
    for index, parameter in enumerate(model.parameters()):
        assert parameter.is_meta
        if parameter.dim() < 2:
            continue
        dim = index % 2
        length = -(-parameter.shape[dim] // size)
        first = min(rank * length, parameter.shape[dim])
        count = min(length, parameter.shape[dim] - first)
        shape = list(parameter.shape)
        shape[dim] = length
        boxes = []
        for begin, end in ((0, count // 3), (count // 3, count)):
            offsets, lengths, at = [0] * parameter.dim(), list(parameter.shape), [0] * parameter.dim()
            offsets[dim], lengths[dim], at[dim] = first + begin, end - begin, begin
            boxes.append((Box(tuple(offsets), tuple(lengths)), tuple(at)))
        whole = tuple(parameter.shape)
        replace(parameter, nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta")))
        annotate(parameter, Layout.boxes(whole, boxes))


def factory(rank: int = 0, size: int = 1, small: int = 0) -> ModelFactory:
    return ModelFactory(lambda model: cut(model, rank, size), RUNTIME, small)


def load_model(factory: ModelFactory, folder: Path, model_class: Any = AutoModelForCausalLM) -> Any:
    with patched_constructors(factory):
        return model_class.from_pretrained(folder)


def check_equal(local: nn.Module, whole: nn.Module) -> None:
    """Every parameter and buffer of `local`, bit for bit, the part of `whole` that its layout says; padding 0."""
    expected = dict(whole.named_parameters(remove_duplicate=False))
    found = dict(local.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        layout = layout_of(parameter)
        value = expected[name].detach()
        if layout is not None:
            value = torch.zeros_like(parameter)
            for part in layout.parts:
                assert isinstance(part.at, tuple)
                there, here = [
                    tuple(slice(o, o + n) for o, n in zip(origin, part.slice.box.lengths, strict=True))
                    for origin in (part.slice.box.offsets, part.at)
                ]
                value[here] = expected[name].detach()[there]
        assert parameter.dtype == value.dtype
        assert parameter.requires_grad
        assert torch.equal(parameter.detach().view(torch.uint8), value.contiguous().view(torch.uint8)), name
    ties = [{id(module.get_parameter(name)) for name in found} for module in (local, whole)]
    assert len(ties[0]) == len(ties[1])
    buffers = dict(whole.named_buffers())
    assert {name for name, _ in local.named_buffers()} == buffers.keys()
    for name, buffer in local.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("small", [0, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_new_models_have_the_values_of_unsharded_ones(family: str, tied: bool, dtype: torch.dtype, small: int) -> None:
    config = CONFIGS[family](tie_word_embeddings=tied, dtype=dtype)
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(config)
    after = torch.get_rng_state()
    assert any(parameter.dtype == dtype for parameter in whole.parameters())
    for rank, size in ((0, 2), (1, 2), (3, 4)):
        torch.manual_seed(3)
        with patched_constructors(factory(rank, size, small)):
            local = AutoModelForCausalLM.from_config(config)
        assert torch.equal(torch.get_rng_state(), after)
        check_equal(local, whole)


def test_a_constructor_is_wrapped_and_only_inside() -> None:
    config = CONFIGS["gpt2"]()
    torch.manual_seed(0)
    whole = GPT2LMHeadModel(config)
    torch.manual_seed(0)
    with patched_constructors(factory(1, 2)):
        local = GPT2LMHeadModel(config)
    check_equal(local, whole)
    torch.manual_seed(0)
    check_equal(GPT2LMHeadModel(config), whole)


def test_a_class_made_inside_and_an_error_in_a_constructor() -> None:
    config = CONFIGS["gpt2"]()
    with patched_constructors(factory(1, 2)):

        class Longer(GPT2LMHeadModel):
            def __init__(self, config: Any, fail: bool = False) -> None:
                super().__init__(config)
                if fail:
                    raise RuntimeError("refused")
                self.more = nn.Linear(8, 8)

        with pytest.raises(RuntimeError, match="refused"):
            Longer(config, fail=True)
        assert not torch.empty(1 << 20).is_meta
        torch.manual_seed(0)
        local = Longer(config)
    torch.manual_seed(0)
    check_equal(local, Longer(config))


def test_new_model_is_drawn_and_then_taken_to_a_dtype() -> None:
    config = CONFIGS["llama"](dtype=torch.bfloat16)
    torch.manual_seed(5)
    whole = AutoModelForCausalLM.from_config(config).float()
    torch.manual_seed(5)
    check_equal(factory(1, 2).new(lambda: AutoModelForCausalLM.from_config(config), torch.float32), whole)


INITIALISERS = [nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.xavier_uniform_, nn.init.eye_]


@pytest.mark.parametrize("initialise", INITIALISERS)
def test_every_way_to_initialise(initialise: Any) -> None:
    def construct() -> nn.Module:
        model = nn.Sequential(nn.Linear(24, 16), nn.Embedding(9, 16, padding_idx=2), nn.Linear(16, 8))
        initialise(model[0].weight)
        with torch.no_grad():
            model[2].weight.mul_(3).add_(model[1].weight[:8])
        model.register_buffer("mask", torch.ones(64, 64).tril())
        return model

    torch.manual_seed(1)
    whole = construct()
    torch.manual_seed(1)
    check_equal(factory(1, 2).new(construct), whole)


@pytest.fixture(params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param](tie_word_embeddings=request.param != "opt"))
    model.generation_config.max_length = 77
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return tmp_path


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"torch_dtype": torch.float16}])
def test_shards_loaded_from_a_folder_equal_the_unsharded_model(folder: Path, options: dict[str, Any]) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder, **options)
    for rank in range(2):
        with patched_constructors(factory(rank, 2)):
            local = AutoModelForCausalLM.from_pretrained(folder, **options)
        check_equal(local, whole)
        assert local.generation_config.max_length == 77
        assert not local.training
        assert local.config.dtype == whole.config.dtype


def gpt2_folder(folder: Path, **options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(7)
    model = GPT2LMHeadModel(CONFIGS["gpt2"](**options))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_the_base_prefix_may_be_there_or_not(tmp_path: Path, prefix: str) -> None:
    whole = gpt2_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {prefix + name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(stored, file, {"format": "pt"})
    check_equal(load_model(factory(1, 2), tmp_path), whole)
    check_equal(load_model(factory(1, 2), tmp_path, model_class=GPT2Model), whole.transformer)


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_that_are_both_stored(tmp_path: Path, same: bool) -> None:
    gpt2_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    head = stored["transformer.wte.weight"].clone() + (0 if same else 1)
    save_file({**stored, "lm_head.weight": head}, file, {"format": "pt"})
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (whole.lm_head.weight is whole.transformer.wte.weight) == same
    check_equal(load_model(factory(1, 2), tmp_path), whole)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_each_byte_is_read_by_one_rank(tmp_path: Path, family: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    model.save_pretrained(tmp_path)
    cut_bytes = sum(each.nbytes for each in model.parameters() if each.dim() > 1)
    whole_bytes = sum(each.nbytes for each in model.parameters() if each.dim() < 2)
    asked = []
    for rank in range(4):
        with counted_reads() as reads:
            load_model(factory(rank, 4), tmp_path)
        asked.append(reads.count)
    assert sum(asked) == cut_bytes + 4 * whole_bytes
    assert max(asked) - whole_bytes <= cut_bytes * (0.25 + 0.05)


def _rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return apply


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _break_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:40] + b"\0" * 40 + data[80:])


def _index(folder: Path, files: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


BAD: list[tuple[Callable[[Path], object], type[StepmarkError], list[str]]] = [
    (_rewrite(lambda s: s.pop("transformer.ln_f.weight")), CheckpointMismatch, ["lacks", "transformer.ln_f.weight"]),
    (_rewrite(lambda s: s.update(extra=torch.ones(2))), CheckpointMismatch, ["model.safetensors", "'extra'"]),
    (
        _rewrite(lambda s: s.update({"transformer.wpe.weight": torch.ones(3, 32)})),
        CheckpointMismatch,
        ["model.safetensors", "transformer.wpe.weight", "[3, 32]", "[32, 32]"],
    ),
    (_truncate, CheckpointDamaged, ["model.safetensors", "ends at byte", "tensor"]),
    (_break_header, CheckpointDamaged, ["model.safetensors", "header is malformed"]),
    (lambda f: (f / "model.safetensors").write_bytes(b"12"), CheckpointDamaged, ["model.safetensors", "shorter"]),
    (lambda f: _index(f, {"a": "gone.safetensors"}), CheckpointDamaged, ["gone.safetensors", "missing"]),
    (lambda f: _index(f, {"a": "model.safetensors"}), CheckpointDamaged, ["model.safetensors", "'a'", "index"]),
    (lambda f: (f / "model.safetensors.index.json").write_text("{}"), CheckpointDamaged, ["index.json"]),
    (_pickled, CheckpointNotFound, ["pytorch_model.bin", "safetensors"]),
    (lambda f: (f / "model.safetensors").unlink(), CheckpointNotFound, ["no model"]),
]


@pytest.mark.parametrize(("spoil", "kind", "words"), BAD)
def test_errors_name_file_and_tensor_before_anything_is_read(
    tmp_path: Path, spoil: Callable[[Path], object], kind: type[StepmarkError], words: list[str]
) -> None:
    gpt2_folder(tmp_path)
    spoil(tmp_path)
    with counted_reads() as reads, pytest.raises(kind) as caught:
        load_model(factory(), tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert reads.count == 0


def test_an_index_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2_folder(tmp_path)
    _index(tmp_path, {"a": "model.safetensors"})

    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(CheckpointError, match=r"index\.json.*Permission denied.*may be intact") as caught:
        open_folder(tmp_path)
    assert not isinstance(caught.value, CheckpointDamaged)


W1, W2 = (f"model.layers.1.block_sparse_moe.experts.3.{name}.weight" for name in ("w1", "w2"))
BAD_EXPERTS: list[tuple[Callable[[dict[str, Any]], object], list[str]]] = [
    (lambda s: s.pop(W1), ["shapes that do not fit", ".experts."]),
    (lambda s: s.pop(W2), ["experts.0.w2.weight", "[11, 32, 48]", "[12, 32, 48]"]),
    (lambda s: s.update({W1: torch.ones(47, 32)}), ["shapes that do not fit"]),
    (lambda s: s.update({W1: torch.ones(48)}), ["shapes that do not fit"]),
    (lambda s: s.update({"model.layers.1.mlp.experts.down_proj": torch.ones(12, 32, 48)}), ["are both", "down_proj"]),
]


@pytest.mark.parametrize(("spoil", "words"), BAD_EXPERTS)
def test_errors_of_experts_in_pieces(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], words: list[str]
) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["mixtral"]()).save_pretrained(tmp_path)
    _rewrite(spoil)(tmp_path)
    with counted_reads() as reads, pytest.raises(CheckpointMismatch) as caught:
        load_model(factory(), tmp_path)
    assert all(word in str(caught.value) for word in [*words, "model.safetensors"]), caught.value
    assert reads.count == 0


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size .*Mesh\.create\(tensor_parallel_size=2\)"),
        ({}, r"mesh .*Mesh\.create\(\)"),
        ({"mesh": Mesh.create(device="cpu"), "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
    ids=["size", "nothing", "size-of-mesh"],
)
def test_sizes_are_a_meshs(named: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"load_for_parallelism: {words}"), load_for_parallelism(**named):
        pass
