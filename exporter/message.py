"""What Alertmanager's webhook sends, as far as the receiver reads it."""

import itertools
import re
import unicodedata
from datetime import datetime
from typing import Annotated, Literal

import msgspec

VERSION = "4"
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")
_LARGEST_EXACT = 2**53

# Not `$`: that would let a trailing newline through.
Fingerprint = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z]{1,64}\Z")]
Time = Annotated[datetime, msgspec.Meta(tz=True)]
Status = Literal["firing", "resolved"]


class Alert(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One alert of a delivery. Fields that this struct does not name are ignored: newer versions send more of them.

    `starts_at` stays the text that was sent, since a command's identity is made of it; `ends_at` is the year 1 while
    the alert fires, and nothing here is decided by it.
    """

    status: Status
    labels: dict[str, str]
    fingerprint: Fingerprint
    starts_at: str
    ends_at: str | None = None
    annotations: dict[str, str] | None = None
    generator_url: str | None = msgspec.field(name="generatorURL", default=None)

    def __post_init__(self) -> None:
        try:
            self.started()
        except msgspec.ValidationError as error:
            raise ValueError(f"Field `startsAt` wants an RFC 3339 time, found {self.starts_at:.40}") from error

    def started(self) -> float:
        """When the alert began to fire, in Unix seconds."""
        return msgspec.convert(self.starts_at, type=Time).timestamp()

    def note(self, name: str) -> str:
        """The annotation of that name, empty if there is none."""
        return (self.annotations or {}).get(name, "")


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One delivery. Only `alerts` decides anything; a message without a version is taken with a warning."""

    alerts: list[Alert]
    version: str | int = ""
    group_key: str = ""
    truncated_alerts: Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_EXACT)] = 0
    status: Status = "firing"
    receiver: str = ""

    def warnings(self) -> list[str]:
        """What is odd about the delivery as a whole, in words; nothing of it makes the alerts less true."""
        warnings = []
        if str(self.version) != VERSION:
            warnings.append(f"version {self.version!r:.40} is not {VERSION!r}: read as if it were")
        if self.truncated_alerts:
            warnings.append(f"{self.truncated_alerts} alerts were cut off by the sender: set max_alerts to 0")
        return warnings


def decode(body: bytes) -> Message:
    """Read a delivery.

    Raises:
        ValueError: it is no Alertmanager message; one line that names the field.
    """
    try:
        # As text: the decoder itself passes over odd bytes in fields that it does not know.
        return _DECODER.decode(body.decode("utf-8"))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"Expected a JSON object: {error}") from error


def step_number(text: str) -> int | None:
    """A step as a PromQL template renders it ("1234", "1.234e+03"), or None for anything else."""
    text = text.strip()
    if _NUMBER.fullmatch(text) is None:
        return None
    number = int(text) if text.isdigit() else float(text)
    return int(number) if number <= _LARGEST_EXACT else None


def plain(text: str, limit: int) -> str:
    """The first `limit` characters of `text` that can be shown: no controls, no direction marks, no line breaks."""
    shown = (letter for letter in text if unicodedata.category(letter) not in _HIDDEN)
    return "".join(itertools.islice(shown, limit))


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_DECODER = msgspec.json.Decoder(Message)
