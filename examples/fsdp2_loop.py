"""A loop of plain torch whose model torch shards. It saves in the background, and resumes on any mesh.

torchrun --nproc-per-node 4 examples/fsdp2_loop.py --shard 4                    # fully_shard (FSDP2)
torchrun --nproc-per-node 4 examples/fsdp2_loop.py --replicate 2 --shard 2      # HSDP
torchrun --nproc-per-node 4 examples/fsdp2_loop.py --shard 2 --tensor 2         # with tensor parallelism
torchrun --nproc-per-node 4 examples/fsdp2_loop.py --shard 2 --tensor 2 --model FOLDER    # sharded by transformers
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from stepmark import Checkpointer

VOCABULARY, WIDTH, HEAD, LENGTH, BATCH = 258, 64, 16, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        heads = [each(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        x = x + self.o(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def sharded_model(mesh: DeviceMesh) -> nn.Module:
    """The model, divided by torch: tensor parallelism first, then fully_shard by layer."""
    torch.manual_seed(0)
    model = Model()
    data_mesh = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    for layer in model.layers:
        if mesh["tensor"].size() > 1:
            plan: dict[str, Any] = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            parallelize_module(layer, mesh["tensor"], plan | dict.fromkeys(("o", "down"), RowwiseParallel()))
        fully_shard(layer, mesh=data_mesh)
    return fully_shard(model, mesh=data_mesh)


def loaded_model(folder: str, replicate: int, shard: int, tensor: int) -> nn.Module:
    """A Hugging Face model, which transformers divides while it loads the weights."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=tensor, fsdp_size=shard, dp_replicate_size=replicate)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    return model


def main(folder: str, replicate: int, shard: int, tensor: int, model: str | None, steps: int, every: int) -> None:
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (replicate, shard, tensor), mesh_dim_names=("replicate", "shard", "tensor"))
    network = sharded_model(mesh) if model is None else loaded_model(model, replicate, shard, tensor)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    config = None if model is None else network.config.save_pretrained  # for `stepmark consolidate`
    part = mesh["replicate"].get_local_rank() * shard + mesh["shard"].get_local_rank()

    with Checkpointer(folder, keep_last=2) as checkpointer:
        state = {"model": network, "optimizer": optimizer, "schedule": schedule}
        step = checkpointer.restore(state) or 0
        while step < steps:
            generator = torch.Generator().manual_seed(step)  # the same batches on every mesh
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
            tokens = tokens.chunk(replicate * shard)[part].to(device)
            output = network(tokens[:, :-1])
            logits = output if model is None else output.logits
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            if step % every == 0 or step == steps:
                dist.all_reduce(total := loss.detach())
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {total.item() / dist.get_world_size():.6f}", flush=True)
                checkpointer.save(step, state, files=config)  # returns once the shards are copied
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/fsdp2_loop")
    parser.add_argument("--replicate", type=int, default=1, help="replicas of all shards")
    parser.add_argument("--shard", type=int, default=1, help="ranks that fully_shard divides the parameters among")
    parser.add_argument("--tensor", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--model", help="a Hugging Face model instead of the example's own")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=50, help="steps between saves")
    main(**vars(parser.parse_args()))
