"""What a backtest finds in one log: every verdict, the incidents, and what the policy would have done."""

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One detector's word about one logged step. A value that is not finite is null in JSON."""

    step: int
    detector: str
    signal: str
    value: float
    baseline: float
    run: int


class FoundIncident(msgspec.Struct, frozen=True, kw_only=True, rename={"class_": "class"}):
    """One thing that went wrong; `last_step` is the last one with a verdict, or with a deed."""

    first_step: int
    detected_step: int
    last_step: int
    class_: str
    evidence: list[str]
    run: int


class WouldDo(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy would have done after a step, and why."""

    step: int
    action: str
    reason: str
    run: int


class Judged(msgspec.Struct, kw_only=True):
    """One log. `steps` is the number of logged ones, `runs` how many runs it holds.

    `steps_judged` are those after a warm-up: in the others nothing finite is judged.

    `events_left_out` is how many verdicts came after the most that are kept.
    """

    path: str
    format: str
    steps: int = 0
    steps_judged: int = 0
    runs: int = 0
    notes: list[str] = msgspec.field(default_factory=list)
    events: list[Event] = msgspec.field(default_factory=list)
    events_left_out: int = 0
    incidents: list[FoundIncident] = msgspec.field(default_factory=list)
    would_do: list[WouldDo] = msgspec.field(default_factory=list)
