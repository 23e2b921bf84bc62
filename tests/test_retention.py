"""Retention: which checkpoints belong to the weights of today, after any number of rollbacks."""

import pytest

from trainer_plugin.manifest import Manifest
from trainer_plugin.retention import CheckpointsConfig, Lineage


def saved(step: int, branch: int) -> Manifest:
    """A checkpoint of a step, saved in a branch."""
    return Manifest(
        run="tiny", step=step, branch=branch, kind="periodic", finite=True, created=1.0, files={}, torch="2.13"
    )


def live(lineage: Lineage, branch: int) -> list[int]:
    """The steps, of those saved every 100 steps in a branch, that today's weights came through."""
    return [step for step in range(0, 1100, 100) if lineage.live(saved(step, branch))]


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
    assert saved(600, 0).name != saved(600, 1).name


@pytest.mark.parametrize("scenes", [-1, -3])
def test_a_number_of_scenes_below_none_is_refused(scenes):
    """The option is told by name; 0 is no scene at all."""
    with pytest.raises(ValueError, match=f"`scenes` must be at least 0, found {scenes}"):
        CheckpointsConfig(scenes=scenes)
    assert CheckpointsConfig(scenes=0).scenes == 0
