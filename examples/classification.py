"""Fine-tunes a model to tell classes of texts apart, from a CSV file with the columns `text` and `label`.

    python examples/classification.py MODEL reviews.csv runs/reviews [--steps 200]

Labels are words or numbers. A tenth of the rows is held out. Run again, it continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from stepmark import PadTo, Trainer, TrainingArguments

LENGTH = 128  # tokens; one length for all batches, so that a lazy device has one graph


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(np.argmax(predicted.predictions, axis=-1) == predicted.label_ids))}


def main(model_name: str, file: str, folder: str, steps: int, device: str) -> None:
    rows = load_dataset("csv", data_files=file, split="train")
    names = sorted({str(label) for label in rows["label"]})
    tokenizer = AutoTokenizer.from_pretrained(model_name)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {**tokenizer(row["text"], truncation=True, max_length=LENGTH), "labels": names.index(str(row["label"]))}

    data = rows.map(encode, remove_columns=rows.column_names).train_test_split(test_size=0.1, seed=0)
    torch.manual_seed(0)  # of the head's first weights
    model = AutoModelForSequenceClassification.from_pretrained(
        model_name, num_labels=len(names), id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
    )
    args = TrainingArguments(
        output_dir=folder,
        device=device,
        max_steps=steps,
        learning_rate=5e-5,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )
    trainer = Trainer(
        model,
        args,
        data_collator=PadTo(LENGTH),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file")
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    main(given.model, given.file, given.folder, given.steps, given.device)
