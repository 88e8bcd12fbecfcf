"""The whole system in a loop of one's own, without Trainer: it trains, evaluates, saves, and carries on when it is run
again. On one rank `python examples/custom_loop.py`, on two `torchrun --nproc-per-node 2 examples/custom_loop.py`."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from stepmark import Checkpointer, DataLoader, Mesh, evaluate
from stepmark.config.data_arguments import DataArguments
from stepmark.data.prefetcher import DevicePrefetcher
from stepmark.data.prepared_data import prepare
from stepmark.data.tokenizer import load_tokenizer
from stepmark.runtime.module_placement import place_module
from stepmark.training.loss import MicroBatchLoss
from stepmark.training.optimizer import build_optimizer
from stepmark.training.schedule import build_schedule
from stepmark.training.step import TrainStep


def main(folder: str, device: str, steps: int, every: int) -> None:
    mesh = Mesh.create(device=device)  # who am I among the ranks, and what can the device do
    context, runtime, axis = mesh.context, mesh.runtime, mesh.data_parallel
    with context.leader_first("preparing data"):
        config = DataArguments(dataset_name="python-stdlib", block_size=32, max_eval_samples=64)
        data = prepare(config, load_tokenizer("bytes"))

    torch.manual_seed(0)
    shape = {"vocab_size": 258, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = AutoModelForCausalLM.from_config(
        GPT2Config(**shape, bos_token_id=256, eos_token_id=256, loss_type="ForCausalLM")
    )
    place_module(model, runtime)
    optimizer = build_optimizer("adamw_torch", list(model.named_parameters()), runtime, learning_rate=3e-3)
    schedule = build_schedule("cosine", optimizer.inner, steps, warmup_steps=2, options={})

    ranks = {"rank": axis.rank, "world_size": axis.size, "fixed_shape": runtime.lazy}
    loader = DataLoader(data.train, 8 // axis.size, seed=0, **ranks)
    loss = MicroBatchLoss(model, lazy=runtime.lazy)
    train_step = TrainStep(model, optimizer, loss, mesh)

    with Checkpointer(folder, keep_last=2, group=context.host) as checkpointer:
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        if checkpointer.latest():
            optimizer.ensure_state()  # some optimizers make theirs in the first step only
        step = checkpointer.restore(state) or 0
        while step < steps:
            for batch in DevicePrefetcher(loader, runtime):  # from the loader's position to the end of the epoch
                statistics = train_step(step, batch)
                schedule.step()
                step += 1
                if step % every == 0 or step == steps:
                    (values,) = runtime.to_host([statistics.values])  # loss, tokens, gradient norm
                    evaluated = evaluate(model, data.validation, mesh=mesh, batch_size=16)["eval_loss"]
                    if axis.rank == 0:
                        print(f"step {step}: loss {values[0]:.4f}, evaluation {evaluated:.4f}", flush=True)
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
