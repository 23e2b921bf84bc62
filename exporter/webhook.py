"""The webhook receiver: Alertmanager posts alerts, the runs' inboxes get commands, the sender learns what came of each.

`POST /alertmanager` wants the bearer token where one is set. Health and metrics are open, as Prometheus's own are.
"""

import asyncio
import hmac
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

from exporter.intake import Answer, Intake
from exporter.message import decode
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
    bearer_token: str | None = None,
    stale_after_seconds: float = DEFAULT_STALE_AFTER_SECONDS,
    body_seconds: float = BODY_SECONDS,
    look_seconds: float = LOOK_SECONDS,
) -> Starlette:
    """The receiver as an ASGI application.

    Args:
        runs: the folder that holds the runs' folders.
        now: the clock, in Unix seconds.
        bearer_token: what a sender must show; None lets everybody in who can reach the address.
        stale_after_seconds: an alert that began longer ago than this is not acted on when it is first seen.
        body_seconds: how long a sender may take over its body.
        look_seconds: how long a scrape waits for the runs' folders to be read.
    """
    webhook = Webhook(
        runs,
        now=now,
        bearer_token=bearer_token,
        stale_after_seconds=stale_after_seconds,
        body_seconds=body_seconds,
        look_seconds=look_seconds,
    )
    return Starlette(
        routes=[
            Route("/alertmanager", webhook.deliver, methods=["POST"]),
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
        bearer_token: str | None,
        stale_after_seconds: float,
        body_seconds: float,
        look_seconds: float,
    ) -> None:
        self._runs = runs
        self._token = None if bearer_token is None else bearer_token.encode()
        self._body_seconds = body_seconds
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

    def _authenticate(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Header values are decoded as Latin-1, so this gives the bytes that were sent.
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._token):
            headers = {"WWW-Authenticate": "Bearer"}
            raise RefusedError("unauthorized", 401, "bearer token missing or wrong", headers)

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


def _json(content: Reply | Refusal, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _look_into(folder: Path) -> None:
    with os.scandir(folder) as entries:
        next(entries, None)


async def _unforeseen(_: Request, __: Exception) -> Response:
    # The server logs the traceback; the client has no use for it, and might be anybody.
    return _json(Refusal(error="internal error, see the receiver's log"), 500)
