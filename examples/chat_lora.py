"""Fine-tunes a chat model with LoRA on a JSON-lines file of conversations, with loss on the answers alone.

    python examples/chat_lora.py MODEL chats.jsonl runs/chat [--max_length 1024] [--steps 200]

MODEL is a folder or hub name with a chat template; each line of the file is {"messages": [{"role": …, "content": …}]}.
Run again, it continues from the newest checkpoint. The adapter is in runs/chat, for PeftModel.from_pretrained.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepmark import Conversations, PadTo, Trainer, TrainingArguments


def main(model_name: str, file: str, folder: str, max_length: int, steps: int, device: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    data = Conversations(file, tokenizer, max_length=max_length, assistant_only_loss=True)
    base = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")
    torch.manual_seed(0)  # of the adapter's first weights
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"))
    args = TrainingArguments(
        output_dir=folder,
        device=device,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        logging_steps=10,
        save_steps=50,
        save_total_limit=2,
    )
    padding = PadTo([max_length // 4, max_length // 2, max_length])  # a lazy device compiles one graph for each
    trainer = Trainer(model, args, padding, data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file")
    parser.add_argument("folder")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    main(given.model, given.file, given.folder, given.max_length, given.steps, given.device)
