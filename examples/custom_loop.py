"""A custom training loop without Trainer: it trains, evaluates, saves, and resumes when it is run again.

Run `python examples/custom_loop.py` for one rank, `torchrun --nproc-per-node 2 examples/custom_loop.py` for two.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, GPT2Config

import stepmark
from stepmark import Checkpointer, DataArguments, DataLoader, DevicePrefetcher, Mesh, MicroBatchLoss, TrainStep


def main(folder: str, device: str, steps: int, every: int) -> None:
    mesh = Mesh.create(device=device)  # this rank's place among the ranks, and its device
    context, runtime, axis = mesh.context, mesh.runtime, mesh.data_parallel
    with context.leader_first("preparing data"):
        config = DataArguments(dataset_name="python-stdlib", block_size=32, max_eval_samples=64)
        data = stepmark.prepare_data(config, stepmark.load_tokenizer("bytes"))

    torch.manual_seed(0)
    shape = {"vocab_size": 258, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = AutoModelForCausalLM.from_config(
        GPT2Config(**shape, bos_token_id=256, eos_token_id=256, loss_type="ForCausalLM")
    )
    stepmark.place_module(model, runtime)
    parameters = list(model.named_parameters())
    optimizer = stepmark.build_optimizer("adamw_torch", parameters, runtime, learning_rate=3e-3)
    schedule = stepmark.build_schedule("cosine", optimizer.inner, steps, warmup_steps=2, options={})

    ranks = {"rank": axis.rank, "world_size": axis.size, "fixed_shape": runtime.lazy}
    loader = DataLoader(data.train, 8 // axis.size, seed=0, **ranks)
    loss = MicroBatchLoss(model, lazy=runtime.lazy)
    train_step = TrainStep(model, optimizer, loss, mesh)

    with Checkpointer(folder, keep_last=2, group=context.host) as checkpointer:
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        step = checkpointer.restore(state) or 0
        while step < steps:
            for batch in DevicePrefetcher(loader, runtime):  # from the loader's position to the end of the epoch
                statistics = train_step(step, batch)
                schedule.step()
                step += 1
                if step % every == 0 or step == steps:
                    (values,) = runtime.to_host([statistics.values])  # loss, tokens, gradient norm
                    evaluation = stepmark.evaluate(model, data.validation, mesh=mesh, batch_size=16)
                    if axis.rank == 0:
                        losses = f"loss {values[0]:.4f}, evaluation {evaluation['eval_loss']:.4f}"
                        print(f"step {step}: {losses}", flush=True)
                    checkpointer.save(step, state, files=model.config.save_pretrained)
                if step == steps:
                    break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/custom_loop")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations and saves")
    main(**vars(parser.parse_args()))
