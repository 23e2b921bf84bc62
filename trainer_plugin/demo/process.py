"""One server process on a loopback port: started, waited for, ended, and never left behind."""

import http.client
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

# The kernel kills the server if this process dies without a chance to end it (prctl PR_SET_PDEATHSIG); set by a child
# that then becomes the server, since code between fork and exec is unsafe in a process with threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
# No proxy, whatever the environment says: all of it is on this host.
local_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LostPortError(RuntimeError):
    """A server ended because another process took the port between its choice and its use."""


class Process:
    """One server process, logging to a file; it dies with the thread that started it.

    Args:
        name: what messages call it.
        command: program and arguments; the program as a path.
        address: the `host:port` on which it is told to listen.
        log: file for what it prints; replaced.
        cwd: the folder it runs in; ours if None.
        environment: its environment; ours if None.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        address: str,
        log: Path,
        cwd: Path | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.log = log
        shim = [sys.executable, "-ISc", _DIE_WITH_PARENT, str(os.getpid())]
        with log.open("wb") as out:
            # In a session of its own, so that Ctrl-C reaches us alone and we end it in order.
            self._popen = subprocess.Popen(
                [*shim, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
                env={**(environment or os.environ), "PYTHONUNBUFFERED": "1"},
            )

    def wait_ready(self, deadline: float) -> None:
        """Return as soon as the server answers `/-/ready`; `deadline` in seconds of the monotonic clock.

        Raises:
            LostPortError: it ended, and its port is in use by another process.
            RuntimeError: it ended for another reason; the last line of its log says why.
            TimeoutError: it did not answer in time.
        """
        code = None
        # It answers, and it is alive: another process might answer in its place.
        while not (_answers(f"http://{self.address}/-/ready") and (code := self._wait(0)) is None):
            if code is not None or (code := self._wait(0.05)) is not None:
                error = RuntimeError if _is_free(self.address) else LostPortError
                raise error(f"{self.name} ended with exit code {code}: {self._last_line()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} does not answer on {self.address}: {self._last_line()}")

    def terminate(self) -> None:
        """Ask it to end."""
        self._popen.terminate()

    def end(self, deadline: float) -> None:
        """Wait for its end until `deadline` (seconds of the monotonic clock), then kill it."""
        try:
            self._wait(max(0.0, deadline - time.monotonic()))
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it, as kill -9 does; nothing happens if it has ended."""
        self._popen.kill()
        self._popen.wait()

    def _wait(self, seconds: float) -> int | None:
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "(nothing in its log)")


def free_addresses(count: int) -> list[str]:
    """So many different `host:port` on loopback that are free now; nothing keeps them free until they are used."""
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        # As servers do: a connection that is still closing does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
        return True


def _answers(url: str) -> bool:
    """Whether a GET is answered with 2xx within a second."""
    try:
        with local_opener.open(url, timeout=1):
            return True
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, http.client.HTTPException):
        pass
    return False
