"""Several ranks: real processes over gloo measure, decide and act as one process with the same global batch does."""

import json
import math
import os
import signal
import threading
import time
import urllib.request
from functools import partial

import pytest
import torch
from ranks import RanksJob, run_ranks, start_ranks, times, wait_for_end
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from waiting import wait_for

from exporter.commands import Command
from trainer_plugin.ranks import Ranks, RanksError
from trainer_plugin.step.probe import Limits
from trainer_plugin.step.row import Withhold
from trainer_plugin.step.shared_probe import SharedProbe, Told

pytestmark = pytest.mark.timeout(300)
RUN_SECONDS = 120.0
KINDS = ["ddp", "fsdp2"]


def nan_on_the_last(job, loss):
    """The last rank's loss is not a number, whatever its gradients are."""
    return loss * math.nan if job.rank == job.size - 1 else loss


def train(folder, kind, rank, size, fused):
    """45 steps with a surge, a NaN on one rank, and a gradient beyond float32's squares."""
    damages = {25: times(1e3), 33: nan_on_the_last, 36: times(1e22)}
    job = RanksJob(folder, kind, rank=rank, size=size, fused=fused).run(45, damages)
    guard = job.guard
    told = {
        "signals": job.signals,
        "weights": job.weights(),
        "used": job.used,
        "steps": {int(state["step"]) for state in job.optimizer.state.values()},
        "incidents": guard._parts.policy.state.incidents,
        "page": guard.page.render().decode(),
        "factor": guard._parts.learning_rate.factor,
    }
    guard.close()
    return told


def train_ranks(folder, kind, size, fused, rank):
    """As a rank's work."""
    return train(folder, kind, rank, size, fused)


def assert_as_alone(told, alone):
    """Loss, norms, layers and clip of every step, verdicts, remedies and weights."""
    for here, there in zip(told["signals"], alone["signals"], strict=True):
        assert here.withheld == there.withheld
        assert here.step == there.step
        for name in ("loss", "grad_norm", "clip_coefficient"):
            assert getattr(here, name) == pytest.approx(getattr(there, name), rel=1e-5, nan_ok=True), name
        assert dict(here.layer_grad_norms) == pytest.approx(dict(there.layer_grad_norms), rel=1e-5)
        assert here.learning_rates == there.learning_rates
        assert here.samples == 16
        assert set(here.layers) == set(there.layers)
        for layer, reading in there.layers.items():
            for name in ("weight_norm", "update_ratio", "first_moment_norm", "second_moment_norm", "elements"):
                assert getattr(here.layers[layer], name) == pytest.approx(getattr(reading, name), rel=1e-4)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(told["weights"][name], weight, rtol=0.0, atol=1e-4)
    assert told["steps"] == alone["steps"]
    assert told["factor"] == alone["factor"]


def remedies(told):
    """What was done, and when."""
    return [(one.action, one.step, one.outcome) for incident in told["incidents"] for one in incident.remedies]


def check(tmp_path, kind, size, fused):
    """Several ranks against one process."""
    alone = train(tmp_path / "alone", "alone", 0, 1, fused)
    ranks = run_ranks(size, partial(train_ranks, tmp_path, kind, size, fused), tmp_path / "ranks", RUN_SECONDS)
    assert [one.withheld for one in alone["signals"]].count("nonfinite") == 1
    assert ("lower_lr", 25, "done") in remedies(alone)
    for told in ranks:
        assert_as_alone(told, alone)
    first, *others = ranks
    assert remedies(first) == remedies(alone)
    for here, there in zip(first["incidents"], alone["incidents"], strict=True):
        assert (here.first_step, here.detected_step, here.class_) == (
            there.first_step,
            there.detected_step,
            there.class_,
        )
    # A01: all ranks leave the step out, and the one where it began has a name.
    bad = first["signals"][32]
    assert (bad.withheld, bad.loss_ranks) == ("nonfinite", (size - 1,))
    evidence = " ".join(line for incident in first["incidents"] for line in incident.evidence)
    assert f"step 33: the loss is not finite on rank {size - 1}" in evidence
    assert f'train_nonfinite_total{{run="tiny",rank="{size - 1}",where="loss"}} 1.0' in others[-1]["page"]
    # Design decision 12: the other ranks show their own times and counts, and no more.
    assert "train_step_seconds_count" in others[0]["page"]
    assert "train_data_wait_seconds_count" in others[0]["page"]
    assert "train_loss" not in others[0]["page"]
    assert 'train_info{run="tiny",rank="0",' in first["page"]
    assert f'world_size="{size}"' in first["page"]


