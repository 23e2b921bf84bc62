"""The receiver under load and under attack (`make soak`): every real alert is in the inbox once, in bounded memory."""

import asyncio
import os
import random
import ssl
import statistics
import threading
import time
from pathlib import Path

import pytest
from certificates import make_ca, make_certificate
from payloads import BODIES, VALID, send_bodies
from receivers import alert, delivery, running

from exporter.commands import alert_identity
from exporter.runs import RunFolder

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

CLIENTS, RUNS = 16, 8
DISTINCT, DUPLICATES, MOST = 10_000, 100_000, 100
HOSTILE = 50
MOST_GROWTH_BYTES = 300 * 1024 * 1024


def bodies(alerts: list[dict[str, str]], seed: int = 0) -> list[bytes]:
    """Deliveries of 1 to 100 alerts each: every alert once, and ten times again, in any order."""
    draw = random.Random(seed)
    sent = alerts * (1 + DUPLICATES // DISTINCT)
    draw.shuffle(sent)
    found = []
    while sent:
        size = draw.randint(1, MOST)
        found.append(delivery(*sent[:size]))
        del sent[:size]
    return found


class Sender:
    """One honest client on one kept connection, as Alertmanager's; `seconds` is what each answer took."""

    def __init__(self, port: int, context: ssl.SSLContext | None, todo: list[bytes], pause_seconds: float) -> None:
        self._port, self._context, self._todo, self._pause_seconds = port, context, todo, pause_seconds
        self.seconds: list[float] = []
        self.statuses: list[bytes] = []

    async def run(self) -> None:
        """Send until nothing is left; what was not taken is sent again, as Alertmanager would."""
        reader = writer = None
        while self._todo:
            body = self._todo.pop()
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context)
            began = time.perf_counter()
            head = b"POST /alertmanager HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            try:
                writer.write(head + body)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
            except (OSError, asyncio.IncompleteReadError):
                self._todo.append(body)
                writer.transport.abort()
                writer = None
                continue
            self.seconds.append(time.perf_counter() - began)
            self.statuses.append(answer.split(b" ", 2)[1])
            if self.statuses[-1] != b"200":
                self._todo.append(body)
            await asyncio.sleep(self._pause_seconds)
        if writer is not None:
            writer.transport.abort()


async def attack(port: int, kind: int, over: asyncio.Event, *, tls: bool) -> None:
    """One hostile caller who comes back whenever it is thrown out, until all is over."""
    context = ssl._create_unverified_context() if tls and kind != 2 else None  # noqa: S323
    while not over.is_set():
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            if kind == 0:  # A head that never ends, a letter at a time.
                writer.write(b"POST /alertmanager HTTP/1.1\r\nX: ")
                while not over.is_set() and not reader.at_eof():
                    writer.write(b"a")
                    await writer.drain()
                    await asyncio.sleep(0.5)
            elif kind == 1:  # A body without end.
                writer.write(b"POST /alertmanager HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
                while not over.is_set() and not reader.at_eof():
                    writer.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            else:  # Nothing at all: no handshake, no word.
                await asyncio.wait_for(reader.read(1), 60.0)
        except (OSError, TimeoutError):
            await asyncio.sleep(0.2)
        finally:
            if writer is not None:
                writer.transport.abort()


async def storm(
    port: int, todo: list[bytes], context: ssl.SSLContext | None, pause_seconds: float
) -> tuple[list[Sender], float]:
    """All of it at once; the senders, and how long it took."""
    over = asyncio.Event()
    attackers = [
        asyncio.create_task(attack(port, number % 3, over, tls=context is not None)) for number in range(HOSTILE)
    ]
    await asyncio.sleep(1.0)
    senders = [Sender(port, context, todo, pause_seconds) for _ in range(CLIENTS)]
    began = time.perf_counter()
    await asyncio.gather(*(sender.run() for sender in senders))
    took = time.perf_counter() - began
    over.set()
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    return senders, took


def resident_bytes(pid: int) -> int:
    """What a process holds in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("tls", "pause_seconds"), [(False, 0.0), (False, 0.5), (True, 0.5)], ids=["at-once", "with-pauses", "tls"]
)
def test_every_alert_is_in_the_inbox_once_under_fire(tmp_path, tls, pause_seconds):
    """16 clients, 10,000 alerts and 100,000 repeats, 50 hostile connections: all queued once, memory bounded.

    What the honest ones waited is printed: it is a figure, not a test. `pause_seconds` is between two of one client's
    deliveries; without, all 16 are always waiting, and a wait tells the throughput.
    """
    folders = [RunFolder(tmp_path / "runs", f"gpt-{number}") for number in range(RUNS)]
    for folder in folders:
        folder.inbox.create()
    arguments: list[str | Path] = ["--runs", tmp_path / "runs", "--listen", "127.0.0.1:0"]
    context = None
    if tls:
        ca = make_ca(tmp_path)
        certificate, key = make_certificate(tmp_path, "receiver", ca)
        (tmp_path / "exporter.yaml").write_text(f"receiver: {{tls: {{cert_file: {certificate}, key_file: {key}}}}}\n")
        arguments += ["--config", tmp_path / "exporter.yaml"]
        context = ssl.create_default_context(cafile=ca)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    alerts = [alert(number, run=f"gpt-{number % RUNS}", starts_at=now) for number in range(DISTINCT)]
    todo = bodies(alerts)
    messages = len(todo)
    with running(*arguments, log=tmp_path / "receiver.log") as (process, url):
        before, highest, stop = resident_bytes(process.pid), [0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.1):
                highest[0] = max(highest[0], resident_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            senders, took = asyncio.run(storm(int(url.rsplit(":", 1)[1]), todo, context, pause_seconds))
        finally:
            stop.set()
            watcher.join()
    seconds = sorted(each for sender in senders for each in sender.seconds)
    statuses = [status for sender in senders for status in sender.statuses]
    print(
        f"{messages} messages in {took:.0f} s; answers: median {statistics.median(seconds) * 1000:.1f} ms, "
        f"p99 {seconds[int(0.99 * len(seconds))] * 1000:.1f} ms, longest {seconds[-1] * 1000:.0f} ms; "
        f"not 200: {len(statuses) - statuses.count(b'200')}; "
        f"memory {before / 2**20:.0f} to {highest[0] / 2**20:.0f} MiB"
    )
    for number, folder in enumerate(folders):
        own = {alert_identity(each["fingerprint"], now) for each in alerts[number::RUNS]}
        assert {path.name for path in folder.inbox.new.iterdir()} == {f"{name}.json" for name in own}
        assert list(folder.inbox.done.iterdir()) == []
    assert highest[0] - before < MOST_GROWTH_BYTES
    assert "Traceback" not in (tmp_path / "receiver.log").read_text()


@pytest.mark.parametrize("valid", [False, True], ids=["odd", "valid"])
def test_ten_thousand_bodies_do_no_harm(tmp_path, valid):
    """By the schema of the payload and against it: no 5xx, and nothing in the inbox that should have been refused."""
    folder = RunFolder(tmp_path / "runs", "gpt-0")
    folder.inbox.create()
    send_bodies(tmp_path / "runs", folder.inbox, VALID if valid else BODIES, examples=10_000, valid=valid)
