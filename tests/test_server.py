"""The receiver's process under its settings: who is let in over real sockets, and who is shown the door."""

import http.client
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from certificates import make_ca, make_certificate
from receivers import alert, delivery, running
from waiting import wait_for

from exporter.commands import Inbox
from exporter.runs import RunFolder
from exporter.server import ANSWER_SECONDS, CONNECTIONS, HEAD_SECONDS, MOST_CONNECTIONS


@pytest.fixture
def inbox(tmp_path) -> Inbox:
    """The inbox of gpt-0."""
    inbox = RunFolder(tmp_path / "runs", "gpt-0").inbox
    inbox.create()
    return inbox


def settings(folder: Path, receiver: str) -> tuple[str | Path, ...]:
    """The arguments for a receiver with these settings on a free port."""
    (folder / "exporter.yaml").write_text(f"runs: {folder}/runs\nreceiver: {{{receiver}}}\n")
    return "--config", folder / "exporter.yaml", "--listen", "127.0.0.1:0"


def post(url: str, body: bytes, **more: object) -> int:
    """The status of a delivery."""
    context = {"verify": more.pop("verify")} if "verify" in more else {}
    with httpx.Client(**context) as client:
        return client.post(f"{url}/alertmanager", content=body, **more).status_code


def test_basic_auth_lets_in_its_users_alone(tmp_path, inbox):
    """Alertmanager's `basic_auth` is enough; a wrong password, or none, is 401 and puts nothing in the inbox."""
    (tmp_path / "users").write_text("alertmanager:pass word\n")
    with running(*settings(tmp_path, f"basic_auth_file: {tmp_path}/users")) as (_, url):
        assert post(url, delivery(alert(1))) == 401
        assert post(url, delivery(alert(1)), auth=("alertmanager", "password")) == 401
        assert inbox.waiting() == []
        assert post(url, delivery(alert(1)), auth=("alertmanager", "pass word")) == 200
    assert len(inbox.waiting()) == 1


def test_tls_and_a_token(tmp_path, inbox):
    """Over TLS the token is taken from who trusts the certificate; in the clear the port answers nobody."""
    ca = make_ca(tmp_path)
    certificate, key = make_certificate(tmp_path, "receiver", ca)
    (tmp_path / "token").write_text("s3cret")
    tls = f"tls: {{cert_file: {certificate}, key_file: {key}}}, bearer_token_file: {tmp_path}/token"
    with running(*settings(tmp_path, tls)) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=ca)
        token = {"Authorization": "Bearer s3cret"}
        assert post(url, delivery(alert(1)), verify=context) == 401
        assert post(url, delivery(alert(1)), verify=context, headers=token) == 200
        with pytest.raises(httpx.TransportError):
            post(url.replace("https", "http"), delivery(alert(2)), headers=token)
        with pytest.raises(httpx.ConnectError):
            post(url, delivery(alert(3)), headers=token)
    assert len(inbox.waiting()) == 1


def test_mutual_tls_lets_in_the_clients_of_its_ca_alone(tmp_path, inbox):
    """A client without a certificate, or with one of another CA, does not get as far as a request, health included."""
    ours, others = make_ca(tmp_path), make_ca(tmp_path, "others")
    certificate, key = make_certificate(tmp_path, "receiver", ours)
    with running(
        *settings(tmp_path, f"tls: {{cert_file: {certificate}, key_file: {key}, client_ca_file: {ours}}}")
    ) as (process, url):
        for client in (None, make_certificate(tmp_path, "stranger", others), make_certificate(tmp_path, "am", ours)):
            context = ssl.create_default_context(cafile=ours)
            if client is not None:
                context.load_cert_chain(*client)
            if client is not None and client[0].stem == "am":
                assert post(url, delivery(alert(1)), verify=context) == 200
            else:
                with pytest.raises(httpx.TransportError):
                    post(url, delivery(alert(2)), verify=context)
        process.terminate()
        assert "Traceback" not in process.stderr.read()
    assert len(inbox.waiting()) == 1


