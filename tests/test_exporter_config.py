"""exporter.yaml: every key optional, nothing misspelt goes unnoticed, and no setting opens the receiver by accident."""

from pathlib import Path

import msgspec
import pytest

from exporter.config import Address, Config, Gpu, Receiver, Tls, load, refuse_unsafe

DESIGNED = """
runs: runs
receiver: {listen: 127.0.0.1:9402, bearer_token_file: null, basic_auth_file: null, stale_after_seconds: 600,
           tls: {cert_file: null, key_file: null, client_ca_file: null}}
gpu: {listen: 0.0.0.0:9400, mode: auto, interval_seconds: 5, hostname: null, job_mapping_dir: null}
"""


def _load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "exporter.yaml"
    path.write_text(text)
    return load(path)


@pytest.mark.parametrize("text", ["", "# all defaults\n", "{}", DESIGNED])
def test_defaults_are_the_designed_ones(tmp_path, text):
    """No file, an empty one and the one of the design mean the same."""
    assert _load(tmp_path, text) == Config() == load(None)


def test_every_key_is_read(tmp_path):
    """What the file says arrives in the field of the same name."""
    text = """
runs: /shared/runs
receiver: {listen: "[::1]:0", bearer_token_file: t, basic_auth_file: b, tls: {cert_file: c, key_file: k,
           client_ca_file: a}, stale_after_seconds: 1.5}
gpu: {listen: gpu.example:9500, mode: always, interval_seconds: 0.5, hostname: n1, job_mapping_dir: /jobs}
"""
    tls = Tls(cert_file="c", key_file="k", client_ca_file="a")
    receiver = Receiver(
        listen=Address("[::1]:0"),
        bearer_token_file="t",  # noqa: S106 - the name of a file
        basic_auth_file="b",
        tls=tls,
        stale_after_seconds=1.5,
    )
    gpu = Gpu(
        listen=Address("gpu.example:9500"), mode="always", interval_seconds=0.5, hostname="n1", job_mapping_dir="/jobs"
    )
    assert _load(tmp_path, text) == Config(runs="/shared/runs", receiver=receiver, gpu=gpu)


