"""`python -m grafana_dashboards`: build the dashboards' JSON anew, or draw them as pictures from a live Prometheus.

Exit code 0: done, 1: the work failed, 2: bad usage.
"""

import argparse
import sys
import warnings
from pathlib import Path

from grafana_dashboards.preview.command import preview

_EXAMPLE = """example:
  python -m grafana_dashboards build
  python -m grafana_dashboards preview --prometheus http://127.0.0.1:9090 --out pictures
"""
_PREVIEW_EXAMPLE = """example:
  python -m grafana_dashboards preview --prometheus http://127.0.0.1:9090 --out pictures --range 30m --run gpt-0
"""


def cli(*arguments: str) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "build":
            return _build()
        for path in preview(
            options.prometheus, options.out, span=options.range, at=options.at, interval=options.interval,
            run=options.run, only=options.only,
        ):  # fmt: skip
            print(path)
    except (ValueError, OSError) as error:
        print(f"python -m grafana_dashboards: {error}", file=sys.stderr)
        return 1
    return 0


def _build() -> int:
    try:
        with warnings.catch_warnings():
            # The SDK prefers a newer schema, which cannot be provisioned as a file on every Grafana.
            warnings.simplefilter("ignore", DeprecationWarning)
            from grafana_dashboards.dashboards import write_dashboards  # noqa: PLC0415 - only this needs the SDK
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise ValueError(f"{missing} is not installed: pip install 'pretraining-guard[dashboards]'") from error
    for path in write_dashboards():
        print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grafana_dashboards",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "build", help="write the JSON of all dashboards anew", description="Write json/*.json of this package anew."
    )
    drawn = commands.add_parser(
        "preview",
        help="draw the dashboards without Grafana",
        description="Draw each dashboard from live data, as one PNG in DIR: panels, queries, units and limits as in "
        "the JSON, near enough to Grafana's looks to know what one would see there.",
        epilog=_PREVIEW_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drawn.add_argument("--prometheus", metavar="URL", required=True, help="where Prometheus answers")
    drawn.add_argument("--out", metavar="DIR", type=Path, required=True, help="where to put NAME.png of each dashboard")
    drawn.add_argument("--range", metavar="TIME", default="1h", help="how much to show: 90s, 30m, 6h, 2d (default: 1h)")
    drawn.add_argument("--at", metavar="TIME", help="the end of it, as ISO 8601 or Unix seconds (default: now)")
    drawn.add_argument(
        "--interval", metavar="TIME", default="5s", help="how often Prometheus scrapes the job (default: 5s)"
    )
    drawn.add_argument("--run", help="the run (default: the first of those that are there)")
    drawn.add_argument("--only", metavar="NAME", action="append", help="a dashboard, such as training; may be repeated")
    return parser


if __name__ == "__main__":
    sys.exit(cli(*sys.argv[1:]))
