"""sentence-transformers' trainers, plain and on Stepmark, with a small model and pairs of random words."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch

from stepmark.runtime.context import start
from tests.support import trl_programs
from tests.support.trl_programs import WORDS, wait_for, word_tokenizer

KINDS = ("ranking", "similarity", "several")


def save_model(folder: Path) -> Path:
    """An encoder and its tokenizer in a folder; the tokenizer's configuration is written last."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def texts(seed: int, rows: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 7))) for _ in range(rows)]


def dataset(kind: str, rows: int) -> Any:
    """Pairs of texts; with scores, or both kinds by name."""
    from datasets import Dataset, DatasetDict

    pairs = Dataset.from_dict({"anchor": texts(1, rows), "positive": texts(2, rows)})
    if kind in ("ranking", "gathered"):
        return pairs
    scored = Dataset.from_dict(
        {"first": texts(3, rows), "second": texts(4, rows), "score": [i % 5 / 4 for i in range(rows)]}
    )
    return scored if kind == "similarity" else DatasetDict({"pairs": pairs, "scored": scored})


def loss_of(kind: str, model: Any) -> Any:
    from sentence_transformers.sentence_transformer import losses

    if kind == "gathered":  # negatives of all ranks
        return losses.MultipleNegativesRankingLoss(model, gather_across_devices=True)
    made = {"pairs": losses.MultipleNegativesRankingLoss(model), "scored": losses.CosineSimilarityLoss(model)}
    return made if kind == "several" else made["pairs" if kind == "ranking" else "scored"]


def evaluator_of() -> Any:
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    rows = 12
    return EmbeddingSimilarityEvaluator(texts(5, rows), texts(6, rows), [i % 4 / 3 for i in range(rows)], name="held")


def make(kind: str, folder: Path, **options: Any) -> Any:
    """The trainer of a kind, on Stepmark or `plain`. `options` are fields of its arguments, and `rows`, `eval_rows`,
    `evaluates`, `loss`, `callbacks` and `lora`: whether an adapter is trained, and the layer behind the model."""
    import sentence_transformers
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    import stepmark.sentence_transformers as on_stepmark

    os.environ["TQDM_DISABLE"] = "1"
    library: Any = sentence_transformers if options.pop("plain", False) else on_stepmark
    if library is sentence_transformers and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start("cpu")  # accelerate takes the group that is there
    rows, eval_rows = options.pop("rows", 400), options.pop("eval_rows", 0)
    more: dict[str, Any] = {"callbacks": options.pop("callbacks", None)}
    more["eval_dataset"] = dataset(kind, eval_rows) if eval_rows else None
    more["evaluator"] = evaluator_of() if options.pop("evaluates", False) else None
    more |= {"model_init": options.pop("model_init")} if "model_init" in options else {}
    lora = options.pop("lora", False)
    make_loss = options.pop("loss", lambda model: loss_of(kind, model))
    fields = {
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "batch_sampler": "no_duplicates",
        "prompts": "w1 " if kind != "several" else {"pairs": {"anchor": "w1 "}, "scored": {"first": "w2 "}},
        **options,
    }
    base = folder / "model"
    if not base.exists() and int(os.environ.get("RANK", "0")) == 0:
        save_model(base)
    wait_for(base / "tokenizer_config.json")
    torch.manual_seed(1)
    transformer = Transformer(str(base))
    width = transformer.get_embedding_dimension()
    modules = [transformer, Pooling(width), Dense(width, 8)]
    model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    if lora:
        from peft import LoraConfig, TaskType

        task = TaskType.FEATURE_EXTRACTION
        model.add_adapter(LoraConfig(task_type=task, r=4, lora_dropout=0.0, target_modules="all-linear"))
    args = library.SentenceTransformerTrainingArguments(**fields)
    return library.SentenceTransformerTrainer(
        model=model, args=args, train_dataset=dataset(kind, rows), loss=make_loss(model), **more
    )


def reranker(folder: Path, **options: Any) -> Any:
    """A CrossEncoder whose adapter is trained."""
    from peft import LoraConfig, TaskType
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    import stepmark.sentence_transformers as on_stepmark

    base = folder / "reranker"
    if not base.exists():  # with the head, which an adapter leaves to its base
        CrossEncoder(str(save_model(folder / "model")), num_labels=1, device="cpu").save_pretrained(str(base))
    torch.manual_seed(1)
    model = CrossEncoder(str(base), device="cpu")
    model.add_adapter(LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_dropout=0.0, target_modules="all-linear"))
    fields = {"max_steps": 6, "save_steps": 3, "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, **options}
    args = on_stepmark.CrossEncoderTrainingArguments(per_device_train_batch_size=4, report_to="none", **fields)
    loss = BinaryCrossEntropyLoss(model)
    return on_stepmark.CrossEncoderTrainer(model=model, args=args, train_dataset=dataset("similarity", 64), loss=loss)


def trained(kind: str, folder: str, options: dict[str, Any]) -> list[dict[str, float]]:
    """See `trl_programs.trained`."""
    return trl_programs.trained(kind, folder, options, make)


def evaluated(kind: str, folder: str, options: dict[str, Any]) -> list[Any]:
    """The metrics of evaluations, and embeddings of the trained model, of the saved one, and of the last checkpoint."""
    from sentence_transformers import SentenceTransformer

    trainer = make(kind, Path(folder), evaluates=True, **options)
    trainer.train()
    found = [log for log in trainer.state.log_history if any(name.startswith("eval_") for name in log)]
    trainer.save_model(f"{folder}/final")
    saved = [f"{folder}/final", f"{folder}/run/checkpoint-{trainer.state.global_step}"]
    models = [trainer.model, *(SentenceTransformer(each, device="cpu") for each in saved if Path(each).exists())]
    return [found, *(model.encode(texts(9, 3)).tolist() for model in models)]
