"""A sweep: the same logs judged under every combination of some options' values."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import msgspec

from trainer_plugin.backtest.judged import Judged

_SECTIONS = ("detection", "actions", "budget", "checkpoints")
_MOST_COMBINATIONS = 200


class Combination(msgspec.Struct, kw_only=True):
    """One combination of values, and what came of it in each log."""

    values: dict[str, Any]
    files: list[Judged]


def combinations(
    asked: list[str], known: dict[str, tuple[str, ...]], parse: Callable[[str], Any]
) -> list[dict[str, Any]]:
    """The combinations of `KEY=V1,V2,...`; a key that comes again adds to its values.

    Args:
        asked: a key is `section.name`, or the name alone.
        known: the names in each section.
        parse: makes a value of text, as guard.yaml has it; raises a ValueError.

    Raises:
        ValueError: no such key, or no values.
    """
    values: dict[str, list[Any]] = {}
    for text in asked:
        key, given, listed = text.partition("=")
        if not given or not listed:
            raise ValueError(f"--sweep {text}: KEY=V1,V2,... wanted, such as robust_score=6,8,10")
        own = values.setdefault(_key(key.strip(), known), [])
        for value in listed.split(","):
            try:
                parsed = parse(value)
            except ValueError as error:
                raise ValueError(f"--sweep {text[:60]}: {error}") from error
            if not any(_same(parsed, other) for other in own):
                own.append(parsed)
    made = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    if len(made) > _MOST_COMBINATIONS:
        raise ValueError(f"--sweep: at most {_MOST_COMBINATIONS} combinations, found {len(made)}")
    return made


def with_values(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """guard.yaml's mapping with other values in it."""
    changed = {name: dict(section) if isinstance(section, dict) else section for name, section in config.items()}
    for key, value in values.items():
        section, name = key.split(".")
        changed.setdefault(section, {})[name] = value
    return changed


def sweep_table(swept: list[Combination]) -> str:
    """One line a combination: incidents, and what the policy would have done, over all logs."""
    return "\n".join(_lines(swept))


def _lines(swept: list[Combination]) -> Iterator[str]:
    names = list(swept[0].values)
    actions = ("clip", "lower_lr", "skip_batch", "rollback")
    heads = [name.split(".")[1] for name in names]
    yield "  ".join([*(f"{head:>16}" for head in heads), "incidents", *(f"{action:>10}" for action in actions)])
    for one in swept:
        incidents = sum(len(file.incidents) for file in one.files)
        done = [sum(deed.action == action for file in one.files for deed in file.would_do) for action in actions]
        values = (f"{one.values[name]!s:>16}" for name in names)
        yield "  ".join([*values, f"{incidents:>9}", *(f"{count:>10}" for count in done)])


def _same(one: object, other: object) -> bool:
    """Equal, and not one of them a number and the other a yes or no."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _key(key: str, known: dict[str, tuple[str, ...]]) -> str:
    section, dot, name = key.rpartition(".")
    places = [place for place in _SECTIONS if (not dot or place == section) and name in known[place]]
    if not places:
        options = ", ".join(sorted(name for place in _SECTIONS for name in known[place]))
        raise ValueError(f"--sweep: no option {key!r}; known are {options}")
    if len(places) > 1:
        raise ValueError(f"--sweep: {key!r} is in {' and '.join(places)}: write {places[0]}.{name}")
    return f"{places[0]}.{name}"
