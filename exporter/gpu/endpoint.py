"""The GPU page and its server, made and closed together."""

import logging
import signal
import socket
import threading
from pathlib import Path

from exporter.config import Config, Gpu
from exporter.gpu.driver import is_here
from exporter.gpu.page import GpuPage
from exporter.serving import MetricsServer, local_address

_log = logging.getLogger(__name__)


class GpuEndpoint:
    """What shows this host's GPUs to Prometheus.

    Args:
        settings: of exporter.yaml.
        node_name: the host's name where this process's own is another one, such as in a pod.

    Raises:
        OSError: the address can't be had: in use (by a dcgm-exporter?), or not ours.
    """

    def __init__(self, settings: Gpu, *, node_name: str | None = None) -> None:
        self._page = GpuPage(
            interval_seconds=settings.interval_seconds,
            hostname=settings.hostname or node_name or socket.gethostname(),
            job_mapping=None if settings.job_mapping_dir is None else Path(settings.job_mapping_dir),
        )
        self._server = MetricsServer(
            self._page, host=settings.listen.host, port=settings.listen.port, any_port=False
        )  # fmt: skip
        self.url = f"http://{local_address(settings.listen.host, self._server.port or 0)}/metrics"

    def start(self) -> None:
        """Begin to read the GPUs; the page is served from the beginning on."""
        self._page.start()

    def close(self) -> None:
        """Free the port and end the reading process, within 2 s whatever the driver does."""
        self._server.close()
        self._page.close()


def is_wanted(config: Config) -> bool:
    """Whether GPU metrics are to be served: always where they are all there is to serve, or where one asks for it."""
    if isinstance(config.gpu, str):
        return False
    if config.gpu.mode == "always" or isinstance(config.receiver, str) or is_here():
        return True
    _log.info(
        "no GPU metrics: neither NVIDIA's driver nor its binding is here (gpu: {mode: always} serves them anyway)"
    )
    return False


def wait_for_the_end() -> None:
    """Wait for SIGTERM or SIGINT."""
    ended = threading.Event()
    for sent in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sent, lambda *_: ended.set())
    ended.wait()
