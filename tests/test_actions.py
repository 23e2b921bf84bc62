"""Actions: what each does to the job, and what comes of it when a disk or a checkpoint is bad."""

import shutil

import pytest
import torch
from training import Batches, equal, tiny_model

from trainer_plugin.actions import Actions, ClipLimit
from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.layer_state import LayerState
from trainer_plugin.checkpoints.retention import CheckpointsConfig
from trainer_plugin.checkpoints.set_aside import SetAside
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.checkpoints.store import Checkpoints
from trainer_plugin.data.batches import Data
from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.policy.decisions import ActionsConfig, Decision, Moment
from trainer_plugin.policy.incidents import Incident

MOMENT = Moment(step=40, steps_total=40, now=1.0, loop_up=False)


def incident(first_step: int = 36, class_: str = "unknown") -> Incident:
    """An incident that began at a step."""
    return Incident(id=3, first_step=first_step, detected_step=first_step, last_step=first_step, class_=class_)


def decision(action: str, **options) -> Decision:
    """What the policy would decide."""
    options = {"incident": incident(), "before_step": 35, "source": "local", **options}
    return Decision(action=action, reason="for a test", **options)


class Fussy:
    """A scheduler that may refuse what it is to load."""

    def __init__(self) -> None:
        self.refusals = 0

    def state_dict(self):
        """What it holds."""
        return {"position": 1}

    def load_state_dict(self, _state):
        """Refuse as often as told to."""
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("no")


class Rig:
    """A job at step 40 with checkpoints of steps 10, 20 and 30; weights hold the step they were saved at."""

    def __init__(self, folder, *, source=None, **options) -> None:
        self.model = tiny_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.learning_rate = LrFactor([self.optimizer])
        self.scheduler = Fussy()
        self.data = Data(source or Batches())
        self.state = TrainingState(
            model=self.model, optimizers=[self.optimizer], scheduler=self.scheduler, data=self.data
        )
        config = CheckpointsConfig(local=str(folder / "local"), shared=str(folder / "shared"), keep_local=5)
        self.checkpoints = Checkpoints(config, "tiny", on_failure=lambda _: None)
        self.checkpoints.open()
        self.checkpoints.proven_step = 35
        self.clip = ClipLimit(ActionsConfig(**options))
        self.actions = Actions(
            ActionsConfig(**options),
            lr_floor=0.1,
            clip=self.clip,
            learning_rate=self.learning_rate,
            checkpoints=self.checkpoints,
            state=self.state,
            layer_state=LayerState(self.model, [self.optimizer]),
            data=self.data,
            save=self.save,
            set_aside=SetAside(folder / "run", capture=lambda: self.state.capture({"step": 40}), place=lambda: (40, 0)),
        )
        self.saves = [True]
        self.saved = 0
        for step in range(1, 41):
            self.data.next_batch(step)
            if step % 10 == 0:
                self.fill(step)
                self.checkpoints.save(self.state.capture({"step": step}), step)
                self.checkpoints.wait()

    def fill(self, value: float) -> None:
        """Set every weight."""
        for parameter in self.model.parameters():
            parameter.data.fill_(value)

    def save(self) -> bool:
        """Save, as the guard would."""
        self.saved += 1
        return self.saves[0]

    def apply(self, action: str, **options):
        """Carry a decision out at step 40."""
        return self.actions.apply(decision(action, **options), MOMENT)

    @property
    def weight(self) -> float:
        """The step whose weights are there."""
        return self.model[0].bias[0].item()


@pytest.fixture
def rig(tmp_path):
    """A job with three targets before its incident."""
    return Rig(tmp_path)


def test_clip_is_tightened_for_its_time(rig):
    """Half of the recipe's limit for 200 optimizer steps, then the recipe's again."""
    result = rig.apply("clip")
    assert (result.outcome, result.detail) == ("done", "clip to 0.5 for 200 steps")
    assert [rig.clip.max_norm(steps) for steps in (40, 239, 240)] == [0.5, 0.5, 1.0]


