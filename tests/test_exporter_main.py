"""`python -m exporter` as a process: where it listens, how it ends, and what it says when it cannot start."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from receivers import running

import alert_rules
from exporter.__main__ import cli
from exporter.files import packaged_files, write_files
from exporter.runs import RunFolder

REPOSITORY = Path(__file__).parents[1]
WITHOUT_THE_EXTRA = """
import sys
sys.modules[sys.argv[1]] = None
from exporter.__main__ import cli
sys.exit(cli(*sys.argv[2:]))
"""


def test_it_serves_and_ends_on_sigterm(tmp_path):
    """A real process takes a real delivery with the token of its file, says that it has no GPUs, and ends with 0."""
    RunFolder(tmp_path / "runs", "gpt-0").inbox.create()
    (tmp_path / "token").write_text("s3cret\n")
    config = tmp_path / "exporter.yaml"
    config.write_text(f"runs: {tmp_path}/runs\nreceiver: {{bearer_token_file: {tmp_path}/token}}\n")
    with running("--config", config, "--listen", "127.0.0.1:0") as (process, url):
        assert httpx.get(f"{url}/-/ready").status_code == 200
        body = {
            "version": "4",
            "alerts": [
                {
                    "status": "firing",
                    "labels": {"alertname": "TrainWatchdog", "run": "gpt-0"},
                    "startsAt": "2026-03-01T12:00:00Z",
                    "fingerprint": "1",
                }
            ],
        }
        assert httpx.post(f"{url}/alertmanager", json=body).status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        response = httpx.post(f"{url}/alertmanager", json=body, headers=headers)
        assert [alert["outcome"] for alert in response.json()["alerts"]] == ["heartbeat"]
        too_large = httpx.post(f"{url}/alertmanager", content=b" " * 10_000_000, headers=headers)
        assert too_large.status_code == 413
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 0
        errors = process.stderr.read()
        assert "no GPU metrics: " in errors
        assert "Traceback" not in errors
    assert RunFolder(tmp_path / "runs", "gpt-0").heartbeat() is not None


def test_a_folder_of_runs_that_is_not_there_is_told(tmp_path):
    """It may come with the first job, so the receiver starts; but a misspelt one would only ever say unknown_run."""
    (tmp_path / "runs").mkdir()
    for folder, told in (("rnus", 1), ("runs", 0)):
        with running("--runs", tmp_path / folder, "--listen", "127.0.0.1:0") as (process, _):
            process.send_signal(signal.SIGTERM)
            assert process.stderr.read().count(f"runs: {tmp_path / folder} is not there yet") == told


def test_a_half_sent_delivery_does_not_hold_up_the_end(tmp_path):
    """SIGINT ends it although a sender is in the middle of its body and another keeps its connection."""
    with running("--runs", tmp_path, "--listen", "localhost:0") as (process, url):
        host, port = url.removeprefix("http://").rsplit(":", 1)
        host = host.strip("[]")
        idle = http.client.HTTPConnection(host, int(port))
        idle.request("GET", "/-/healthy")
        assert idle.getresponse().read() == b"healthy\n"
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /alertmanager HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=5) == 0
        idle.close()


def test_a_hanging_file_system_does_not_hold_up_the_end(tmp_path):
    """SIGTERM ends it although a thread waits for a file that does not answer, here a pipe."""
    folder = RunFolder(tmp_path, "gpt-0")
    folder.inbox.create()
    os.mkfifo(folder.heartbeat_path)
    body = (
        b'{"version": "4", "alerts": [{"status": "firing", "labels": {"alertname": "TrainWatchdog", "run": "gpt-0"},'
        b' "startsAt": "2026-03-01T12:00:00Z", "fingerprint": "1"}]}'
    )
    with running("--runs", tmp_path, "--listen", "127.0.0.1:0") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port))
        connection.request("POST", "/alertmanager", body=body)
        pipe = os.open(folder.heartbeat_path, os.O_WRONLY)  # Returns once the receiver's thread reads it.
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 0
        os.close(pipe)
        connection.close()


def test_an_address_in_use_is_one_line_and_1(tmp_path, capsys):
    """A second process on the same port says so and ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli("--runs", str(tmp_path), "--listen", address) == 1
    assert capsys.readouterr().err == f"python -m exporter: receiver.listen: {address}: Address already in use\n"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("runz: x", [], "exporter.yaml: runz: unknown key, known ones are runs, receiver, gpu"),
        ("", ["--listen", "9402"], "--listen: Expected HOST:PORT"),
        ("", ["--listen", "0.0.0.0:9402"], "receiver.listen: 0.0.0.0:9402 can be reached from other hosts"),
        ("receiver: off\ngpu: off", [], "receiver: it is off, and so is gpu: nothing to serve"),
        ("receiver: {basic_auth_file: /none}", [], "receiver.basic_auth_file: /none: cannot be read"),
        ("receiver: {tls: {cert_file: x}}", [], "receiver.tls.cert_file: without receiver.tls.key_file"),
        ("receiver: {tls: {cert_file: /none, key_file: x}}", [], "receiver.tls.cert_file: /none: cannot be read"),
        ("receiver: {bearer_token_file: /none}", [], "receiver.bearer_token_file: /none: cannot be read"),
        ("", ["--port=1"], "unrecognized arguments: --port=1"),
        ("", ["flies"], "invalid choice: 'flies'"),
        ("", ["files"], "the following arguments are required: --out"),
    ],
)
def test_bad_usage_is_one_line_and_2(tmp_path, capsys, text, arguments, message):
    """What is wrong with settings or arguments is told before anything listens."""
    config = tmp_path / "exporter.yaml"
    config.write_text(text)
    assert cli("--config", str(config), *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_an_explicit_address_turns_a_receiver_on_that_is_off(tmp_path):
    """An argument beats the file."""
    config = tmp_path / "exporter.yaml"
    config.write_text("receiver: off\ngpu: off\n")
    with running("--config", config, "--runs", tmp_path, "--listen", "127.0.0.1:0") as (process, url):
        assert httpx.get(f"{url}/-/healthy").text == "healthy\n"
        process.terminate()
        assert "no GPU metrics" not in process.stderr.read()


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_a_missing_extra_is_named(tmp_path, missing):
    """Without starlette or uvicorn the line says what to install, and `files` works all the same."""
    start = [sys.executable, "-c", WITHOUT_THE_EXTRA, missing]
    served = subprocess.run([*start], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    wanted = f"python -m exporter: {missing} is not installed: pip install 'pretraining-guard[receiver]'\n"
    assert (served.returncode, served.stdout, served.stderr) == (1, "", wanted)
    files = subprocess.run(
        [*start, "files", "--out", tmp_path], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert "is not installed" not in files.stderr


def test_it_needs_no_torch():
    """The exporter never loads torch or the trainer's plugin."""
    code = "import sys, exporter.server, exporter.webhook, exporter.__main__; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert {"torch", "trainer_plugin"}.isdisjoint(run.stdout.split())


@pytest.mark.parametrize("arguments", [["--help"], ["files", "--help"]])
def test_help_has_an_example(capsys, arguments):
    """Each command shows how it is called."""
    assert cli(*arguments) == 0
    assert "example:\n  python -m exporter" in capsys.readouterr().out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A package folder with the endings that are copied, and others."""
    folder = tmp_path / "source"
    (folder / "folder.yml").mkdir(parents=True)
    for name in ("b.yml", "a.md", "c.tmpl", "__init__.py", "notes.txt"):
        (folder / name).write_text(name)
    return folder


def test_files_are_copied_and_copied_again(tmp_path, source):
    """Rules, runbook and templates come out as they are; doing it twice changes nothing."""
    out = tmp_path / "deep" / "out"
    expected = [out / "alert_rules" / name for name in ("a.md", "b.yml", "c.tmpl")]
    for _ in range(2):
        assert write_files(out, packaged_files({"alert_rules": source}, runs=Path("runs"))) == expected
        assert sorted((out / "alert_rules").iterdir()) == expected
        assert [path.read_text() for path in expected] == ["a.md", "b.yml", "c.tmpl"]


def test_a_package_without_files_is_told(tmp_path):
    """An installation that lost its rules does not look like one that wrote them."""
    (tmp_path / "source").mkdir()
    with pytest.raises(FileNotFoundError, match="the installation is not complete"):
        packaged_files({"alert_rules": tmp_path / "source"}, runs=Path("runs"))


@pytest.mark.parametrize("in_the_way", ["file", "folder", "link"])
def test_a_file_that_differs_is_never_overwritten(tmp_path, source, in_the_way):
    """An edited rule stays as it is, and nothing else is written beside it."""
    path = tmp_path / "alert_rules" / "b.yml"
    path.parent.mkdir()
    if in_the_way == "folder":
        path.mkdir()
    elif in_the_way == "file":
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path / "dangling")
    with pytest.raises(FileExistsError, match=r"b\.yml is there and differs"):
        write_files(tmp_path, packaged_files({"alert_rules": source}, runs=Path("runs")))
    assert os.listdir(path.parent) == ["b.yml"]  # noqa: PTH208 - names are compared
    assert not (tmp_path / "dangling").exists()


def test_files_writes_the_packaged_rules(tmp_path, capsys):
    """The command copies what the installed package holds, and lists it."""
    packaged = Path(next(iter(alert_rules.__path__)))
    names = sorted(path.name for path in packaged.iterdir() if path.suffix in {".yml", ".md", ".tmpl"})
    assert names
    assert cli("files", "--out", str(tmp_path)) == 0
    listed = capsys.readouterr().out.splitlines()
    assert {f"{tmp_path}/alert_rules/{name}" for name in names} <= set(listed)
    assert {f"{tmp_path}/grafana_dashboards/json/training.json", f"{tmp_path}/alert_rules/slurm/train.sbatch"} <= {
        *listed
    }
    assert sorted(str(path) for path in tmp_path.rglob("*") if path.is_file()) == sorted(listed)
    assert not [path for path in listed if "/compose/" in path]
    assert (tmp_path / "alert_rules" / names[0]).read_bytes() == (packaged / names[0]).read_bytes()
    (tmp_path / "alert_rules" / names[0]).write_text("mine")
    assert cli("files", "--out", str(tmp_path)) == 1
    assert "differs" in capsys.readouterr().err
