"""Commands pulled over HTTP, where the job shares no folder with the receiver.

The job's own inbox stays what it is: what waits at the receiver is copied into it, and what came of it is told back.
So a command that is pulled is taken once, outlives the job, and leaves the same record as any other.
"""

import http.client
import logging
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from exporter.commands import Record
from exporter.pull import Report, Waiting
from exporter.run_status import read_states
from trainer_plugin.config import PullConfig
from trainer_plugin.run_folder import JobFolder

_log = logging.getLogger(__name__)
# The states go stale at the receiver after 30 s (`RUNNING_SECONDS`).
REPORT_SECONDS = 10.0
ANSWER_SECONDS = 10.0
_POLL_SECONDS = 1.0
_MOST_BYTES = 4 * 1024 * 1024


class PullError(OSError):
    """The receiver could not be asked, or did not answer as it should."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token is for one address alone."""

    def redirect_request(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - as urllib has it
        return None


class Puller:
    """Asks the receiver once a second, in a thread of its own: a network that hangs stops this thread alone.

    Without a `url` in the options it does nothing. Errors are handed to `on_error`.

    Raises (on construction):
        ValueError: a file that the options name cannot be used; in one line.
    """

    def __init__(
        self,
        config: PullConfig,
        folder: JobFolder,
        run: str,
        *,
        on_error: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._folder = folder
        self._run = run
        self._on_error = on_error
        self._clock = clock
        query = urllib.parse.urlencode({"run": run})
        self._url = f"{str(config.url).rstrip('/')}/commands?{query}"
        self._opener = _opener(config)
        self._token()
        self._last: Waiting | None = None
        self._reported_at = -REPORT_SECONDS
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pull", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        if self._config.url is not None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread after a last report; an address that hangs is not waited for."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def poll(self, *, running: bool = True) -> None:
        """One round: what waits comes in, what is decided goes out.

        Raises:
            OSError: the receiver or the run's folder does not answer as it should.
        """
        if not running or self._clock() - self._reported_at >= REPORT_SECONDS:
            waiting = self._report([], running=running)
        else:
            waiting = self._ask(None)
        self._take(waiting)
        ids = [command.id for command in waiting.commands]
        decided = [record for record in map(self._folder.inbox.record, ids) if record is not None]
        if decided:
            self._report(decided, running=running)

    def _take(self, waiting: Waiting) -> None:
        for command in waiting.commands:
            if command.run == self._run:
                self._folder.inbox.put(command)
        # The first one may be old: as with a shared folder, only the next is a sign of life.
        last, self._last = self._last, waiting
        if last is not None and waiting.heartbeat is not None and waiting.heartbeat != last.heartbeat:
            self._folder.outer.beat(time.time())

    def _report(self, records: list[Record], *, running: bool) -> Waiting:
        states = {**read_states(self._folder.path, time.time()), "running": running}
        answer = self._ask(msgspec.json.encode(Report(records=records, states=states)))
        self._reported_at = self._clock()
        return answer

    def _ask(self, body: bytes | None) -> Waiting:
        request = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"})  # noqa: S310 - checked by the options
        token = self._token()
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as answer:
                content = answer.read(_MOST_BYTES)
            return msgspec.json.decode(content, type=Waiting)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode("utf-8", "replace")
            raise PullError(f"{self._url}: {error.code}, {said!r}") from error
        except urllib.error.URLError as error:
            raise PullError(f"{self._url}: {error.reason}") from error
        except (http.client.HTTPException, msgspec.MsgspecError) as error:
            raise PullError(f"{self._url}: no answer of a receiver: {error}") from error

    def _token(self) -> str | None:
        """The token as it is now: it may be changed while the job runs."""
        path = self._config.bearer_token_file
        try:
            token = None if path is None else Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"pull.bearer_token_file: {path}: {getattr(error, 'strerror', None) or error}") from error
        if token is not None and any(not "!" <= letter <= "~" for letter in token or " "):
            raise ValueError(f"pull.bearer_token_file: {path}: wanted one token without spaces")
        return token

    def _work(self) -> None:
        while not self._ending.wait(_POLL_SECONDS):
            self._held_back(running=True)
        self._held_back(running=False)

    def _held_back(self, *, running: bool) -> None:
        try:
            self.poll(running=running)
        except Exception as error:  # noqa: BLE001 - a broken network must not end this thread
            self._on_error(error)


def _opener(config: PullConfig) -> urllib.request.OpenerDirector:
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
        if config.cert_file is not None:
            context.load_cert_chain(config.cert_file, config.key_file, password="")
    except OSError as error:
        files = ", ".join(filter(None, (config.ca_file, config.cert_file, config.key_file)))
        raise ValueError(f"pull: {files}: {getattr(error, 'reason', None) or error.strerror or error}") from error
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirect)
