"""The receiver as a process: a socket, a server around the app, and an orderly end on a signal."""

import asyncio
import os
import signal
import socket
import ssl
import sys
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from exporter.config import Address

# Alertmanager keeps a few connections at most; beyond this, a caller is told to come back later. Each may hold a body
# of 1 MiB, so this bounds the memory too.
CONNECTIONS = 256
# Beyond this one is hung up on unheard: a process has 1,024 files by default, and the inboxes are files too.
MOST_CONNECTIONS = 2 * CONNECTIONS
KEEP_ALIVE_SECONDS = 5
# How long a caller may take to say what it wants: its TLS handshake, and the head of each request.
HEAD_SECONDS = 5.0
# How long a caller may leave an answer unread: the smallest of buffers holds one, so only of many requests at once.
ANSWER_SECONDS = 5.0
# How long a half-sent delivery may hold up the end; its sender tries again.
LAST_WORDS_SECONDS = 1


def listen(address: Address) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: the address is in use, or not ours.
    """
    family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(where[0]), int(where[1])), family=family)


def serve(app: Starlette, listener: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and say on stdout where, once it is so."""
    for sent in (signal.SIGTERM, signal.SIGINT):
        # The server puts its own in front of these, ends in order, and then raises the signal again.
        signal.signal(sent, _leave)
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        backlog=CONNECTIONS,
    )
    config.load()
    config.ssl = tls
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(_Server(config).serve(sockets=[listener]))


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose servers wait no minute for a TLS handshake, which is asyncio's own limit."""

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:  # noqa: ANN401 - as asyncio has it
        if kwargs.get("ssl") is not None:
            kwargs |= {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": HEAD_SECONDS}
        return await super().create_server(*args, **kwargs)


class _Connection(H11Protocol):
    """A connection that is closed if it takes too long over the head of a request, or over reading its answers.

    Neither is watched by uvicorn, and enough such connections would keep everybody else out.
    """

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self._read()
        super().connection_lost(exc)

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            scheme = "http" if self.config.ssl is None else "https"
            print(f"receiver listening on {scheme}://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:
            # A thread that hangs in a shared file system cannot be cancelled, and waiting for it could take for ever.
            # Nothing is lost: its delivery was never answered, so it comes again, and files are whole or absent.
            os._exit(0)


def _leave(_: int, __: object) -> NoReturn:
    sys.exit(0)
