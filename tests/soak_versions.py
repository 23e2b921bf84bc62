"""Every release of the servers (`make soak`): the tests of rules, configurations and loop, on each of them."""

import os

import pytest
from test_loop import (  # noqa: F401 - found here by pytest
    test_a_spike_sustained_for_200_steps_becomes_a_command,
    test_the_heartbeat_arrives_and_an_unknown_run_gets_no_command,
)
from test_servers import (  # noqa: F401 - found here by pytest
    test_stack_runs_the_shipped_rules_and_ends,
    test_stack_that_cannot_start_leaves_nothing,
)
from test_versions import (  # noqa: F401 - found here by pytest
    page,
    taken_up,
    test_alert_reaches_its_receivers,
    test_alertmanager_configuration_is_valid_with_and_without_its_examples,
    test_m06_the_nan_of_512_ranks_is_a_handful_of_alerts,
    test_prometheus_configuration_is_valid_and_loads_every_rule_file,
    test_promtool_finds_nothing_wrong,
    test_rule_file_is_valid,
    test_story_comes_true,
    test_the_programs_of_the_release_are_the_ones_that_run,
)
from tools import RELEASES, programs_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True, params=RELEASES)
def release(request, monkeypatch):
    """One Debian release, whose programs stand first on the PATH."""
    monkeypatch.setenv("PATH", f"{programs_of(request.param)}{os.pathsep}{os.environ['PATH']}")
    return request.param