@pytest.mark.parametrize(("kind", "fused"), [("ddp", True), ("fsdp2", False)])
def test_p05_a01_two_ranks_are_one_process(tmp_path, kind, fused):
    """Loss, norms, clip, verdicts and remedies of 45 steps are those of one process, on every rank; so are the weights.

    A NaN loss on one rank withholds the step on both, with the flag on the device and without, and the rank is named.
    """
    check(tmp_path, kind, 2, fused)


@pytest.mark.live
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_of_every_kind_are_one_process(tmp_path, kind, size, fused):
    """As above, for two and four ranks, each way to shield, DDP and FSDP2."""
    check(tmp_path, kind, size, fused)


class Pieces:
    """Measurements on two ranks, each in turn."""

    def __init__(self, rank):
        self.rank = rank
        self.ranks = Ranks.of(nn.Linear(1, 1))

    def measure(self, model, loss=1.0, limits=None, **told):
        """A row of gradients that are there."""
        probe = SharedProbe(model, self.ranks)
        loss = None if loss is None else torch.tensor(loss)
        row, bad = probe.measure(loss, limits or Limits(), told=Told(**told))
        return row.read(), float(bad)

    def stage(self):
        """P06: a pipeline's stage with parameters of its own, of norm 3 on one rank and 4 on the other."""
        model = nn.ModuleDict({f"stage{self.rank}": nn.Linear(1, 1, bias=False)})
        model[f"stage{self.rank}"].weight.grad = torch.full((1, 1), 3.0 + self.rank)
        values, _ = self.measure(model, 2.0 if self.rank else None, Limits(max_norm=1.0))
        clipped = model[f"stage{self.rank}"].weight.grad.item()
        return values.loss, values.grad_norm, values.layer_grad_norms, clipped

    def mixed(self):
        """A sharded layer and one that every rank has; the norm of the whole, and of the parts."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
        inputs = torch.randn(4, 5)
        model(inputs).square().mean().backward()
        wanted = {f"{place}": nn.utils.get_total_norm([p.grad for p in model[place].parameters()]) for place in (0, 1)}
        model.zero_grad()
        fully_shard(model[0])
        model(inputs).square().mean().backward()  # The same on both ranks: so are the gradients that are not sharded.
        values, _ = self.measure(model)
        return wanted, values.layer_grad_norms, values.grad_norm

    def replicated(self):
        """Sharded over one dimension of a mesh and replicated over the other, of one rank each."""
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        model(torch.ones(1, 6)).sum().backward()
        wanted = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        model.zero_grad()
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        model(torch.ones(1, 6)).sum().backward()
        return wanted, self.measure(model)[0].grad_norm

    def losses(self):
        """Of 100 tokens at 4 and 300 at 2: weighted where both tell them, else not."""
        model = nn.Linear(1, 1)
        loss, tokens = (4.0, 100) if self.rank == 0 else (2.0, 300)
        both = self.measure(model, loss, tokens=tokens)[0]
        one = self.measure(model, loss, tokens=tokens if self.rank else None)[0]
        return both.loss, both.shared.tokens, both.grad_norm, one.loss

    def words(self):
        """The first rank's limits and wishes, and a stop that the other one was asked for."""
        model = nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.full((1, 1), 8.0)
        with torch.no_grad():
            model.weight.fill_(1.0)
        limits = Limits(max_norm=2.0 if self.rank == 0 else 99.0)
        heeded = self.measure(model, 1.0, limits, heed_norm=5.0)[0]
        clipped = model.weight.grad.item()
        calm = self.measure(model, 1.0, Limits(), heed_norm=5.0)[0]
        stop = self.measure(model, 1.0, Limits(), stop_asked=self.rank == 1)[0]
        return heeded.shared.talks, clipped, calm.shared.talks, calm.shared.stop_asked, stop.shared.stop_asked

    def sizes(self):
        """P02: what is beyond float32's squares is finite but huge; an Inf on one rank is not, on neither."""
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        results = []
        for gradients in ((1e21, 1e21), (1.0, math.inf)):
            model.weight.grad = torch.full((1, 1), gradients[self.rank])
            values, bad = self.measure(model, 1.0, Limits(max_norm=1.0))
            results.append((values.withhold.name, values.grad_norm, bad, values.shared.gradient_ranks))
        return results

    def rows(self):
        """Spikes in a row by the first rank's limit; what no rank can read and a NaN on one leave the row as it is."""
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        model.weight.grad = torch.ones(1, 1)
        probe = SharedProbe(model, self.ranks)
        limits = Limits(spike_loss=5.0 if self.rank == 0 else 99.0)
        withheld = []
        for loss in (6.0, None, 6.0, math.nan if self.rank else 6.0, 6.0, 6.0, 1.0, 6.0):
            row, _ = probe.measure(None if loss is None else torch.tensor(loss), limits)
            withheld.append(row.read().withhold is Withhold.SPIKE)
        again = [probe.measure(torch.tensor(6.0), limits, again=True)[1].item() for _ in range(2)]
        return withheld, again

    def strangers(self):
        """Another parameter by the same name, and options that are not the same."""
        torch.manual_seed(self.rank)
        with pytest.raises(ValueError, match="parameter weight is another one on rank"):
            SharedProbe(nn.Linear(3, 3), self.ranks)
        with pytest.raises(ValueError, match=r"has another guard.yaml than"):
            self.ranks.must_agree("guard.yaml", {"every": self.rank})

    def first_does(self):
        """Work of the first rank, its error on all."""
        assert self.ranks.first_does(lambda: 7) == (7 if self.rank == 0 else None)
        with pytest.raises(OSError if self.rank == 0 else RanksError, match="no disk"):
            self.ranks.first_does(partial(_fail, OSError("no disk")))


