"""The settings of `exporter.yaml`."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
import yaml


class Address(str):
    """`HOST:PORT` to listen on; an IPv6 host stands in brackets. Port 0 is any free port.

    Raises:
        ValueError: the text is no such address.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Check the text."""
        found = _ADDRESS.fullmatch(text)
        if found is None or int(found["port"]) > 65535:
            raise ValueError(f"Expected HOST:PORT with a port of 0 to 65535, found {text!r:.80}")
        return super().__new__(cls, text)

    @property
    def host(self) -> str:
        """The host, without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port."""
        return int(self.rpartition(":")[2])

    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The receiver's certificate with its key, and the CA of the only clients that may come."""

    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None


class Receiver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The webhook receiver. `basic_auth_file` has lines of `user:password`."""

    listen: Address = Address("127.0.0.1:9402")
    bearer_token_file: str | None = None
    basic_auth_file: str | None = None
    tls: Tls = Tls()
    stale_after_seconds: Annotated[float, msgspec.Meta(gt=0)] = 600.0


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metrics of this host's GPUs.

    In mode `auto` a process that is a receiver too serves them only where NVIDIA's driver is. `hostname` is the label
    `Hostname`, for containers that have a name of their own. `job_mapping_dir` holds a file of job ids for each GPU.
    """

    listen: Address = Address("0.0.0.0:9400")
    mode: Literal["auto", "always"] = "auto"
    interval_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    hostname: str | None = None
    job_mapping_dir: str | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings; `off` in the place of a part leaves that part out."""

    runs: Annotated[str, msgspec.Meta(min_length=1)] = "runs"
    receiver: Receiver | Literal["off"] = Receiver()
    gpu: Gpu | Literal["off"] = Gpu()


def load(path: Path | str | None) -> Config:
    """Read the settings, or take the defaults where there is no file.

    Raises:
        ValueError: one line that names the file, the path of the field, what was wanted and what was found.
    """
    if path is None:
        return Config()
    try:
        content = yaml.safe_load(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: wanted YAML, found a fault: {' '.join(str(error).split())}") from error
    try:
        return _config({} if content is None else content)  # None: every line is commented out.
    except ValueError as error:
        raise ValueError(" ".join(f"{path}: {error}".split())) from error


def refuse_unsafe(receiver: Receiver) -> None:
    """Refuse settings under which the receiver would be less guarded than whoever wrote them believes.

    Raises:
        ValueError: one line that names the field and what to do.
    """
    tls = receiver.tls
    if (tls.cert_file is None) != (tls.key_file is None):
        given, missing = ("cert_file", "key_file") if tls.key_file is None else ("key_file", "cert_file")
        raise ValueError(f"receiver.tls.{given}: without receiver.tls.{missing} there is no TLS: set both")
    if tls.client_ca_file is not None and tls.cert_file is None:
        raise ValueError("receiver.tls.client_ca_file: needs receiver.tls.cert_file and receiver.tls.key_file")
    asks = (receiver.bearer_token_file, receiver.basic_auth_file, tls.client_ca_file)
    if all(one is None for one in asks) and not receiver.listen.is_loopback():
        raise ValueError(
            f"receiver.listen: {receiver.listen} can be reached from other hosts, where anybody could command the"
            " runs: set receiver.bearer_token_file, receiver.basic_auth_file or receiver.tls.client_ca_file, or listen"
            " on 127.0.0.1"
        )


def _config(content: Any) -> Config:  # noqa: ANN401 - whatever a YAML file may hold
    if isinstance(content, dict):
        # YAML 1.1 reads a plain `off` as false.
        content |= {part: "off" for part in ("receiver", "gpu") if content.get(part) is False}
        _refuse_unknown_keys(content, Config)
    try:
        return msgspec.convert(content, type=Config, dec_hook=_address)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(str(error), content)) from error


def _address(wanted: type, text: object) -> object:
    if wanted is not Address or not isinstance(text, str):
        raise ValueError(f"Expected HOST:PORT, found {text!r:.80}")
    return Address(text)


def _refuse_unknown_keys(content: dict[Any, Any], struct: type[msgspec.Struct], path: str = "") -> None:
    """Like msgspec's own check, which doesn't list the known keys."""
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in content.items():
        if key not in fields:
            raise ValueError(f"{path}{key}: unknown key, known ones are {', '.join(fields)}")
        for part in (fields[key], *get_args(fields[key])):
            if isinstance(part, type) and issubclass(part, msgspec.Struct) and isinstance(value, dict):
                _refuse_unknown_keys(value, part, f"{path}{key}.")


def _in_words(message: str, content: Any) -> str:  # noqa: ANN401 - whatever a YAML file may hold
    """The message of msgspec with the path of the field first and the value found last."""
    wanted, _, path = message.partition(" - at `$")
    path = path.strip(".`")
    for key in filter(None, path.split(".")):
        content = content[key]
    wanted = wanted.removeprefix("Expected ").partition(", got ")[0].partition(", found ")[0]
    wanted = _WANTED.get(path, wanted.replace("`object`", "a mapping"))
    return f"{path or 'the file'}: wanted {wanted}, found {content!r:.80}"


# Where msgspec names only what was found, or its own types.
_WANTED = {"receiver": "a mapping or `off`", "gpu": "a mapping or `off`", "gpu.mode": "`auto` or `always`"}
