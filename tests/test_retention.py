"""Retention: the options of checkpoints, lineage after any number of rollbacks, and what a tier keeps."""

import pytest

from trainer_plugin.checkpoints.manifest import Manifest
from trainer_plugin.checkpoints.retention import CheckpointsConfig, Lineage, SaveEvery, kept


def checkpoint(step: int, branch: int = 0, *, finite: bool = True) -> Manifest:
    """A manifest."""
    return Manifest(
        run="tiny", step=step, branch=branch, kind="periodic", finite=finite, created=0.0, files={}, torch=""
    )  # fmt: skip


def kept_steps(*checkpoints: Manifest, keep: int, lineage: Lineage | None = None, proven: int = 1 << 62) -> list[int]:
    """The steps that a tier keeps, everything up to `proven` being proven."""
    live = (lineage or Lineage()).live
    names = kept(checkpoints, keep=keep, live=live, proven=lambda m: m.step <= proven)
    return sorted(m.step for m in checkpoints if m.name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "`every` must be at least 1"),
        ({"keep_memory": 0}, "`keep_memory` must be at least 1"),
        ({"every": 10, "every_shared": 25}, "`every_shared` must be a multiple of `every`, found 25"),
        ({"every_shared": 0}, "`every_shared` must be a multiple of `every`, found 0"),
        ({"proof_steps": -1}, "`proof_steps` must be at least 0"),
        ({"local": "a", "shared": "./a"}, "two folders"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    """Bad options are told by name."""
    with pytest.raises(ValueError, match=message):
        CheckpointsConfig(**options)


def test_each_tier_has_its_interval_and_its_number():
    """The shared tier is written as often as the local one where nothing else is said."""
    assert CheckpointsConfig(every=10).tiers == {
        "local": SaveEvery(every=10, keep=2),
        "shared": SaveEvery(every=10, keep=5),
    }
    assert CheckpointsConfig(every=10, every_shared=30).tiers["shared"].every == 30


def test_the_newest_are_kept_and_the_last_proven_one():
    """However many unproven ones come after it, the newest proven checkpoint stays."""
    saved = [checkpoint(step) for step in (10, 20, 30, 40, 50)]
    assert kept_steps(*saved, keep=2) == [40, 50]
    assert kept_steps(*saved, keep=2, proven=25) == [20, 40, 50]


def test_what_is_not_finite_takes_no_place():
    """A checkpoint that can never be a target keeps none out that can."""
    assert kept_steps(checkpoint(10), checkpoint(20), checkpoint(30, finite=False), keep=1) == [20]


def test_an_abandoned_branch_stays_while_nothing_else_is_proven():
    """Until the new branch has a proven checkpoint, the old branch's newest may be all there is; then it goes."""
    lineage = Lineage(began_at=[0, 0])
    saved = [checkpoint(10), checkpoint(20), checkpoint(15, branch=1)]
    assert kept_steps(*saved, keep=1, lineage=lineage, proven=-1) == [15, 20]
    assert kept_steps(*saved, keep=1, lineage=lineage) == [15]


def live(lineage: Lineage, branch: int) -> list[int]:
    """The steps, of those saved every 100 steps in a branch, that today's weights came through."""
    return [step for step in range(0, 1100, 100) if lineage.live(checkpoint(step, branch))]


def test_a_run_that_never_went_back_has_one_branch():
    """Everything it saved is its own."""
    lineage = Lineage()
    assert lineage.branch == 0
    assert live(lineage, 0) == list(range(0, 1100, 100))


def test_what_was_saved_beyond_the_point_of_return_is_abandoned():
    """Back from 1000 to 500: what lies beyond 500 in the old branch is dead for good, whatever the new one reaches."""
    lineage = Lineage()
    lineage.begin(500)
    assert lineage.branch == 1
    assert live(lineage, 0) == [0, 100, 200, 300, 400, 500]
    assert live(lineage, 1) == list(range(0, 1100, 100))


def test_going_back_further_abandons_the_second_branch_too():
    """Back to 500, and from there back to 300: of both branches only what lies before counts."""
    lineage = Lineage()
    lineage.begin(500)
    lineage.begin(300)
    assert live(lineage, 0) == live(lineage, 1) == [0, 100, 200, 300]


def test_going_back_less_far_leaves_the_first_point_where_it_was():
    """Back to 500, on to 900 and back to 700: the first branch counts up to 500, the second up to 700."""
    lineage = Lineage()
    lineage.begin(500)
    lineage.begin(700)
    assert live(lineage, 0) == [0, 100, 200, 300, 400, 500]
    assert live(lineage, 1) == [0, 100, 200, 300, 400, 500, 600, 700]


def test_one_step_in_two_branches_is_two_names():
    """A step number that comes again does not collide with the first."""
    assert checkpoint(600, 0).name != checkpoint(600, 1).name


@pytest.mark.parametrize("scenes", [-1, -3])
def test_a_number_of_scenes_below_none_is_refused(scenes):
    """The option is told by name; 0 is no scene at all."""
    with pytest.raises(ValueError, match=f"`scenes` must be at least 0, found {scenes}"):
        CheckpointsConfig(scenes=scenes)
    assert CheckpointsConfig(scenes=0).scenes == 0
