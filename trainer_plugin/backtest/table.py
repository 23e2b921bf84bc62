"""A backtest as text: what each detector said, the incidents, and what the policy would have done."""

from collections.abc import Iterator

from trainer_plugin.backtest.judged import Event, Judged

_MOST_ROWS = 20


def table(judged: Judged) -> str:
    """Some lines for a terminal."""
    return "\n".join(_lines(judged))


def _lines(judged: Judged) -> Iterator[str]:
    several = f", {judged.runs} runs" if judged.runs > 1 else ""
    yield f"{judged.path}: {judged.format}, {judged.steps} logged steps, {judged.steps_judged} of them judged{several}"
    for note in judged.notes:
        yield f"  note: {note}"
    yield from _detectors(judged.events)
    if not judged.incidents:
        warm_up = "" if judged.steps_judged else ": all of it is warm-up, in which nothing finite is judged"
        yield f"  no incident{warm_up}"
        return
    yield f"  {'first step':>12} {'detected':>10} {'last step':>10}  class"
    for incident in judged.incidents[:_MOST_ROWS]:
        yield (
            f"  {incident.first_step:>12} {incident.detected_step:>10} {incident.last_step:>10}  "
            f"{incident.class_}: {'; '.join(incident.evidence[:3])}"
        )
    yield from _more(len(judged.incidents), "incidents")
    for deed in judged.would_do[:_MOST_ROWS]:
        yield f"  would {deed.action} after step {deed.step}: {deed.reason}"
    yield from _more(len(judged.would_do), "actions")


def _detectors(events: list[Event]) -> Iterator[str]:
    said: dict[tuple[str, str], list[int]] = {}
    for event in events:
        said.setdefault((event.detector, event.signal), []).append(event.step)
    if said:
        yield f"  {'detector':<16} {'signal':<16} {'steps':>7}  first at"
    for (detector, signal), steps in sorted(said.items()):
        first = ", ".join(map(str, steps[:5]))
        yield f"  {detector:<16} {signal:<16} {len(steps):>7}  {first}{', ...' if len(steps) > 5 else ''}"


def _more(count: int, what: str) -> Iterator[str]:
    if count > _MOST_ROWS:
        yield f"  ... and {count - _MOST_ROWS} more {what}: --json has them all"
