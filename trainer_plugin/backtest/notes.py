"""What the user should know about a log: taken for granted, left out, or odd."""

_MOST_OF_A_KIND = 5
# What a row of an evaluation under the names of training is counted as.
EVALUATED = "of an evaluation: left out"


def printable(text: str) -> str:
    """A text on one line, also where a file's name has line ends in it, or bytes that are no text."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


class Notes:
    """Short remarks, each once, and how often something was met.

    Args:
        place: what the numbers count: `line`, `entry` or `event`.
    """

    def __init__(self, place: str = "line") -> None:
        self.place = place
        self._said: dict[str, None] = {}
        self._more: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._first: dict[str, int] = {}

    def say(self, remark: str, *, kind: str | None = None) -> None:
        """Keep a remark; of one kind the first five, the others only as a number."""
        if remark in self._said:
            return
        if kind is not None:
            self._more[kind] = self._more.get(kind, 0) + 1
            if self._more[kind] > _MOST_OF_A_KIND:
                return
        self._said[remark] = None

    def count(self, what: str, number: int, *, noun: str = "row") -> None:
        """One more `noun` of which `what` is true, in line (or entry, or event) `number`."""
        key = f"{noun} {what}"
        self._counts[key] = self._counts.get(key, 0) + 1
        self._first[key] = min(self._first.get(key, number), number)

    def listed(self) -> list[str]:
        """All of it, in the order in which it was met."""
        more = [f"{number - _MOST_OF_A_KIND} more {kind}" for kind, number in self._more.items()
                if number > _MOST_OF_A_KIND]  # fmt: skip
        counted = []
        for key, number in self._counts.items():
            noun, what = key.split(" ", 1)
            where = f"{self.place} {self._first[key]}"
            counted.append(f"1 {noun} {what} ({where})" if number == 1 else f"{number} {noun}s {what} (first: {where})")
        return [*self._said, *more, *counted]
