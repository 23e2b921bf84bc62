"""The guard in Lightning's Trainer: the true loss and norm, the one clip, and a training that heals."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from training import settings

lightning = pytest.importorskip("lightning")

from trainer_plugin.lightning import GuardCallback  # noqa: E402 - only where it is there

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    """A small regression, with a NaN or damage where a test wants one."""

    def __init__(self, *, fused=True, nan_at=(), damage_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self._fused, self._nan_at, self._damage_at = fused, nan_at, damage_at
        self.losses, self.norms = [], []

    def training_step(self, batch, _):
        """Mean squared error against the sum."""
        loss = nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True))
        self.losses.append(loss.item())
        return loss * math.nan if self.global_step + 1 in self._nan_at else loss

    def on_train_batch_end(self, *_):
        """Spoil a weight once."""
        if self.global_step == self._damage_at:
            self._damage_at = None
            with torch.no_grad():
                self.net[0].weight[0, 0] = math.nan

    def configure_optimizers(self):
        """AdamW and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self._fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count=400):
    """The same batches in every run."""
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(torch.randn(count * 16, 4, generator=generator), batch_size=16)


def train(tmp_path, steps, module, *, callbacks=(), accumulation=1, **options):
    """Train for so many optimizer steps."""
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), accumulate_grad_batches=accumulation,
        default_root_dir=str(tmp_path), **options,
    )  # fmt: skip
    trainer.fit(module, batches())
    return trainer


def guarded(tmp_path, **sections):
    """A callback for short runs, and the list that its signals go to."""
    seen = []
    return GuardCallback(settings(tmp_path, **sections), local_only=True, on_signals=seen.append), seen


def weights(module):
    """All of them, as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_uneventful_training_is_the_same_with_the_guard(tmp_path, accumulation, fused):
    """Weights to rounding; the guard's losses are the means over the micro-batches."""
    plain, watched = Module(fused=fused), Module(fused=fused)
    train(tmp_path, 12, plain, accumulation=accumulation, gradient_clip_val=1.0)
    guard, seen = guarded(tmp_path)
    train(tmp_path, 12, watched, callbacks=[guard], accumulation=accumulation)
    assert torch.allclose(weights(plain), weights(watched), rtol=1e-4, atol=1e-6)
    means = [
        sum(watched.losses[at : at + accumulation]) / accumulation for at in range(0, 12 * accumulation, accumulation)
    ]
    assert [one.step for one in seen] == list(range(1, 13))
    assert [one.loss for one in seen] == pytest.approx(means, rel=1e-5)
    assert set(seen[0].layer_grad_norms) == {"net.0", "net.2"}


@pytest.mark.parametrize("fused", [True, False])
def test_a_nan_loss_costs_its_step_and_nothing_else(tmp_path, fused):
    """The update is withheld and the schedule stays with the applied steps."""
    module = Module(fused=fused, nan_at=(7,))
    guard, seen = guarded(tmp_path)
    trainer = train(tmp_path, 12, module, callbacks=[guard])
    assert torch.isfinite(weights(module)).all()
    assert [(one.step, one.withheld) for one in seen if one.withheld] == [(7, "nonfinite")]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 11


def test_a_damaged_model_goes_back_and_the_trainer_goes_on(tmp_path):
    """Weights that are not finite are rolled back; the Trainer's own count goes on to its end."""
    module = Module(damage_at=25)
    guard, seen = guarded(tmp_path)
    trainer = train(tmp_path, 40, module, callbacks=[guard])
    assert trainer.global_step == 40
    assert torch.isfinite(weights(module)).all()
    steps = [one.step for one in seen]
    assert sum(after <= before for before, after in pairwise(steps)) == 1
    assert math.isfinite(seen[-1].loss)


def test_a_second_clip_is_refused_in_one_line(tmp_path):
    """Where the Trainer clips too, the guard would measure what it has clipped."""
    guard, _ = guarded(tmp_path)
    with pytest.raises(ValueError, match=r"gradient_clip_val=None wanted, found 1\.0"):
        train(tmp_path, 1, Module(), callbacks=[guard], gradient_clip_val=1.0)


def test_the_run_folder_is_left_also_after_an_error(tmp_path):
    """An exception in the training closes the guard: the next job finds the folder free."""

    class Broken(Module):
        """Fails in its third step."""

        def training_step(self, batch, number):
            """Raise at the third."""
            if number == 2:
                raise RuntimeError("broken")
            return super().training_step(batch, number)

    guard, _ = guarded(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path, 10, Broken(), callbacks=[guard])
    assert guard.guard is None
    again, seen = guarded(tmp_path)
    train(tmp_path, 3, Module(), callbacks=[again])
    assert len(seen) == 3