@pytest.mark.live
def test_who_says_nothing_is_shown_the_door_and_others_are_served(tmp_path, inbox):
    """Neither half a head, nor one byte of it a second, nor no handshake holds a place; a delivery meanwhile is taken.

    A kept connection that begins a second request and does not end it goes the same way.
    """
    certificate, key = make_certificate(tmp_path, "receiver", make_ca(tmp_path))
    plain = settings(tmp_path, "")
    with running(*plain) as (_, url), ThreadPoolExecutor(8) as pool:
        host, port = url.removeprefix("http://").split(":")

        def seconds_until_closed(first: bytes, drip: bytes = b"", scheme_port: str = port) -> float:
            began = time.monotonic()
            with socket.create_connection((host, int(scheme_port)), timeout=1.0) as caller:
                caller.sendall(first)
                while time.monotonic() - began < 4 * HEAD_SECONDS:
                    try:
                        if caller.recv(10_000) == b"":
                            break
                    except TimeoutError:
                        if drip:
                            caller.sendall(drip)
                    except OSError:
                        break
            return time.monotonic() - began

        whole = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
        head = b"POST /alertmanager HTTP/1.1\r\nHost: x\r\n"
        callers = [
            pool.submit(seconds_until_closed, *each)
            for each in [(b"",), (head,), (head, b"X: y\r\n"), (whole + head,), (whole, b"a")]
        ]
        assert post(url, delivery(alert(1))) == 200
        with running("--runs", tmp_path, "--config", _tls(tmp_path, certificate, key), "--listen", "127.0.0.1:0") as (
            process,
            secure,
        ):
            callers.append(pool.submit(seconds_until_closed, b"", b"", secure.rsplit(":", 1)[1]))
            waited = [caller.result() for caller in callers]
            process.terminate()
            assert "Traceback" not in process.stderr.read()
    assert all(HEAD_SECONDS * 0.8 <= seconds < 2 * HEAD_SECONDS + 3.0 for seconds in waited), waited
    assert len(inbox.waiting()) == 1


def _tls(folder: Path, certificate: Path, key: Path) -> Path:
    path = folder / "tls.yaml"
    path.write_text(f"receiver: {{tls: {{cert_file: {certificate}, key_file: {key}}}}}\n")
    return path


def test_callers_beyond_the_limit_are_told_to_come_back(tmp_path, inbox):
    """With every place taken the next delivery is 503; when there is room again its retry is taken."""
    with running(*settings(tmp_path, "")) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        taken = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS)]
        try:
            connection = http.client.HTTPConnection(host, int(port), timeout=10)
            connection.request("POST", "/alertmanager", body=delivery(alert(1)))
            assert connection.getresponse().status == 503
            connection.close()
        finally:
            for caller in taken:
                caller.close()
        wait_for(lambda: post(url, delivery(alert(1))) == 200)
    assert len(inbox.waiting()) == 1


def test_a_crowd_does_not_take_the_files_that_the_inboxes_need(tmp_path, inbox):
    """Callers beyond a limit are hung up on at once, so that they are not thousands of open files."""
    with running(*settings(tmp_path, "")) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        crowd = [socket.create_connection((host, int(port)), timeout=2.0) for _ in range(MOST_CONNECTIONS + 20)]
        gone = 0
        for caller in crowd[-20:]:
            try:
                gone += caller.recv(1) == b""
            except ConnectionResetError:
                gone += 1
            except TimeoutError:
                break
        for caller in crowd:
            caller.close()
        assert gone == 20
        wait_for(lambda: post(url, delivery(alert(1))) == 200)
    assert len(inbox.waiting()) == 1


@pytest.mark.live
def test_who_does_not_read_the_answers_is_shown_the_door(tmp_path, inbox):
    """Requests without end, and no answer of them ever read, hold no place; a delivery meanwhile is taken."""
    many = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
    with running(*settings(tmp_path, "")) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        began = time.monotonic()
        with socket.create_connection((host, int(port)), timeout=0.2) as caller:
            while time.monotonic() - began < 6 * ANSWER_SECONDS:
                try:
                    caller.sendall(many)
                except TimeoutError:  # Neither side reads any more.
                    continue
                except OSError:
                    break
        waited = time.monotonic() - began
        assert post(url, delivery(alert(1))) == 200
    assert ANSWER_SECONDS * 0.8 <= waited < 4 * ANSWER_SECONDS
    assert len(inbox.waiting()) == 1