def test_a_run_that_does_not_clip_says_so(tmp_path):
    """With clip_max_norm null there is nothing to tighten."""
    rig = Rig(tmp_path, clip_max_norm=None)
    result = rig.apply("clip")
    assert result.outcome == "failed"
    assert "does not clip" in result.detail
    assert rig.clip.max_norm(0) is None


def test_lower_lr_is_the_configured_factor(rig):
    """The factor is on from the next step."""
    result = rig.apply("lower_lr")
    assert (result.outcome, result.detail) == ("done", "learning rate x 0.5 for 200 steps")
    assert rig.learning_rate.factor == 0.5


@pytest.mark.parametrize(("hold_steps", "return_steps", "until"), [(200, 200, 80), (10, 5, 55)])
@pytest.mark.parametrize("action", ["lower_lr", "rollback"])
def test_a_precaution_is_brief(tmp_path, action, hold_steps, return_steps, until):
    """A lower rate that is a precaution lasts 20 steps and comes back over 20, or less where less is configured."""
    rig = Rig(tmp_path, lr_hold_steps=hold_steps, lr_return_steps=return_steps)
    assert rig.apply(action, brief=True).outcome == "done"
    held = min(20, hold_steps)
    assert [rig.learning_rate.advance(40 + steps) for steps in (0, held - 1)] == [0.5, 0.5]
    assert 0.5 < rig.learning_rate.advance(until - 1) < rig.learning_rate.advance(until) == 1.0


def test_note_does_nothing_and_is_done(rig):
    """A note is only kept."""
    assert rig.apply("note").outcome == "done"
    assert rig.weight == 40.0


def test_a_rollback_from_a_fault_of_the_machine_keeps_the_rate(rig):
    """A lower rate mends no machine; after any other rollback the rate is halved."""
    assert rig.apply("rollback", incident=incident(class_="hardware")).outcome == "done"
    assert rig.learning_rate.factor == 1.0
    assert rig.apply("rollback").outcome == "done"
    assert rig.learning_rate.factor == 0.5


def test_skip_batch_leaves_the_suspect_data_out_and_changes_nothing_else(rig):
    """What the first bad step used, with its window, is left out from now on; weights, rate and position stay."""
    result = rig.apply("skip_batch")
    assert (result.outcome, result.detail) == ("done", "batches 30 to 55 are left out")
    assert rig.data.quarantine == [result.quarantine]
    assert (rig.weight, rig.learning_rate.factor, rig.data.position) == (40.0, 1.0, 40)
    rig.apply("skip_batch", incident=incident(class_="bad_sample"))
    assert [(one.first, one.last) for one in rig.data.quarantine] == [(30, 55), (35, 35)]
    drawn = [rig.data.next_batch(41), rig.data.position]
    assert (drawn[0][1], drawn[1]) == (16, 57)  # 40 to 55 were passed over.


def test_skip_batch_in_quiet_times_is_one_batch(rig):
    """Without an incident the data of just that step are meant; of a step that nobody remembers, none."""
    quiet = Incident(id=0, first_step=40, detected_step=40, last_step=40)
    assert rig.apply("skip_batch", incident=quiet).detail == "batches 39 to 39 are left out"
    gone = Incident(id=0, first_step=9000, detected_step=9000, last_step=9000)
    assert rig.apply("skip_batch", incident=gone).outcome == "observed"  # The job's own wish: nobody is paged for it.
    assert rig.apply("skip_batch", incident=gone, source="operator").outcome == "failed"
    assert len(rig.data.quarantine) == 1


@pytest.mark.parametrize(("saved", "outcome"), [(True, "done"), (False, "failed")])
def test_checkpoint_saves_now(rig, saved, outcome):
    """A checkpoint that is asked for is begun at once, or said to be left out."""
    rig.saves = [saved]
    assert rig.apply("checkpoint").outcome == outcome
    assert rig.saved == 1


