"""What a dashboard's queries find: Grafana's variables filled in, and Prometheus asked."""

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

# As many as a panel in Grafana has pixels for.
_MOST_POINTS = 500
_TIMEOUT_SECONDS = 30.0
# No proxy: it is the user's own server.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, kw_only=True)
class Series:
    """One series: its labels, times (Unix seconds) and values, NaN where Prometheus says so."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


@dataclass(frozen=True, kw_only=True)
class View:
    """What is looked at: a stretch of time (Unix seconds) and what the dashboard's variables are.

    `interval_seconds` is the data source's scrape interval, as it is set in Grafana.
    """

    start: float
    end: float
    interval_seconds: float = 15.0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Seconds between two points."""
        return math.ceil(max((self.end - self.start) / _MOST_POINTS, self.interval_seconds))

    def fill(self, text: str) -> str:
        """The text with the value of each variable in its place, as Grafana does it.

        Raises:
            ValueError: a variable is not known.
        """
        known = self.variables | {
            "__interval": f"{self.step}s",
            "__rate_interval": f"{math.ceil(max(self.step + self.interval_seconds, 4 * self.interval_seconds))}s",
            "__range": f"{math.ceil(self.end - self.start)}s",
        }

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if name not in known:
                raise ValueError(f"the variable ${name} has no value in {text!r}")
            return known[name]

        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


class Prometheus:
    """A Prometheus server by its address.

    Raises:
        ValueError: it is no address, or the server refuses a query; that message is its own.
        OSError: it does not answer.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--prometheus: an address such as http://127.0.0.1:9090 wanted, found {url}")
        self.url = url.rstrip("/")

    def over(self, expr: str, view: View) -> list[Series]:
        """The series of a range query, as a panel with a time axis asks for them."""
        start = view.start - view.start % view.step
        asked = {"query": view.fill(expr), "start": str(start), "end": str(view.end), "step": str(view.step)}
        return [_series(found["metric"], found["values"]) for found in self._get("query_range", asked)["result"]]

    def at_end(self, expr: str, view: View) -> list[Series]:
        """The series of an instant query at the end of the view, each with one value."""
        asked = {"query": view.fill(expr), "time": str(view.end)}
        return [_series(found["metric"], [found["value"]]) for found in self._get("query", asked)["result"]]

    def choices(self, query: str, view: View) -> list[str]:
        """What a variable's query, `label_values(SELECTOR, LABEL)`, gives to choose from."""
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        if found is None:
            raise ValueError(f"label_values(SELECTOR, LABEL) wanted, found {query}")
        asked = {"match[]": view.fill(found[1]), "start": str(view.start), "end": str(view.end)}
        values: list[str] = self._get(f"label/{found[2]}/values", asked)
        return values

    def _get(self, path: str, asked: dict[str, str]) -> Any:  # noqa: ANN401 - JSON
        try:
            with _opener.open(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(asked)}", timeout=_TIMEOUT_SECONDS
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"{asked}: {error.read().decode(errors='replace')}") from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            raise OSError(f"{self.url} does not answer: {reason}") from None


def _series(labels: dict[str, str], pairs: list[list[Any]]) -> Series:
    return Series(labels=labels, times=[float(time) for time, _ in pairs], values=[float(value) for _, value in pairs])
