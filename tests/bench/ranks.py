"""What the guard costs several ranks: whole FSDP2 steps over gloo with it, against the same steps with torch's clip.

    python tests/bench/ranks.py [--ranks N] [--pairs N] [--batch N]

Each process trains two models by turns, one with the guard and one with `clip_grad_norm_`, in an order that is drawn
for each pair and the same on all ranks, which meet before each step. Told are ratios of the first rank's times, as in
overhead.py. More ranks than cores take turns on these: for how often they meet, not for how fast they are.
"""

import argparse
import multiprocessing
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from overhead import CONTEXT, Loop, seconds, told
from torch import nn
from torch.distributed.fsdp import fully_shard


class ShardedLoop(Loop):
    """As of one process, with each block sharded."""

    def make_model(self, device: str) -> nn.Module:
        """One of the two."""
        model = super().make_model(device)
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)


def work(rank: int, ranks: int, pairs: int, batch_size: int, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    random.seed(0)
    loop, times = ShardedLoop(folder, batch_size), []
    for _ in range(pairs + 1):
        taken = {}
        for step in random.sample([loop.ours, loop.theirs], 2):
            dist.barrier()
            taken[step.__name__] = seconds(step)
        times.append((taken["ours"], taken["theirs"]))
    loop.guard.close()
    if rank == 0:
        print(f"whole FSDP2 step / plain step, {ranks} ranks, 10 M, batch {batch_size} x {CONTEXT}: {told(times[1:])}")
    dist.barrier()


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2, help="sequences of 256 bytes in a step of one rank")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options.pairs, options.batch, Path(folder))
        started = [context.Process(target=work, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join()


if __name__ == "__main__":
    main()