def test_a_stop_in_an_incident_sets_the_state_aside(rig, tmp_path):
    """The state is whole in a folder of its own, where no tier has it; a second stop takes its place; none is saved."""
    before = sorted(rig.checkpoints._local.folder.iterdir())
    for _ in range(2):
        result = rig.apply("stop")
        assert (result.outcome, result.stop) == ("done", True)
        (kept,) = (tmp_path / "run" / "stopped").iterdir()
        assert str(kept) in result.detail
    assert manifest.faults(kept, manifest.read(kept)) == []
    assert manifest.read(kept).kind == "stopped"
    assert (sorted(rig.checkpoints._local.folder.iterdir()), rig.saved) == (before, 0)


def test_a_stop_in_quiet_times_saves_to_go_on_from(rig, tmp_path):
    """What is well is an ordinary checkpoint, and nothing is set aside."""
    result = rig.apply("stop", incident=Incident(id=0, first_step=40, detected_step=40, last_step=40))
    assert (result.outcome, result.stop, rig.saved) == ("done", True, 1)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_keeps_no_run_from_being_stopped(rig, tmp_path):
    """Where the state cannot be kept the run stops all the same, and says so."""
    (tmp_path / "run").write_text("in the way")
    result = rig.apply("stop")
    assert (result.outcome, result.stop) == ("done", True)
    assert "the state could not be kept" in result.detail


def test_rollback_brings_all_back(rig):
    """The nearest target before the step is loaded whole, the rate lowered, and the suspect data named."""
    result = rig.apply("rollback")
    assert result.outcome == "done"
    assert result.detail == "to step 30 from the local tier"
    assert rig.weight == 30.0
    assert rig.data.position == 30
    assert rig.learning_rate.factor == 0.5
    # Steps 31 (5 before the first bad one) to 56 (20 after it, 16 of them still to come) have positions 30 to 55.
    assert (result.quarantine.first, result.quarantine.last, result.quarantine.incident) == (30, 55, 3)
    assert rig.data.quarantine == [result.quarantine]


def test_a_bad_sample_costs_its_own_batch_only(rig):
    """In an incident of class bad_sample one batch is left out."""
    result = rig.apply("rollback", incident=incident(36, "bad_sample"))
    assert (result.quarantine.first, result.quarantine.last) == (35, 35)
    assert result.quarantine.reason == "bad_sample at step 36"


def test_batches_that_were_withheld_are_left_out_with_the_first(rig):
    """Of a row of bad batches all that were seen to be bad do not come again."""
    row = incident(36, "bad_sample")
    row.withheld_step = 39
    result = rig.apply("skip_batch", incident=row)
    assert (result.quarantine.first, result.quarantine.last) == (35, 38)


def test_a_wider_window_is_twice_as_wide(rig):
    """A second rollback to the same place doubles the window."""
    result = rig.apply("rollback", widen=2)
    assert (result.quarantine.first, result.quarantine.last) == (25, 75)


def test_a_loader_that_cannot_go_back_goes_on_forward(tmp_path):
    """Plain iterables keep their place, and no data is put in quarantine."""
    rig = Rig(tmp_path, source=range(1000))
    result = rig.apply("rollback")
    assert (result.outcome, result.quarantine) == ("done", None)
    assert rig.data.position == 40


def test_no_target_changes_nothing(rig):
    """Without a checkpoint before the step the outcome says so, and weights and rate stay."""
    result = rig.apply("rollback", before_step=10)
    assert (result.outcome, result.stop, result.loaded) == ("no_target", False, None)
    assert (rig.weight, rig.learning_rate.factor, rig.data.quarantine) == (40.0, 1.0, [])


def test_a_damaged_target_leads_to_the_next_older_one(rig, tmp_path):
    """When the nearest target is whole in no tier, the one before it is taken."""
    for tier in ("local", "shared"):
        next((tmp_path / tier / "tiny" / "step-000000030-000").glob("*.distcp")).unlink()
    result = rig.apply("rollback")
    assert (result.outcome, result.loaded.manifest.step) == ("done", 20)
    assert rig.weight == 20.0


