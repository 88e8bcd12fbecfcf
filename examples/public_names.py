"""An example of each public name: `python examples/public_names.py FOLDER` runs them all, in seconds on a CPU.

The site shows each part, which a line `# stepmark.NAME` opens, with its name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import stepmark

folder = Path(sys.argv[1])
(folder / "stories.txt").write_text("Once upon a time there was a run that nobody could kill.\n" * 200)
shape = {"vocab_size": 258, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
gpt2 = GPT2Config(**shape, bos_token_id=256, eos_token_id=256, loss_type="ForCausalLM")
samples = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in range(8, 40)]

# stepmark.load_tokenizer
tokenizer = stepmark.load_tokenizer("bytes")  # or a folder, or a name of the Hugging Face hub
print(tokenizer("killed, resumed")["input_ids"])

# stepmark.DataArguments
data_fields = stepmark.DataArguments(train_file=str(folder / "stories.txt"), block_size=32)

# stepmark.prepare_data
data = stepmark.prepare_data(data_fields, tokenizer, folder=folder / "tokens")
print(len(data.train), "blocks to train on,", len(data.validation), "held out")

# stepmark.TrainingArguments
arguments = stepmark.TrainingArguments(
    output_dir=str(folder / "run"), max_steps=4, eval_strategy="steps", eval_steps=2, logging_steps=1, save_steps=2
)

# stepmark.Trainer
trainer = stepmark.Trainer(GPT2LMHeadModel(gpt2), arguments, train_dataset=data.train, eval_dataset=data.validation)
trainer.train()  # resume_from_checkpoint=True goes on from the newest checkpoint
print(trainer.evaluate()["eval_loss"])

# stepmark.read_metrics
losses = [line["loss"] for line in stepmark.read_metrics(folder / "run") if "loss" in line]

# stepmark.PadTo
padded = stepmark.Trainer(
    GPT2LMHeadModel(gpt2),
    stepmark.TrainingArguments(output_dir=str(folder / "padded"), max_steps=2),
    data_collator=stepmark.PadTo([16, 32, 64]),  # a lazy device compiles three graphs at most
    train_dataset=samples,
)
padded.train()

# stepmark.Conversations
template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
tokenizer.chat_template = template
chats = stepmark.Conversations(
    [{"messages": [{"role": "user", "content": "Are you there?"}, {"role": "assistant", "content": "Still."}]}],
    tokenizer,
    max_length=64,
)
print(tokenizer.decode(chats[0]["input_ids"]))

# stepmark.Seq2SeqTrainingArguments
generating = stepmark.Seq2SeqTrainingArguments(
    output_dir=str(folder / "t5"), max_steps=1, predict_with_generate=True, generation_max_length=8
)

# stepmark.Seq2SeqTrainer
t5 = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
pairs = [{"input_ids": [5, 6, 7, 1], "labels": [7, 6, 5, 1]}] * 8
translator = stepmark.Seq2SeqTrainer(
    T5ForConditionalGeneration(t5), generating, train_dataset=pairs, eval_dataset=pairs[:2]
)
print(translator.predict(pairs[:2]).predictions.shape)  # tokens, not logits

# stepmark.Mesh
mesh = stepmark.Mesh.create(device="cpu")  # tensor_parallel_size=2, pipeline_parallel_size=2 with more ranks
print(mesh.data_parallel.rank, "of", mesh.data_parallel.size)

# stepmark.load_for_parallelism
with stepmark.load_for_parallelism(mesh):  # from_pretrained reads only what this rank holds
    model = GPT2LMHeadModel(gpt2)

# stepmark.parallelize
model = stepmark.parallelize(GPT2LMHeadModel(gpt2), mesh)  # of a model that is there already; before place_module

# stepmark.place_module
stepmark.place_module(model, mesh.runtime)  # parameters stay the same objects, also on lazy devices

# stepmark.build_optimizer
parameters = list(model.named_parameters())
optimizer = stepmark.build_optimizer("adamw_torch", parameters, mesh.runtime, learning_rate=1e-3)

# stepmark.build_schedule
schedule = stepmark.build_schedule("cosine", optimizer.inner, total_steps=4, warmup_steps=1, options={})

# stepmark.MicroBatchLoss
loss = stepmark.MicroBatchLoss(model, label_smoothing=0.1)

# stepmark.TrainStep
step = stepmark.TrainStep(model, optimizer, loss, mesh, accumulation=2, max_grad_norm=1.0)

# stepmark.DataLoader
axis = mesh.data_parallel
loader = stepmark.DataLoader(data.train, 4, rank=axis.rank, world_size=axis.size, accumulation=2, seed=0)

# stepmark.Checkpointer
with stepmark.Checkpointer(folder / "loop", keep_last=2, group=mesh.context.host) as checkpointer:
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    done = checkpointer.restore(state) or 0  # the step of the newest complete checkpoint
    checkpointer.save(done + 1, state)  # returns once the state may change

# stepmark.DevicePrefetcher
for number, batch in enumerate(stepmark.DevicePrefetcher(loader, mesh.runtime)):
    statistics = step(number, batch)
    schedule.step()
    if number == 3:
        break

# stepmark.evaluate
print(stepmark.evaluate(model, data.validation, mesh=mesh)["eval_loss"])

# stepmark.ZeroRedundancyOptimizer
sharded = stepmark.ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, mesh=mesh, lr=1e-3)

# stepmark.save
stepmark.save({"model": model.state_dict(), "step": 4}, folder / "weights.pt")  # the old file or the new, never half

# stepmark.load
model.load_state_dict(stepmark.load(folder / "weights.pt", "cpu")["model"])

# stepmark.checkpoint.dcp
dcp = stepmark.checkpoint.dcp  # or: from stepmark.checkpoint import dcp

dcp.save({"model": model, "step": 4}, checkpoint_id=folder / "step-4")  # as torch.distributed.checkpoint's
dcp.load({"model": model}, checkpoint_id=folder / "step-4")
