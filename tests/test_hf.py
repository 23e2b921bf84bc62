"""The guard in Hugging Face's Trainer: the true loss and norm, the one clip, and a training that heals."""

import logging
import math
from itertools import pairwise

import pytest
import torch
from training import settings

transformers = pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from trainer_plugin.hf import GuardCallback  # noqa: E402 - only where it is there

pytestmark = pytest.mark.filterwarnings("ignore")


class Text(torch.utils.data.Dataset):
    """Sequences with a pattern to learn, the same in every run."""

    def __len__(self):
        """As many as any test here takes."""
        return 4096

    def __getitem__(self, index):
        """A count from a random place, modulo the vocabulary."""
        start = int(torch.randint(31, (), generator=torch.Generator().manual_seed(index)))
        ids = (torch.arange(16) + start) % 32
        return {"input_ids": ids, "labels": ids}


class Spoil(TrainerCallback):
    """Puts a NaN into one gradient of some steps, as late as a callback can before the clip: in a tensor's hook."""

    def __init__(self, *steps):
        self._steps = steps
        self.state = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Hook one parameter."""
        self.state = state
        model.lm_head.weight.register_hook(self._spoil)

    def _spoil(self, gradient):
        return gradient * math.nan if self.state.global_step + 1 in self._steps else gradient


class Pages(TrainerCallback):
    """Keeps the guard's page, which is gone with the guard when the training is over."""

    def __init__(self, guard, pages):
        self._guard, self._pages = guard, pages

    def on_step_end(self, *args, **kwargs):
        """Once a step."""
        self._pages.append(self._guard.guard.page)


def model(seed=0):
    """A Llama of 20,000 parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(tmp_path, steps, *, guard=None, accumulation=1, callbacks=(), optim="adamw_torch_fused", **arguments):
    """Train; the trainer, and every step's signals where there is a guard."""
    options = {
        "output_dir": str(tmp_path / "out"), "max_steps": steps, "per_device_train_batch_size": 4, "use_cpu": True,
        "gradient_accumulation_steps": accumulation, "learning_rate": 3e-3, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "seed": 1, "optim": optim, **arguments,
    }  # fmt: skip
    trainer = Trainer(
        model=model(), args=TrainingArguments(**options), train_dataset=Text(),
        callbacks=[*callbacks, *([guard] if guard is not None else [])],
    )  # fmt: skip
    if guard is not None:
        guard.attach(trainer)
    trainer.train()
    return trainer


def guarded(tmp_path, **sections):
    """A callback for short runs, and the list that its signals go to."""
    seen = []
    config = settings(tmp_path, actions={"clip_max_norm": 1.0, "lr_hold_steps": 10, "lr_return_steps": 4}, **sections)
    return GuardCallback(config, local_only=True, on_signals=seen.append), seen


def weights(trainer):
    """All of them, as one vector."""
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_uneventful_training_is_the_same_with_the_guard(tmp_path, accumulation):
    """Weights to rounding, and the loss and norm that the Trainer logs are those that the guard has seen."""
    plain = train(tmp_path, 12, accumulation=accumulation)
    guard, seen = guarded(tmp_path)
    watched = train(tmp_path, 12, guard=guard, accumulation=accumulation)
    assert torch.allclose(weights(plain), weights(watched), rtol=1e-4, atol=1e-6)
    logged = [entry for entry in watched.state.log_history if "loss" in entry]
    assert [one.step for one in seen] == list(range(1, 13))
    for entry, one in zip(logged, seen, strict=True):
        assert one.loss == pytest.approx(entry["loss"], rel=1e-3, abs=1e-4)
        assert one.grad_norm == pytest.approx(entry["grad_norm"], rel=1e-3)
    assert {len(one.layer_grad_norms) for one in seen} == {5}


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_nan_gradient_costs_its_step_and_no_layer(tmp_path, optim):
    """The Trainer's own clip would make every gradient NaN; here the update is withheld, and the layer is named."""
    guard, seen = guarded(tmp_path)
    trainer = train(tmp_path, 12, guard=guard, callbacks=[Spoil(7)], optim=optim)
    assert torch.isfinite(weights(trainer)).all()
    assert [one.step for one in seen if one.withheld] == [7]
    bad = {layer for layer, norm in seen[6].layer_grad_norms.items() if not math.isfinite(norm)}
    assert bad == {"lm_head"}
    assert trainer.lr_scheduler.last_epoch == 11


def test_p13_the_true_loss_is_seen_where_the_trainer_hides_it(tmp_path):
    """A NaN loss at step 7 is NaN for the guard, though the Trainer's log is finite (case P13)."""

    class NanAt(Trainer):
        """Its loss is NaN in one step."""

        def compute_loss(self, *args, **kwargs):
            """The loss, or NaN."""
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == 6 else loss

    guard, seen = guarded(tmp_path)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=10, use_cpu=True, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_nan_inf_filter=True,
    )  # fmt: skip
    trainer = NanAt(model=model(), args=arguments, train_dataset=Text(), callbacks=[guard])
    guard.attach(trainer)
    pages = []
    trainer.add_callback(Pages(guard, pages))
    trainer.train()
    assert [one.step for one in seen if math.isnan(one.loss)] == [7]
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert pages[-1].value("train_nonfinite_total", "loss") == 1
    assert torch.isfinite(weights(trainer)).all()


def test_a_damaged_model_goes_back_and_the_trainer_goes_on(tmp_path):
    """Weights that are not finite are rolled back within the step; the Trainer's own count goes on to its end."""

    class Damage(TrainerCallback):
        """Spoils a weight once."""

        def on_step_end(self, args, state, control, model=None, **kwargs):
            """After step 25."""
            if state.global_step == 25:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] = math.nan

    guard, seen = guarded(tmp_path)
    trainer = train(tmp_path, 40, guard=guard, callbacks=[Damage()])
    assert trainer.state.global_step == 40
    assert torch.isfinite(weights(trainer)).all()
    steps = [one.step for one in seen]
    gone_back = [after for before, after in pairwise(steps) if after <= before]
    assert len(gone_back) == 1
    assert math.isfinite(seen[-1].loss)


def test_what_cannot_be_followed_is_said_at_the_start(tmp_path, caplog):
    """A missing attach is an error; another clip than the guard's is said."""
    guard, _ = guarded(tmp_path)
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), max_steps=1, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"guard\.attach\(trainer\) is missing"):
        Trainer(model=model(), args=arguments, train_dataset=Text(), callbacks=[guard]).train()
    with caplog.at_level(logging.WARNING):
        train(tmp_path, 1, guard=guard, max_grad_norm=0.5)
    assert "clips to 1.0 (clip_max_norm), not the Trainer's max_grad_norm of 0.5" in caplog.text


def test_the_page_names_the_framework(tmp_path):
    """`train_info` says whose loop it is, and that the data go on forward."""
    guard, _ = guarded(tmp_path)
    pages = []
    train(tmp_path, 2, guard=guard, callbacks=[Pages(guard, pages)])
    assert b'framework="transformers"' in pages[-1].render()
