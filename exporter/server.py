"""The receiver as a process: a socket, a server around the app, and an orderly end on a signal."""

import os
import signal
import socket
import sys
from typing import NoReturn

import uvicorn
from starlette.applications import Starlette

from exporter.config import Address

# Alertmanager keeps a few connections at most; beyond this, a caller is told to come back later.
CONNECTIONS = 64
KEEP_ALIVE_SECONDS = 5
# How long a half-sent delivery may hold up the end; its sender tries again.
LAST_WORDS_SECONDS = 1


def listen(address: Address) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: the address is in use, or not ours.
    """
    family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(where[0]), int(where[1])), family=family)


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, and say on stdout where, once it is so."""
    for sent in (signal.SIGTERM, signal.SIGINT):
        # The server puts its own in front of these, ends in order, and then raises the signal again.
        signal.signal(sent, _leave)
    config = uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
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
    )
    _Server(config).run(sockets=[listener])


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            print(f"receiver listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:
            # A thread that hangs in a shared file system cannot be cancelled, and waiting for it could take for ever.
            # Nothing is lost: its delivery was never answered, so it comes again, and files are whole or absent.
            os._exit(0)


def _leave(_: int, __: object) -> NoReturn:
    sys.exit(0)