def test_a_broken_tier_is_told_as_degraded(rig, tmp_path):
    """With a tier out of order the rollback is done from the other, and says which one is missing."""
    shutil.rmtree(tmp_path / "local" / "tiny")
    (tmp_path / "local" / "tiny").touch()
    result = rig.apply("rollback")
    assert result.outcome == "done"
    assert result.detail == "to step 30 from the shared tier, degraded: local is out of order"


def test_a_restore_that_fails_half_way_is_mended_by_an_older_target(rig):
    """What one target leaves half restored is overwritten by the next one that loads whole."""
    rig.scheduler.refusals = 1
    result = rig.apply("rollback")
    assert (result.outcome, result.loaded.manifest.step, result.stop) == ("done", 20, False)
    assert rig.weight == 20.0


def test_no_step_may_follow_when_no_target_loads_whole(rig):
    """If every restore fails half-way the job has to stop: its weights are nobody's."""
    rig.scheduler.refusals = 10
    result = rig.apply("rollback")
    assert (result.outcome, result.stop) == ("failed", True)
    assert result.detail.count("no") == 3
    assert rig.data.quarantine == []


def test_targets_that_do_not_fit_touch_nothing(rig):
    """A loop that has changed its shape keeps its weights, and need not stop."""
    rig.model[0] = torch.nn.Linear(5, 8)
    before = [parameter.detach().clone() for parameter in rig.model.parameters()]
    result = rig.apply("rollback")
    assert (result.outcome, result.stop) == ("failed", False)
    assert "model/0.weight is [8, 4]" in result.detail
    assert equal(before, list(rig.model.parameters()))


@pytest.mark.parametrize(("moments", "steps"), [("restore", {7}), ("reset", set()), ("keep", {9})])
def test_rollback_optimizer_is_obeyed(tmp_path, moments, steps):
    """R12: the configured way to treat the moments is the one used."""
    rig = Rig(tmp_path, rollback_optimizer=moments)
    rig.model(torch.ones(1, 4)).sum().backward()
    rig.optimizer.step()
    for state in rig.optimizer.state.values():
        state["step"] += 6
    rig.checkpoints.proven_step = 100
    rig.checkpoints.save(rig.state.capture({"step": 50}), 50)
    for state in rig.optimizer.state.values():
        state["step"] += 2
    rig.apply("rollback", before_step=51)
    assert {int(state["step"]) for state in rig.optimizer.state.values()} == steps


def test_a_partial_rollback_takes_back_its_layers_alone(rig):
    """One layer is that of the nearest target and the rate is lowered; the other layer and the data stay."""
    result = rig.apply("partial_rollback", layers=("0",))
    assert (result.outcome, result.layers) == ("done", ("0",))
    assert result.detail == "layers 0 to step 30 from the local tier"
    assert (rig.weight, rig.model[3].bias.item()) == (30.0, 40.0)
    assert rig.learning_rate.factor == 0.5
    assert (rig.data.position, rig.data.quarantine, result.quarantine) == (40, [], None)


def test_a_partial_rollback_passes_over_a_damaged_target(rig, tmp_path):
    """What is whole in no tier is not used for a layer either: the next older one is."""
    for tier in ("local", "shared"):
        next((tmp_path / tier / "tiny" / "step-000000030-000").glob("*.distcp")).unlink()
    assert rig.apply("partial_rollback", layers=("3",)).outcome == "done"
    assert (rig.weight, rig.model[3].bias.item()) == (40.0, 20.0)


@pytest.mark.parametrize(
    ("options", "outcome", "said"),
    [
        ({"layers": ("0", "7")}, "failed", "this model has no layer 7"),
        ({"layers": ()}, "failed", "no layer is named"),
        ({"layers": ("0",), "before_step": 10}, "no_target", "no proven checkpoint before step 10"),
    ],
)
def test_a_partial_rollback_that_cannot_be_changes_nothing(rig, options, outcome, said):
    """An unknown layer, none at all, or no target: it is said, the weights and the rate stay, and the job goes on."""
    result = rig.apply("partial_rollback", **options)
    assert (result.outcome, result.stop) == (outcome, False)
    assert said in result.detail
    assert (rig.weight, rig.learning_rate.factor) == (40.0, 1.0)