def _fail(error):
    raise error


def pieces(rank):
    """All measurements."""
    of = Pieces(rank)
    of.strangers()
    of.first_does()
    names = ("stage", "mixed", "replicated", "losses", "words", "sizes", "rows")
    return {name: getattr(of, name)() for name in names}


def test_p06_parts_of_every_kind_are_measured_together(tmp_path):
    """Stages of a pipeline, sharded and replicated parameters mixed, losses by tokens, limits of the first rank."""
    for told in run_ranks(2, pieces, tmp_path, RUN_SECONDS):
        loss, norm, layers, clipped = told["stage"]
        assert (loss, norm, layers) == (2.0, 5.0, {"stage0": 3.0, "stage1": 4.0})
        assert clipped == pytest.approx(layers[f"stage{int(clipped > 0.7)}"] / 5.0, rel=1e-5)
        wanted, layers, total = told["mixed"]
        assert layers == pytest.approx({name: norm.item() for name, norm in wanted.items()}, rel=1e-5)
        assert total == pytest.approx(math.hypot(*layers.values()), rel=1e-5)
        assert told["replicated"][0] == pytest.approx(told["replicated"][1], rel=1e-5)
        assert told["losses"] == (2.5, 400, None, 3.0)
        assert told["words"] == (True, pytest.approx(2.0, rel=1e-5), False, False, True)
        assert told["sizes"] == [("HUGE", pytest.approx(1e21), 1.0, ()), ("NONFINITE", math.inf, 1.0, (1,))]
        assert told["rows"] == ([False, False, True, False, True, True, False, False], [0.0, 0.0])


