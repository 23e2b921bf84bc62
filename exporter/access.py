"""Who may command the runs: bearer token, basic auth and TLS, out of the files that the settings name."""

import base64
import binascii
import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path

from exporter.config import Receiver, Tls


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """What a sender must show: the token, or the password of one of these users. Without either anybody may come."""

    token: bytes | None = None
    users: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return self.token is not None or bool(self.users)

    def admits(self, authorization: str) -> bool:
        """Whether this `Authorization` header is enough. How long that takes tells nothing of the right one."""
        if not self:
            return True
        scheme, _, shown = authorization.partition(" ")
        # Header values are decoded as Latin-1, so this gives the bytes that were sent.
        sent = shown.strip().encode("latin-1", "replace")
        if scheme.lower() == "bearer" and self.token is not None:
            return hmac.compare_digest(sent, self.token)
        if scheme.lower() == "basic":
            try:
                sent = base64.b64decode(sent, validate=True)
            except binascii.Error:
                return False
            return any([hmac.compare_digest(sent, user) for user in self.users])  # noqa: C419 - all of them, always
        return False

    @property
    def challenge(self) -> str:
        """What a 401 asks for."""
        schemes = ["Bearer"] * (self.token is not None) + ['Basic realm="receiver", charset="UTF-8"'] * bool(self.users)
        return ", ".join(schemes)


NOBODY_ASKED = Credentials()


def read_credentials(receiver: Receiver) -> Credentials:
    """The credentials in the files of the settings.

    Raises:
        ValueError: one line that names the field: a file cannot be read, or does not hold what it should.
    """
    token, users = receiver.bearer_token_file, receiver.basic_auth_file
    return Credentials(
        token=None if token is None else _token(token).encode(),
        users=() if users is None else _users(users),
    )


def tls_context(tls: Tls) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the certificate of the settings, and for clients of their CA only; None without one.

    Raises:
        ValueError: one line that names the field: a file cannot be read, or does not hold what it should.
    """
    if tls.cert_file is None or tls.key_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for name in ("cert_file", "key_file", "client_ca_file"):
        path = getattr(tls, name)
        if path is not None:
            _text(path, f"receiver.tls.{name}")
    try:
        # An empty password instead of a question on the terminal.
        context.load_cert_chain(tls.cert_file, tls.key_file, password="")
    except OSError as error:  # An SSLError is one.
        reason = getattr(error, "reason", None) or "not a certificate with its key"
        raise ValueError(f"receiver.tls.cert_file: {tls.cert_file} with {tls.key_file}: {reason}") from error
    if tls.client_ca_file is not None:
        try:
            context.load_verify_locations(tls.client_ca_file)
        except OSError as error:
            reason = getattr(error, "reason", None) or "no certificate in it"
            raise ValueError(f"receiver.tls.client_ca_file: {tls.client_ca_file}: {reason}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _text(path: str, field: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{field}: {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: {path}: wanted text, found other bytes") from error


def _token(path: str) -> str:
    """The bearer token in a file, without the white space around it."""
    token = _text(path, "receiver.bearer_token_file").strip()
    if not token or any(not "!" <= letter <= "~" for letter in token):
        raise ValueError(
            f"receiver.bearer_token_file: {path}: wanted one token without spaces, in ASCII,"
            f" found {'none' if not token else 'something else'}"
        )
    return token


def _users(path: str) -> tuple[bytes, ...]:
    """The lines `user:password` of a file."""
    where = f"receiver.basic_auth_file: {path}"
    users = []
    for number, line in enumerate(_text(path, "receiver.basic_auth_file").splitlines(), start=1):
        user, colon, password = line.partition(":")
        if not line.strip():
            continue
        if not (user and colon and password):
            raise ValueError(f"{where}: line {number}: wanted user:password")
        users.append(line.encode())
    if not users:
        raise ValueError(f"{where}: wanted lines of user:password, found none")
    return tuple(users)
