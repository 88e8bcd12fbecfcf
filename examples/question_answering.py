"""Fine-tunes a model to find answers in texts, from a JSON-lines file in SQuAD's form.

    python examples/question_answering.py MODEL questions.jsonl runs/answers [--steps 500]

Each line is {"question": …, "context": …, "answer": …, "start": N}, N being where the answer begins in the context.
Long contexts become several windows. A tenth of the lines is held out. Run again, it continues from the newest
checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from stepmark import PadTo, Trainer, TrainingArguments

LENGTH, STRIDE = 384, 128  # tokens of a window, and of what two windows share


def exact(predicted: Any) -> dict[str, float]:
    """The share of windows whose first and last token of the answer are both found."""
    begins, ends = (np.argmax(logits, axis=-1) for logits in predicted.predictions[:2])
    wanted_begins, wanted_ends = predicted.label_ids
    return {"exact": float(np.mean((begins == wanted_begins) & (ends == wanted_ends)))}


def main(model_name: str, file: str, folder: str, steps: int, device: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_name)

    def windows(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The windows of some rows; the answer of one that does not hold it is its first token."""
        options = {"max_length": LENGTH, "stride": STRIDE, "truncation": "only_second"}
        made = tokenizer(
            rows["question"], rows["context"], return_overflowing_tokens=True, return_offsets_mapping=True, **options
        )
        spans = [(start, start + len(text)) for start, text in zip(rows["start"], rows["answer"], strict=True)]
        of_row, offsets = made.pop("overflow_to_sample_mapping"), made.pop("offset_mapping")
        found = []
        for window, row in enumerate(of_row):
            begin, end = spans[row]
            inside = [
                token
                for token, (first, last) in enumerate(offsets[window])
                if made.sequence_ids(window)[token] == 1 and first < end and last > begin
            ]
            complete = inside and offsets[window][inside[0]][0] <= begin and offsets[window][inside[-1]][1] >= end
            found.append((inside[0], inside[-1]) if complete else (0, 0))
        return {**made, "start_positions": [one for one, _ in found], "end_positions": [one for _, one in found]}

    split = load_dataset("json", data_files=file, split="train").train_test_split(test_size=0.1, seed=0)
    data = {name: rows.map(windows, batched=True, remove_columns=rows.column_names) for name, rows in split.items()}
    torch.manual_seed(0)  # of the head's first weights
    model = AutoModelForQuestionAnswering.from_pretrained(model_name)
    args = TrainingArguments(
        output_dir=folder,
        device=device,
        max_steps=steps,
        learning_rate=5e-5,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=2,
    )
    trainer = Trainer(
        model,
        args,
        data_collator=PadTo(LENGTH),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        compute_metrics=exact,
    )
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file")
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    main(given.model, given.file, given.folder, given.steps, given.device)
