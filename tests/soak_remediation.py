"""The nights of test_remediation.py on every version of Alertmanager (`make soak`)."""

import pytest
from soak_versions import release  # noqa: F401 - each release in turn
from test_remediation import (  # noqa: F401 - the tests are run here again
    night,
    test_a_pair_of_alertmanagers_is_one_action,
    test_a_prometheus_that_dies_undoes_nothing_and_its_return_repeats_nothing,
    test_an_alertmanager_that_is_started_again_repeats_nothing,
    test_retries_after_errors_and_time_outs_are_one_action,
    test_w09_repeats_and_a_new_firing_too_soon_are_no_second_action,
    test_w10_a_week_old_alert_is_no_action,
    test_w12_a_receiver_killed_between_accept_and_action_is_one_action,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
