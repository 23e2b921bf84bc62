"""Links of a host that fail on purpose: the page that node_exporter would show of them."""

from exporter.exposition import series

_DOWNED = "node_infiniband_link_downed_total"
_DEVICE = {"device": "mlx5_0", "port": "1"}


class FakeLinks:
    """node_exporter's names for one InfiniBand port and its host, as many as gpu.yml needs to know a link that failed.

    A page of its own, and no text for a real node_exporter to add to its own: names that it shows already would spoil
    its whole scrape. Serve it with `exporter.serving.MetricsServer(links, host="127.0.0.1", port=0)`, and have
    Prometheus scrape it before anything fails: an increase needs to have seen the 0.

    Args:
        hostname: what the job and `uname -n` call the host.
    """

    def __init__(self, hostname: str) -> None:
        self._failures = 0
        self._host = series("node_uname_info", {"nodename": hostname})

    def fail(self) -> None:
        """The link goes down once more."""
        self._failures += 1

    def render(self, names: frozenset[str] = frozenset()) -> bytes:
        """The page in Prometheus' text format; only the families in `names` if any are given."""
        families = {
            "node_uname_info": f"# TYPE node_uname_info gauge\n{self._host} 1\n",
            _DOWNED: f"# TYPE {_DOWNED} counter\n{series(_DOWNED, _DEVICE)} {self._failures}\n",
        }
        return "".join(text for name, text in families.items() if not names or name in names).encode()
