"""Alerts held against what the job reads itself: one that is over by the time its command arrives is not obeyed."""

from trainer_plugin.monitor import Readings


def still_so(alert: str | None, readings: Readings, *, weights_finite: bool) -> bool:
    """Whether the condition of an alert about the job's own signals holds now; True for any other alert."""
    match alert:
        case "TrainLossNotRecovering":
            return readings.loss_unrecovered_steps > 0
        case "TrainLossSpikeSustained":
            return max(readings.loss_high_steps.values()) > 0
        case "TrainNoUpdates":
            return readings.withheld_steps > 0
        case "TrainWeightsNonFinite":
            return not weights_finite
        case _:
            return True  # A rule of the user's own, about what only Prometheus sees.
