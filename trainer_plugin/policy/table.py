"""The table of the policy: which sign leads to which remedy, and who acts. The README shows it.

"The job" means mode `auto`: in `observe` it says what it would have done, in `assist` it obeys commands only.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One line: what is seen, what is done about it, and by whom."""

    sign: str
    remedy: str
    acts: str


_ALERT = "the alert; the job itself after 30 s, or at once when the outer loop is silent"
_JOB = "the job, at once"
TABLE = (
    Row("loss or gradient not finite, or a norm beyond float32's squares", "the step is withheld", _JOB),
    Row(
        "gradient norm above 10 x its baseline",
        "clipped in that very step, then lower learning rate for a while",
        _JOB,
    ),
    Row("loss out of its band within 100 steps of a learning rate that jumped", "lower learning rate", _JOB),
    Row("loss or gradient norm out of its robust band", "clip to half for 200 steps", _JOB),
    Row(
        "loss out of its band for a batch or three, and back for 10 steps",
        "these data are left out from now on, nothing goes back",
        _JOB,
    ),
    Row(
        "an alert says that a GPU of the run is at fault",
        "checkpoint in both tiers; in an incident no lower learning rate",
        _JOB,
    ),
    Row(
        "loss out of its band and above 3 x its average, and so was the one before",
        "the step is withheld, three in a row at most, and none within 5,000 steps of another such row",
        _JOB,
    ),
    Row(
        "loss and gradient norm out of their bands, or such a loss behind another",
        "the step is withheld, four in a row at most, with `withhold_spikes: all`",
        _JOB,
    ),
    Row(
        "loss climbs a little with every step, or small spikes come again and again, or AMP's loss scale collapsed",
        "lower learning rate",
        _ALERT,
    ),
    Row(
        "loss not back for 200 steps, and 50 since the rate was lowered",
        "rollback (of a few layers first with `partial_rollback: true`)",
        _ALERT,
    ),
    Row(
        "a layer's weights jumped, loss not back for as many steps as going back would undo (20 at least), nor falling "
        "so that it would be back within its 200; and 50 since the rate was lowered",
        "the same",
        "the job, after 30 s, or at once when the outer loop is silent",
    ),
    Row(
        "as many updates withheld in a row as going back would undo: 10 at least, 200 at most",
        "rollback",
        _ALERT,
    ),
    Row("weights not finite", "rollback", _JOB),
    Row(
        "200 steps after a rollback that was due was refused for want of budget, and still no better",
        "stop, unless `last_resort: go_on`",
        _JOB,
    ),
    Row(
        "200 steps after the first refusal, and every update is still withheld: no budget, or no target",
        "the same",
        _JOB,
    ),
    Row("a rollback has failed three times, 200 steps apart", "the same", _JOB),
    Row("weights not finite, and no way back", "stop", _JOB),
)


def markdown() -> str:
    """The table as the README has it."""
    lines = ["| sign | remedy | who acts |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {row.sign} | {row.remedy} | {row.acts} |" for row in TABLE)])
