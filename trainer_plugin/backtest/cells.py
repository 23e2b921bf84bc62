"""Numbers as logs print them."""

import math
import re

_ABSENT = {"", "-", "--", "none", "null", "n/a", "na", "<na>", "undefined"}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:[,'\u2019\u00a0\u202f ]\d{3})+(?:\.\d*)?")
_DECIMAL_COMMA = re.compile(r"([-+]?\d[\d.\u00a0\u202f ]*),(\d+(?:e[-+]?\d+)?)", re.IGNORECASE)
_SUFFIXED = re.compile(r"([-+]?\d+(?:\.\d*)?)\s*([KMGBT])", re.IGNORECASE)
_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_WINDOWS = re.compile(r"(-?)1\.#(INF|QNAN|SNAN|IND)0*", re.IGNORECASE)
# Where floats, and what most logs are written from, still count one by one.
LARGEST_STEP = 2**53


def number(cell: object, *, decimal_comma: bool = False) -> float | None:
    """A number; None where the log says that there is none.

    Args:
        cell: text, bytes, or what a JSON document held; of a list its first item.
        decimal_comma: read `2,345` as 2.345 and not as 2345.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(cell, list) and cell:
        cell = cell[0]
    if isinstance(cell, str | bytes):
        try:
            return float(cell)
        except ValueError:
            text = cell if isinstance(cell, str) else cell.decode(errors="replace")
            return _from_text(text.strip().strip("\"'").strip(), decimal_comma=decimal_comma)
    if cell is None:
        return None
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        raise ValueError(f"a number wanted, found {type(cell).__name__}")  # noqa: TRY004 - bad input
    # By way of text, a number that is too large becomes infinite.
    return cell if isinstance(cell, float) else float(str(cell))


def try_number(cell: object, *, decimal_comma: bool = False) -> float | None:
    """A number; None if there is none, or something else."""
    try:
        return number(cell, decimal_comma=decimal_comma)
    except ValueError:
        return None


def says_nothing(cell: object) -> bool:
    """Whether a log says by it that there is no value."""
    return cell is None or (isinstance(cell, str) and cell.strip().lower() in _ABSENT)


def whole_step(cell: object) -> int | None:
    """A step: a whole number from 0 on, also as `100.0`, `1e5` or `1,000`; None if it is none."""
    value = try_number(cell)
    if value is None or not 0 <= value <= LARGEST_STEP or value != math.floor(value):
        return None
    return int(value)


def _from_text(text: str, *, decimal_comma: bool) -> float | None:
    if text.lower() in _ABSENT:
        return None
    plain = text
    if decimal_comma and (match := _DECIMAL_COMMA.fullmatch(text)):
        plain = re.sub(r"[^-+\d]", "", match[1]) + "." + match[2]
    elif _THOUSANDS.fullmatch(text):
        plain = re.sub(r"[^-+\d.]", "", text)
    elif match := _SUFFIXED.fullmatch(text):
        return float(match[1]) * _SUFFIXES[match[2].upper()]
    elif match := _WINDOWS.fullmatch(text):
        plain = f"{match[1]}inf" if match[2].upper() == "INF" else "nan"
    try:
        return float(plain)
    except ValueError:
        raise ValueError(f"a number wanted, found {text[:40]!r}") from None
