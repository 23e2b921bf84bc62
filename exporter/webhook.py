"""The webhook receiver: Alertmanager posts alerts, the runs' inboxes get commands, the sender learns what came of each.

`POST /alertmanager` wants the token or password where one is set, and so do jobs that pull their commands. Health and
metrics are open, as Prometheus's own are.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from exporter.access import NOBODY_ASKED, Credentials
from exporter.intake import Answer, Intake
from exporter.message import decode
from exporter.pull import NotPulledError, PulledRuns, Waiting, decode_report
from exporter.receiver_metrics import LOOK_SECONDS, ReceiverMetrics

MAX_BODY_BYTES = 1024 * 1024
# Longer than Alertmanager itself keeps trying to send one notification at its shortest interval.
BODY_SECONDS = 15.0
DEFAULT_STALE_AFTER_SECONDS = 600.0

logger = logging.getLogger(__name__)


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a 200."""

    alerts: list[Answer]
    warning: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every other answer to a delivery: one line."""

    error: str


class RefusedError(Exception):
    """A delivery that is not taken: what to count, and what to answer."""

    def __init__(self, outcome: str, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.status = status
        self.headers = headers


def build_app(
    runs: Path,
    *,
    now: Callable[[], float] = time.time,
    credentials: Credentials = NOBODY_ASKED,
    stale_after_seconds: float = DEFAULT_STALE_AFTER_SECONDS,
    body_seconds: float = BODY_SECONDS,
    look_seconds: float = LOOK_SECONDS,
    pull: bool = False,
) -> Starlette:
    """The receiver as an ASGI application.

    Args:
        runs: the folder that holds the runs' folders.
        now: the clock, in Unix seconds.
        credentials: what a sender must show; without any, everybody is let in who can reach the address.
        stale_after_seconds: an alert that began longer ago than this is not acted on when it is first seen.
        body_seconds: how long a sender may take over its body.
        look_seconds: how long a scrape waits for the runs' folders to be read.
        pull: whether jobs may pull their commands: only where a stranger cannot.
    """
    webhook = Webhook(
        runs,
        now=now,
        credentials=credentials,
        stale_after_seconds=stale_after_seconds,
        body_seconds=body_seconds,
        look_seconds=look_seconds,
        pull=pull,
    )
    return Starlette(
        routes=[
            Route("/alertmanager", webhook.deliver, methods=["POST"]),
            Route("/commands", webhook.commands, methods=["GET", "POST"]),
            Route("/-/healthy", webhook.healthy),
            Route("/-/ready", webhook.ready),
            Route("/metrics", webhook.metrics),
        ],
        exception_handlers={Exception: _unforeseen},
    )


class Webhook:
    """The routes, and what they share."""

    def __init__(
        self,
        runs: Path,
        *,
        now: Callable[[], float],
        credentials: Credentials,
        stale_after_seconds: float,
        body_seconds: float,
        look_seconds: float,
        pull: bool,
    ) -> None:
        self._runs = runs
        self._credentials = credentials
        self._body_seconds = body_seconds
        self._pulled = PulledRuns(runs, now) if pull else None
        self._metrics = ReceiverMetrics(runs, now=now, look_seconds=look_seconds)
        self._intake = Intake(
            runs=runs,
            now=now,
            stale_after_seconds=stale_after_seconds,
            counted=self._metrics.count,
            heard=self._metrics.heard,
        )

    async def deliver(self, request: Request) -> Response:
        """One delivery of Alertmanager's."""
        with self._metrics.seconds.time():
            try:
                return _json(await self._take(request), 200)
            except RefusedError as refused:
                self._metrics.count(refused.outcome)
                logger.warning("delivery refused: %d, %.300r", refused.status, str(refused))
                return _json(Refusal(error=str(refused)), refused.status, refused.headers)

    async def commands(self, request: Request) -> Response:
        """A job that shares no folder with us: GET tells what waits for its run, POST takes its report."""
        try:
            return _json(await self._exchange(request), 200)
        except RefusedError as refused:
            return _json(Refusal(error=str(refused)), refused.status, refused.headers)

    async def healthy(self, _: Request) -> Response:
        """The process answers."""
        return PlainTextResponse("healthy\n")

    async def ready(self, _: Request) -> Response:
        """The runs' folder can be read."""
        try:
            await run_in_threadpool(_look_into, self._runs)
        except OSError as error:
            return PlainTextResponse(f"not ready: runs folder: {error.strerror or error}\n", status_code=503)
        return PlainTextResponse("ready\n")

    async def metrics(self, _: Request) -> Response:
        """The receiver's own metrics."""
        await run_in_threadpool(self._metrics.look)
        page = generate_latest(self._metrics.registry)
        return Response(page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _take(self, request: Request) -> Reply:
        """Take a delivery.

        Raises:
            RefusedError: it is not taken, or not wholly.
        """
        self._authenticate(request)  # Before the body: a stranger gets none of our memory.
        try:
            message = decode(await self._body(request))
        except ValueError as error:
            raise RefusedError("bad_request", 400, str(error)) from error
        try:
            # In a thread, because a shared file system may hang, and health checks and scrapes must not hang with it.
            answers = await run_in_threadpool(self._intake.take_all, message.alerts)
        except OSError as error:
            reason = f"could not write to the run's folder: {error.strerror or error}"
            raise RefusedError("unavailable", 503, reason) from error
        self._metrics.truncated(message.truncated_alerts)
        warning = "; ".join(message.warnings())
        if warning:
            logger.warning("delivery for receiver %.99r: %s", message.receiver, warning)
        return Reply(alerts=answers, warning=warning)

    async def _exchange(self, request: Request) -> Waiting:
        """Take a job's report, if it is one, and tell what waits.

        Raises:
            RefusedError: it is nobody's run, or nobody we know.
        """
        self._authenticate(request)
        if self._pulled is None:
            raise RefusedError("forbidden", 403, "commands are told only where receiver.bearer_token_file is set")
        run = request.query_params.get("run", "")
        try:
            if request.method == "POST":
                report = decode_report(await self._body(request))
                await run_in_threadpool(self._pulled.report, run, report)
            return await run_in_threadpool(self._pulled.waiting, run)
        except ValueError as error:
            raise RefusedError("bad_request", 400, str(error)) from error
        except NotPulledError as error:
            raise RefusedError("bad_request", 409 if error.known else 404, f"run {run!r:.99}: {error}") from error
        except OSError as error:
            raise RefusedError("unavailable", 503, f"run's folder: {error.strerror or error}") from error

    def _authenticate(self, request: Request) -> None:
        # A page in somebody's browser may post to this host's loopback; browsers say so, and Alertmanager is none.
        if "origin" in request.headers or "sec-fetch-site" in request.headers:
            raise RefusedError("forbidden", 403, "requests of a browser are not taken")
        if not self._credentials.admits(request.headers.get("authorization", "")):
            headers = {"WWW-Authenticate": self._credentials.challenge}
            raise RefusedError("unauthorized", 401, "token or password missing or wrong", headers)

    async def _body(self, request: Request) -> bytes:
        """The body; no more than the limit is ever held."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > MAX_BODY_BYTES:
            raise RefusedError("too_large", 413, f"body has {announced} bytes, at most {MAX_BODY_BYTES} are taken")
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise RefusedError("too_large", 413, f"body has more than the {MAX_BODY_BYTES} bytes taken")
        except TimeoutError as error:
            reason = f"body not complete after {self._body_seconds:g} s"
            raise RefusedError("bad_request", 408, reason) from error
        except ClientDisconnect as error:
            raise RefusedError("bad_request", 400, "sender hung up in the middle of its body") from error
        return bytes(body)


def _json(content: Reply | Refusal | Waiting, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _look_into(folder: Path) -> None:
    with os.scandir(folder) as entries:
        next(entries, None)


async def _unforeseen(_: Request, __: Exception) -> Response:
    # The server logs the traceback; the client has no use for it, and might be anybody.
    return _json(Refusal(error="internal error, see the receiver's log"), 500)
