"""The inventory of a run's checkpoints as text. Pure."""

from trainer_plugin.checkpoints.inventory import Inventory, Listed

_HEAD = ("step", "branch", "kind", "local", "shared", "finite", "proven", "size", "a rollback")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def inventory_table(found: Inventory) -> list[str]:
    """Lines for people: where the tiers lie, a row for each checkpoint and scene, what is wrong, what is next."""
    target = next((one for one in found.checkpoints if not one.obstacle), None)
    rows = [_HEAD, *(_row(one, taken=one is target) for one in found.checkpoints)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [f"run {found.run}", *(f"{tier} tier: {folder}" for tier, folder in found.tiers.items())]
    if found.checkpoints:
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"problem: {problem}" for problem in found.problems]
    if target is None:
        return [*lines, "a rollback has nothing to go to"]
    whole = [tier for tier, state in target.tiers.items() if state == "whole"]
    checked = "every byte checked" if found.verified else "by size; --verify checks every byte"
    where = "both tiers" if len(whole) == len(target.tiers) else f"the {whole[0]} tier alone, copied to the other first"
    return [*lines, f"a rollback would go to step {target.step}, whole in {where} ({checked})"]


def _row(one: Listed, *, taken: bool) -> tuple[str, ...]:
    answer = "takes it" if taken else one.obstacle or "would take it next"
    if one.kind == "scene":
        answer = f"never: the scene of incident {one.incident}"
    return (
        str(one.step), str(one.branch), one.kind, one.tiers["local"], one.tiers["shared"],
        "yes" if one.finite else "no", "yes" if one.proven else "no", _size(one.bytes), answer,
    )  # fmt: skip


def _size(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024.0 and unit < len(_UNITS) - 1:
        value, unit = value / 1024.0, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
