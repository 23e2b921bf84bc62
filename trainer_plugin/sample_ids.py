"""Sample ids as the loop tells them, whatever they are: as short texts that any file can hold. No torch."""

from collections.abc import Iterable
from typing import Any

_LONGEST = 1000


def as_texts(sample_ids: Any) -> tuple[str, ...]:  # noqa: ANN401 - whatever a loop has
    """The ids as texts, one of each sample; one that is too long is cut.

    A list of anything will do, and so will an array or a tensor on the host: one on an accelerator is not waited for.

    Raises:
        ValueError: there is nothing to go through, or an id has no text.
    """
    if sample_ids is None:
        return ()
    if isinstance(sample_ids, str | bytes):
        sample_ids = [sample_ids]
    device = getattr(sample_ids, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ValueError(f"sample_ids wanted on the host, found a tensor on {device}")
    if hasattr(sample_ids, "tolist"):
        sample_ids = sample_ids.reshape(-1).tolist()
    if not isinstance(sample_ids, Iterable):
        raise ValueError(f"sample_ids: a list of ids wanted, found {type(sample_ids).__name__}")  # noqa: TRY004
    try:
        return tuple(map(_text, sample_ids))
    except Exception as error:
        raise ValueError(f"sample_ids: an id has no text: {type(error).__name__}") from error


def _text(one: Any) -> str:  # noqa: ANN401
    if type(one) is str and len(one) <= _LONGEST and one.isascii():  # Nearly all of them, in every step.
        return one
    if type(one) is bytes:
        text = one[:_LONGEST].decode("utf-8", "backslashreplace")
    elif hasattr(one, "tolist") and getattr(getattr(one, "device", None), "type", "cpu") == "cpu":
        text = str(one.tolist())
    else:
        text = str(one)
    # Half a surrogate pair, as a file name on disk may have, is no text that UTF-8 can hold.
    return text[:_LONGEST].encode("utf-8", "backslashreplace").decode()
