"""What a backtest found, held against the labels of a log: the rules of the logs' own `score.py`."""

import math


def score(label, result):
    """Events, found, late, false and rows of one log by `score.py`'s rules, and rollbacks on an eventless run."""
    interval, start = label["interval"], 300 * label["interval"]
    spans = [(event["first"], event["end"] or math.inf) for event in label["events"] + label["minor"]]
    spans += [tuple(span) for span in label["nan_ranges"]]
    seen = [(incident["detected_step"], incident["last_step"]) for incident in result["incidents"]]
    false = [
        at for at, _ in seen
        if at >= start and not any(a - 20 * interval <= at <= b + 20 * interval for a, b in spans)
    ]  # fmt: skip
    found, late = [], []
    for event in label["events"]:
        first, end = event["first"], event["end"] or math.inf
        hits = [max(at, first) for at, last in seen if last >= first - 20 * interval and at <= end]
        if hits:
            found.append(first)
            if (min(hits) - first) / interval > (20 if event["slow"] else 1):
                late.append((first, min(hits)))
    rollbacks = [done["step"] for done in result["would_do"] if "rollback" in done["action"]]
    missed = [event["first"] for event in label["events"] if event["first"] not in found]
    return {
        "events": len(label["events"]), "found": len(found), "missed": missed, "late": late, "false": false,
        "rows": label["rows"], "rollbacks": [] if label["events"] or label["nan_ranges"] else rollbacks,
    }  # fmt: skip
