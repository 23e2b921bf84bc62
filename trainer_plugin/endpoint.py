"""The job's metrics endpoint: page, server, and the entry by which Prometheus finds it, made and closed together."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from exporter.page import Page
from exporter.serving import MetricsServer, Target, local_address, remove_targets
from trainer_plugin.config import Config
from trainer_plugin.metrics import Metrics
from trainer_plugin.placement import Placement
from trainer_plugin.ranks import Ranks

_log = logging.getLogger(__name__)


class Endpoint:
    """What one process shows to Prometheus. `port` is the one really used, None if none could be had.

    Each rank has its own: the configured port and its number on this host, and an entry with its rank.

    Raises:
        OSError: the entry in `<runs>/targets` cannot be written.
    """

    def __init__(
        self,
        config: Config,
        *,
        layers: Iterable[str],
        moments: Mapping[str, tuple[str, ...]],
        scaled: bool,
        steps_total: int,
        info: dict[str, str],
        placement: Placement,
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        rank = str(ranks.rank)
        self.page = Page(run=config.run, rank=rank)
        self.page.set("train_rank_info", 1.0, placement.gpu_uuid, placement.hostname)
        self.metrics = Metrics(
            self.page, config, layers=layers, info=info, scaled=scaled, steps_total=steps_total, moments=moments
        )
        wanted = config.metrics.port + ranks.local_rank if config.metrics.port else 0
        self._server = MetricsServer(self.page, host=config.metrics.host, port=wanted)
        self.port = self._server.port
        self._target: Target | None = None
        if ranks.first:
            remove_targets(Path(config.runs), config.run, from_rank=ranks.size)
        if self.port is None:
            return
        address = config.metrics.advertise or local_address(config.metrics.host, self.port)
        host, _, port = address.rpartition(":")
        if config.metrics.advertise and port == str(config.metrics.port):
            # Another job of this host may have that one, and Prometheus would read its page.
            address = f"{host}:{self.port}"
        elif config.metrics.advertise and port.isdigit():  # A mapped one, told for the first on this host.
            address = f"{host}:{int(port) + ranks.local_rank}"
        try:
            self._target = Target(Path(config.runs), run=config.run, rank=rank, address=address)
        except OSError:
            self._server.close()
            raise
        _log.info("run %s: metrics on http://%s/metrics", config.run, address)

    def count_checkpoint_failure(self, tier: str) -> None:
        """A checkpoint could not be written, or had to be left out."""
        self.page.add("train_checkpoint_failures_total", 1.0, tier)

    def close(self) -> None:
        """Tell Prometheus that there is nothing to scrape any more, and free the port."""
        if self._target is not None:
            self._target.remove()
        self._server.close()
