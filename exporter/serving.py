"""The job's `/metrics` endpoint, and the file by which Prometheus finds it."""

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from exporter.exposition import CONTENT_TYPE
from exporter.forks import let_go_in_children
from exporter.runs import write_atomically

_log = logging.getLogger(__name__)
# Prometheus's own time-out. A connection serves one scrape, and is cut off then, whatever trickles through it.
_LONGEST_SECONDS = 10.0


class Rendered(Protocol):
    """A page that can be served."""

    def render(self, names: frozenset[str] = frozenset()) -> bytes:
        """The page as text; only the families in `names` if any are given."""
        ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # Connections that come in one moment, beyond a few of which a new one would have to knock again after seconds.
    request_queue_size = 128
    longest_seconds = _LONGEST_SECONDS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._opened: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection, and when it came."""
        request, address = super().get_request()
        self._opened[request] = time.monotonic()
        return request, address

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as in the base class
        """A connection has come to its end."""
        self._opened.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called between accepts: whoever hangs must not keep a thread for ever."""
        self.hang_up(before=time.monotonic() - self.longest_seconds)

    def hang_up(self, *, before: float) -> None:
        """Cut off the connections opened before a time; their threads end by that."""
        for request, opened in list(self._opened.items()):
            if opened < before:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def let_go(self) -> None:
        """In a forked child: close the copies of the port and of the scrapes under way, and shut nothing down."""
        for copy in (self.socket, *self._opened):
            descriptor = copy.detach()
            if descriptor >= 0:
                os.close(descriptor)

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hangs up in the middle is not worth a traceback on the job's stderr."""
        _log.debug("metrics: %s gave up (%s)", client_address, request, exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Serves a page on its own threads; `port` is the one really used, None if none could be had.

    A scrape that takes more than `longest_seconds` is cut off.

    Raises:
        OSError: the port can't be had, where it must be that one (`any_port=False`).
    """

    def __init__(
        self,
        page: Rendered,
        *,
        host: str,
        port: int,
        longest_seconds: float = _LONGEST_SECONDS,
        any_port: bool = True,
    ) -> None:
        self.host = host
        self._server = (_bind if any_port else _bind_exactly)(_handler(page.render), host, port)
        self.port: int | None = None
        if self._server is not None:
            self._server.longest_seconds = longest_seconds
            let_go_in_children(self)
            self.port = int(self._server.server_address[1])
            thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
            thread.start()

    def let_go(self) -> None:
        """In a forked child: it has no thread to answer with, and must not keep the port."""
        if self._server is not None:
            self._server.let_go()

    def close(self) -> None:
        """Stop serving and free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.hang_up(before=math.inf)
            self._server.server_close()
            self._server = None


class Target:
    """One process's file_sd entry in `<runs>/targets`: there while it can be scraped."""

    def __init__(self, runs: Path, *, run: str, rank: str, address: str) -> None:
        self._path = runs / "targets" / f"{run}-{rank}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for draft in self._path.parent.glob(f".{self._path.name}.{'[0-9a-f]' * 16}"):
            draft.unlink(missing_ok=True)  # Of a job that was killed while it wrote.
        # The labels are on `up` too, so that a dead scrape is known by its run.
        entry = [{"targets": [address], "labels": {"run": run, "rank": rank}}]
        write_atomically(self._path, json.dumps(entry).encode())

    def remove(self) -> None:
        """Tell Prometheus that there is nothing to scrape any more."""
        self._path.unlink(missing_ok=True)


def remove_targets(runs: Path, run: str, *, from_rank: int) -> None:
    """Remove the entries of ranks that a run does not have: those of a larger job, which was killed."""
    for path in (runs / "targets").glob("*.json"):
        rank = path.stem.removeprefix(f"{run}-")
        if path.stem != rank and rank.isdigit() and int(rank) >= from_rank:
            path.unlink(missing_ok=True)


def _bind(handler: type[BaseHTTPRequestHandler], host: str, port: int) -> _Server | None:
    """The wanted port, else any free one, else none: a job must start without its metrics rather than not at all."""
    try:
        return _bind_exactly(handler, host, port)
    except (OSError, OverflowError) as error:
        refused = error
    try:
        server = _bind_exactly(handler, host, 0)
    except OSError:
        _log.warning("metrics: %s:%d cannot be had (%s), nor any other port: no endpoint", host, port, refused)
        return None
    _log.warning("metrics: %s:%d cannot be had (%s): on port %d instead", host, port, refused, server.server_port)
    return server


def _bind_exactly(handler: type[BaseHTTPRequestHandler], host: str, port: int) -> _Server:
    return (_ServerV6 if ":" in host else _Server)((host, port), handler)


def _handler(render: Callable[[frozenset[str]], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path != "/metrics":
                self.send_error(404)
                return
            body = render(frozenset(parse_qs(url.query).get("name[]", [])))
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            """Scrapes are not worth a line."""

    return Handler


def local_address(host: str, port: int) -> str:
    """What Prometheus should be told for a server bound to `host`: the host's own name where it is bound to all."""
    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