@pytest.mark.parametrize("off", ["off", "'off'", "false"])
def test_off_leaves_a_part_out(tmp_path, off):
    """`off` works with and without quotes, although YAML 1.1 reads the plain word as false."""
    config = _load(tmp_path, f"receiver: {off}\ngpu: {off}\n")
    assert (config.receiver, config.gpu) == ("off", "off")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recieiver: {}", "recieiver: unknown key, known ones are runs, receiver, gpu"),
        ("on: 1", "True: unknown key, known ones are runs, receiver, gpu"),
        (
            "gpu: {port: 1}",
            "gpu.port: unknown key, known ones are listen, mode, interval_seconds, hostname, job_mapping_dir",
        ),
        (
            "receiver: {tls: {ca: x}}",
            "receiver.tls.ca: unknown key, known ones are cert_file, key_file, client_ca_file",
        ),
        ("receiver: true", "receiver: wanted a mapping or `off`, found True"),
        ("receiver:", "receiver: wanted a mapping or `off`, found None"),
        ("receiver: on-demand", "receiver: wanted a mapping or `off`, found 'on-demand'"),
        ("receiver: {listen: 9402}", "receiver.listen: wanted HOST:PORT, found 9402"),
        (
            "receiver: {listen: ':9402'}",
            "receiver.listen: wanted HOST:PORT with a port of 0 to 65535, found ':9402'",
        ),
        ("gpu: {listen: 'a:65536'}", "gpu.listen: wanted HOST:PORT with a port of 0 to 65535, found 'a:65536'"),
        ("receiver: {stale_after_seconds: 0}", "receiver.stale_after_seconds: wanted `float` > 0.0, found 0"),
        ("receiver: {stale_after_seconds: yes}", "receiver.stale_after_seconds: wanted `float`, found True"),
        ("receiver: {tls: {key_file: 3}}", "receiver.tls.key_file: wanted `str | null`, found 3"),
        ("gpu: {mode: dcgm}", "gpu.mode: wanted `auto` or `always`, found 'dcgm'"),
        ("gpu: {interval_seconds: 0}", "gpu.interval_seconds: wanted `float` > 0.0, found 0"),
        ("runs: ''", "runs: wanted `str` of length >= 1, found ''"),
        ("- 1", "the file: wanted a mapping, found [1]"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(tmp_path, text, message):
    """The error has the file, the path of the field, what was wanted and what was found."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        _load(tmp_path, text)
    assert str(caught.value) == f"{tmp_path}/exporter.yaml: {message}"


@pytest.mark.parametrize("text", ["a: [", "? [a]\n: 1", "\0", "receiver: {'a\nb': 1}", "!!python/object:os.system x"])
def test_broken_yaml_is_one_line_too(tmp_path, text):
    """Whatever is wrong with the file is told in one line that begins with its name."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - any message, but of one line
        _load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/exporter.yaml: ")
    assert "\n" not in str(caught.value)


def test_an_absent_file_is_named(tmp_path):
    """A file that cannot be read is an error, not a set of defaults."""
    with pytest.raises(ValueError, match=r"absent\.yaml: cannot be read: No such file"):
        load(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:9402", "127.0.0.1", 9402, True),
        ("127.9.9.9:1", "127.9.9.9", 1, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:80", "::1", 80, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),  # noqa: S104 - nothing listens here
        ("[::]:80", "::", 80, False),
        ("10.0.0.1:80", "10.0.0.1", 80, False),
        ("localhost.example.org:80", "localhost.example.org", 80, False),
        ("127.0.0.1.example.org:80", "127.0.0.1.example.org", 80, False),
    ],
)
def test_addresses(text, host, port, loopback):
    """An address has a host, a port, and is either this host's alone or not."""
    address = Address(text)
    assert (address.host, address.port, address.is_loopback()) == (host, port, loopback)


@pytest.mark.parametrize("text", ["", ":1", "a", "a:", "a:b", "::1:80", "a:-1", "a:٣", "a:1\n", "http://a:1", "a b:1"])
def test_what_is_no_address_is_refused(text):
    """Anything but HOST:PORT is an error."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        Address(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tls": Tls(cert_file="x")}, r"receiver\.tls\.cert_file: without receiver\.tls\.key_file there is no TLS"),
        ({"tls": Tls(key_file="x")}, r"receiver\.tls\.key_file: without receiver\.tls\.cert_file there is no TLS"),
        ({"tls": Tls(client_ca_file="x")}, r"receiver\.tls\.client_ca_file: needs receiver\.tls\.cert_file"),
        ({"listen": Address("0.0.0.0:9402")}, r"receiver\.listen: 0\.0\.0\.0:9402 can be reached from other hosts"),
        (
            {"listen": Address("[::]:9402"), "tls": Tls(cert_file="c", key_file="k")},
            r"receiver\.listen: \[::\]:9402 can be reached from other hosts",
        ),
    ],
)
def test_a_guard_that_would_not_guard_is_refused(changes, message):
    """Half a setting, or an open door, stops the start; a certificate of its own keeps nobody out."""
    with pytest.raises(ValueError, match=message):
        refuse_unsafe(msgspec.structs.replace(Receiver(), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"bearer_token_file": "token"},
        {"basic_auth_file": "users"},
        {"tls": Tls(cert_file="c", key_file="k", client_ca_file="a")},
    ],
)
def test_a_guarded_receiver_is_fine(changes):
    """Loopback needs no secret; with a token, a password or a CA for its clients any address will do."""
    refuse_unsafe(Receiver())
    refuse_unsafe(msgspec.structs.replace(Receiver(), listen=Address("0.0.0.0:9402"), **changes))
