"""Who may command: what files of secrets may hold, and which headers are enough."""

import base64
import ssl

import pytest
from certificates import make_ca, make_certificate

from exporter.access import NOBODY_ASKED, Credentials, read_credentials, tls_context
from exporter.config import Receiver, Tls

BOTH = Credentials(token=b"s3cret", users=(b"am:pass:word", "ü:ß".encode()))


def basic(text, encoding="utf-8"):
    """A header of basic auth."""
    return "Basic " + base64.b64encode(text.encode(encoding)).decode()


@pytest.mark.parametrize(
    "header",
    [
        "Bearer s3cret",
        "bearer  s3cret",
        basic("am:pass:word"),
        basic("am:pass:word").lower()[:6] + basic("am:pass:word")[6:],
        basic("ü:ß"),
    ],
)
def test_the_right_secret_is_enough(header):
    """Either the token or one of the users is let in; the scheme's case does not matter."""
    assert BOTH.admits(header)


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cretx", "Bearer am:pass:word", "s3cret", "Digest s3cret",
        basic("am:pass"), basic("am:"), basic("am:pass:word "), basic("x:pass:word"), basic("ü:ß", "latin-1"),
        basic("s3cret"), "Basic am:pass:word", "Basic ====", "Basic", "Bearer s3cr\xe9t", "Basic \xff", "Bearer 🙂",
    ],
)  # fmt: skip
def test_nothing_else_is(header):
    """A wrong, cut, odd or unencoded secret is not let in, and raises nothing."""
    assert not BOTH.admits(header)


def test_each_way_is_open_only_where_it_is_set():
    """A token is no password and a password no token; without either all come, and the challenge says which is."""
    assert not Credentials(token=b"a:b").admits(basic("a:b"))
    assert not Credentials(users=(b"a:b",)).admits("Bearer a:b")
    assert NOBODY_ASKED.admits("")
    assert not NOBODY_ASKED
    assert BOTH.challenge == 'Bearer, Basic realm="receiver", charset="UTF-8"'
    assert Credentials(token=b"x").challenge == "Bearer"


def test_secrets_are_what_the_files_hold(tmp_path):
    """White space around the token is none of it; a password keeps its colons and spaces, and blank lines are none."""
    (tmp_path / "token").write_text("  s3cret+/=\n")
    (tmp_path / "users").write_text("am:pass:word \n\nprometheus:x\n")
    found = read_credentials(
        Receiver(bearer_token_file=str(tmp_path / "token"), basic_auth_file=str(tmp_path / "users"))
    )
    assert found == Credentials(token=b"s3cret+/=", users=(b"am:pass:word ", b"prometheus:x"))
    assert read_credentials(Receiver()) == NOBODY_ASKED


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"two\nlines", b"\xff", b"a\0b", "ü".encode()])
def test_a_file_without_a_token_is_refused(tmp_path, content):
    """An empty token would let everybody in, and an odd one nobody."""
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ValueError, match=r"receiver\.bearer_token_file: .*token: wanted"):
        read_credentials(Receiver(bearer_token_file=str(tmp_path / "token")))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"am", b":x", b"am:", b"a:b\nam", b"\xff:x"])
def test_a_file_without_users_is_refused(tmp_path, content):
    """A line without a user or a password would let in whom nobody meant; the password is not told."""
    (tmp_path / "users").write_bytes(content)
    with pytest.raises(ValueError, match=r"receiver\.basic_auth_file: .*users: (line \d: )?wanted"):
        read_credentials(Receiver(basic_auth_file=str(tmp_path / "users")))


@pytest.mark.parametrize("field", ["bearer_token_file", "basic_auth_file"])
def test_an_absent_file_is_named(tmp_path, field):
    """A secret that is not there stops the start."""
    with pytest.raises(ValueError, match=rf"receiver\.{field}: .*none: cannot be read: No such file"):
        read_credentials(Receiver(**{field: str(tmp_path / "none")}))


def test_a_certificate_makes_tls_and_a_ca_asks_for_clients(tmp_path):
    """Without a certificate there is no TLS; with a CA only its clients may come; never below TLS 1.2."""
    ca = make_ca(tmp_path)
    certificate, key = make_certificate(tmp_path, "receiver", ca)
    assert tls_context(Tls()) is None
    plain = tls_context(Tls(cert_file=str(certificate), key_file=str(key)))
    mutual = tls_context(Tls(cert_file=str(certificate), key_file=str(key), client_ca_file=str(ca)))
    assert (plain.verify_mode, mutual.verify_mode) == (ssl.CERT_NONE, ssl.CERT_REQUIRED)
    assert plain.minimum_version == mutual.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        *((field, how) for field in ("cert_file", "key_file", "client_ca_file") for how in ("absent", "garbage")),
        ("cert_file", "another's"),
        ("key_file", "another's"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(tmp_path, broken, how):
    """Each file that is missing, no PEM, or does not belong to the others stops the start in one line."""
    ca = make_ca(tmp_path)
    files = dict(zip(("cert_file", "key_file"), make_certificate(tmp_path, "receiver", ca), strict=True))
    files["client_ca_file"] = ca
    bad = tmp_path / "bad"
    if how == "garbage":
        bad.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    elif how == "another's":
        bad = make_certificate(tmp_path, "other", ca)[broken == "key_file"]
    with pytest.raises(ValueError, match=r"receiver\.tls\.\w+_file: ") as caught:
        tls_context(Tls(**{name: str(bad if name == broken else path) for name, path in files.items()}))
    assert str(bad) in str(caught.value)
    assert "\n" not in str(caught.value)