def obey(folder, rank):
    """A command to the first rank's inbox, then SIGTERM to the second one alone."""
    job = RanksJob(folder, "ddp", rank=rank, size=2)
    guard = job.guard
    entry = json.loads((folder / "runs" / "targets" / f"tiny-{rank}.json").read_text())
    address, labels = entry[0]["targets"][0], entry[0]["labels"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    lowered_at = None
    if rank == 0:
        inbox = guard._parts.folder.inbox
        inbox.put(Command(id="a1", run="tiny", action="lower_lr", source="operator", received=time.time()))
        wait_for(guard._parts.loop.commands)
    for number in range(8):
        job.step()
        if lowered_at is None and guard._parts.learning_rate.factor < 1.0:
            lowered_at = number + 1
        if rank == 1 and number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        if guard.stopping:
            break
    guard.close()
    return {"page": page, "labels": labels, "address": address, "lowered_at": lowered_at, "stopped_at": guard.step}


def test_a_rank_that_has_not_met_the_others_is_told(monkeypatch):
    """Under torchrun the guard comes after `init_process_group`; by itself it would fight for the run's folder."""
    for name, value in (("TORCHELASTIC_RUN_ID", "a"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="init_process_group must come before the guard"):
        Ranks.of(nn.Linear(1, 1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.of(nn.Linear(1, 1)).alone


def test_what_one_rank_hears_all_do_at_one_boundary(tmp_path):
    """A command that only the first rank has read and a signal that only the second one got: at the same step on both.

    Each rank has an address of its own, where it shows itself by its number.
    """
    first, second = run_ranks(2, partial(obey, tmp_path), tmp_path / "ranks", RUN_SECONDS)
    assert first["lowered_at"] == second["lowered_at"] == 1
    assert first["stopped_at"] == second["stopped_at"] == 6
    assert (first["labels"]["rank"], second["labels"]["rank"]) == ("0", "1")
    assert first["address"] != second["address"]
    assert 'train_info{run="tiny",rank="1",' in second["page"]
    assert list((tmp_path / "runs" / "targets").iterdir()) == []


def one_sharded_process(folder, rank):
    """A process that is alone, with its model in DTensors."""
    job = RanksJob(folder, "fsdp2", rank=rank, size=1).run(12)
    told = {"losses": [signals.loss for signals in job.signals], **job.finish()}
    again = RanksJob(folder, "fsdp2", rank=rank, size=1)
    told["again"] = again.guard.step, again.weights()
    again.guard.close()
    with pytest.raises(ValueError, match=r"shard it with fully_shard \(FSDP2\) instead"):
        RanksJob(folder, "fsdp1", rank=rank, size=1)
    return told


@pytest.mark.live
def test_one_process_may_be_sharded_too(tmp_path):
    """FSDP2 on a single process trains, saves and goes on as without it; FSDP1 is refused."""
    alone = RanksJob(tmp_path / "alone", "alone").run(12)
    alone.guard.close()
    (told,) = run_ranks(1, partial(one_sharded_process, tmp_path / "run"), tmp_path / "ranks", RUN_SECONDS)
    assert told["losses"] == pytest.approx([signals.loss for signals in alone.signals], rel=1e-6)
    step, weights = told["again"]
    assert step in (10, 12)
    assert weights.keys() == told["weights"].keys()


def late(folder, rank):
    """The second rank comes five seconds late to a step in which its loss is NaN, with a time-out of two seconds."""
    job = RanksJob(folder, "ddp", rank=rank, size=2, ranks={"timeout_seconds": 2.0})
    job.run(4)
    if rank == 1:
        threading.Event().wait(5.0)
    job.step(nan_on_the_last)
    job.run(8)
    job.guard.close()
    return [signals.withheld for signals in job.signals]


@pytest.mark.live
def test_a_rank_that_is_late_is_waited_for(tmp_path):
    """Slow is not dead, however short the time-out: both ranks withhold the same step, and go on."""
    first, second = run_ranks(2, partial(late, tmp_path), tmp_path / "ranks", RUN_SECONDS)
    assert first == second
    assert [place for place, withheld in enumerate(first) if withheld] == [4]


def wait_for_the_end(folder, how, rank):
    """The second rank is stopped or killed in mid-run; what happens to the first one?"""
    job = RanksJob(folder, "ddp", rank=rank, size=2, ranks={"timeout_seconds": 4.0})
    job.run(3)
    (folder / f"ready-{rank}").touch()
    if rank == 1:
        os.kill(os.getpid(), how)
    try:
        job.run(1000)
    except RuntimeError:
        # Of a lost connection the collective may hear first; an interpreter takes its time to end, and so does this.
        wait_for(lambda: "rank 1 on " in (folder / "ranks" / "rank-0.log").read_text(), 5.0)
        raise


@pytest.mark.live
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["hung", "dead"])
def test_a02_a_rank_that_is_gone_ends_the_others(tmp_path, how):
    """Hung or dead, it is missed within the time-out and a moment to end by oneself; and a line says who it was."""
    first, second = start_ranks(2, partial(wait_for_the_end, tmp_path, how), tmp_path / "ranks")
    wait_for((tmp_path / "ready-1").exists, RUN_SECONDS)
    began = time.monotonic()
    first.process.join(60.0)
    took = time.monotonic() - began
    second.process.kill()
    wait_for_end([first, second], 10.0)
    assert first.code == 1
    assert took < 20.0
    assert "rank 1 on " in first.log
    assert ("is silent for" if how == signal.SIGSTOP else "has died") in first.log
