"""What checkpoints cost: the blocked call, the steps beside the writer, the hashes, and the way back.

    python tests/bench/checkpoints.py [--rounds N] [--millions 10 85] [--folder DIR]

A synchronous save is torch's own `dcp.save` of the same tensors into one folder, synced. Ratios are paired in one run.
The memory is touched before, as it is in a job after its first steps.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from overhead import CONTEXT, model_of, paired, seconds, told
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from trainer_plugin.checkpoints.manifest import Manifest
from trainer_plugin.checkpoints.tensor_files import write_tensors
from trainer_plugin.demo.gpt import loss
from trainer_plugin.guard import Guard


class Training:
    """A GPT of some millions of parameters on AdamW under a guard, a few steps old."""

    def __init__(self, millions: int, folder: Path, **checkpoints: int) -> None:
        self.folder = folder
        self.model = model_of(millions)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(256, (1, CONTEXT + 1))
        tiers = {"local": str(folder / "local"), "shared": str(folder / "shared"), "every": 1 << 40, **checkpoints}
        options = {"runs": str(folder / "runs"), "metrics": {"port": 0}, "checkpoints": tiers}
        self.guard = Guard(options, model=self.model, optimizer=self.optimizer, local_only=True)
        self.checkpoints = self.guard._parts.checkpoints
        self.state = self.guard._parts.state
        for _ in range(4):
            self.step()
        self.save_and_wait()

    def step(self) -> None:
        """One step of a batch of 1 x 256."""
        step_loss = loss(self.model, self.tokens)
        step_loss.backward()
        self.guard.before_optimizer(step_loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.guard.end_step()

    def save(self) -> None:
        """What a boundary does at a checkpoint."""
        self.guard._parts.keeper.save_checkpoint()

    def save_and_wait(self) -> None:
        """The same, until both tiers hold it."""
        self.save()
        assert self.checkpoints.wait(600)

    def newest(self) -> Manifest:
        """The newest checkpoint."""
        return self.checkpoints.targets(1 << 62, proven_only=False)[0]

    def go_back(self) -> float:
        """Seconds from the decision to the moment when the next step may begin."""
        target = self.newest()

        def work() -> None:
            self.state.restore(self.checkpoints.load(target).snapshot)

        return seconds(work)


def save_synchronously(training: Training) -> None:
    """As torch does it by itself, into one folder."""
    folder = training.folder / "synchronous"
    shutil.rmtree(folder, ignore_errors=True)
    dcp.save(training.state.tensors(), storage_writer=FileSystemWriter(folder, sync_files=True), no_dist=True)


def bench_blocked(training: Training, rounds: int) -> str:
    """(a) The call against a synchronous save; what is written in the background does not run beside either."""

    def blocked() -> float:
        took = seconds(training.save)
        training.checkpoints.wait(600)
        return took

    times = [(blocked(), seconds(lambda: save_synchronously(training))) for _ in range(rounds)]
    return told(times)


def bench_beside(training: Training, rounds: int) -> str:
    """(b) What the steps lose that run while a checkpoint is written, in all, and how long it takes to be whole."""
    plain = statistics.median(seconds(training.step) for _ in range(10))
    lost, took = [], []
    for _ in range(rounds):
        steps = []

        def beside(steps: list[float] = steps) -> None:
            training.save()
            while not training.checkpoints.wait(0):
                steps.append(seconds(training.step))

        took.append(seconds(beside))
        lost.append(sum(steps) - len(steps) * plain)
    return (
        f"{statistics.median(lost):.2f} s lost by steps of {plain * 1e3:.0f} ms, "
        f"whole in both tiers after {statistics.median(took):.2f} s"
    )


def bench_hash(training: Training, rounds: int) -> str:
    """(c) Writing with a hash of each file against writing without."""
    folder, tensors = training.folder / "hashed", training.state.capture({}).tensors

    def ours() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_tensors(folder, tensors)

    return told(paired(ours, lambda: save_synchronously(training), rounds))


def bench_way_back(training: Training, rounds: int) -> list[str]:
    """(d) Decision to next step, every byte checked in both tiers; then with the local tier lost, which is mended."""
    local = training.folder / "local"

    def forget() -> None:
        training.checkpoints._slots.__init__(1)  # type: ignore[misc]

    def lose() -> None:
        forget()
        for path in local.glob("*/step-*"):
            shutil.rmtree(path)

    lines = []
    for name, prepare in (("memory", training.save_and_wait), ("local", forget), ("shared", lose)):
        times = []
        for _ in range(rounds):
            prepare()
            times.append(training.go_back())
        lines.append(f"{name} {statistics.median(times):.2f} s")
    return lines


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--millions", type=int, nargs="+", default=[10, 85])
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not given")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for millions in options.millions:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            training = Training(millions, Path(folder))
            size = sum(tensor.nbytes for tensor in training.state.tensors().values()) / 2**30
            print(f"{millions} M parameters, {size:.2f} GiB of state", flush=True)
            print(f"(a) blocked / synchronous save: {bench_blocked(training, options.rounds)}", flush=True)
            print(f"(b) steps beside the writer: {bench_beside(training, options.rounds)}", flush=True)
            print(f"(c) written with / without hashes: {bench_hash(training, options.rounds)}", flush=True)
            print(f"(d) decision to next step: {', '.join(bench_way_back(training, options.rounds))}", flush=True)
            training.guard.close()


if __name__ == "__main__":
    main()
