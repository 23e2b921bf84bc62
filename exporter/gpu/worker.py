"""The process that talks to the driver: `python -m exporter.gpu.worker`, started by the page's and nobody else.

Apart, because a call into the driver may hang for ever or take the process with it, and because a driver that was
replaced can only be loaded by a new process. It writes one line of JSON for each collection to stdout: `up`, `reason`,
`families` (text by name) and `remember` (what the next such process gets as its first line on stdin, so that counts go
on and a GPU that has gone is known).
"""

import argparse
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from exporter.gpu.collector import Collector
from exporter.gpu.driver import Driver
from exporter.gpu.families import Families
from exporter.gpu.xids import Xids

# The end of the process waits for a call into the driver, so none that only waits may be long.
_LONGEST_WAIT_SECONDS = 0.5
_MOST_EVENTS_AT_ONCE = 1000


def main(arguments: list[str]) -> int:
    """Read and write until SIGTERM, or until nobody reads any more. 1: there is no driver, or it is gone."""
    parser = argparse.ArgumentParser(prog="exporter.gpu.worker", description=__doc__)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--hostname", required=True)
    parser.add_argument("--job-mapping", type=Path)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s gpu: %(message)s")
    signal.signal(signal.SIGTERM, _leave)
    try:
        return _read(options, json.loads(sys.stdin.readline().strip() or "{}"))
    except BrokenPipeError:
        return 0


def _read(options: argparse.Namespace, remembered: dict[str, Any]) -> int:
    try:
        driver = Driver()
    except Exception as error:  # noqa: BLE001 - whatever it is, the page says it
        _write(up=False, reason=str(error) or repr(error), remember=remembered)
        return 1
    xids = None
    try:
        xids = Xids(driver, remembered.get("xids"))
        collector = Collector(
            driver, xids, remembered.get("collector"), hostname=options.hostname, job_mapping=options.job_mapping
        )
        _run(collector, xids, options.interval)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        # What has come since the last line is in it as well.
        remembered |= {"xids": xids.remember()} if xids else {}
        _write(up=False, reason=str(error) or repr(error), remember=remembered)
        return 1
    finally:
        driver.close()


def _run(collector: Collector, xids: Xids, interval: float) -> NoReturn:
    while True:
        due = time.monotonic() + interval
        families = collector.collect()
        _show(collector, xids, families)
        while (left := due - time.monotonic()) > 0:
            if xids.wait(min(left, _LONGEST_WAIT_SECONDS), time.time()):
                for _ in range(_MOST_EVENTS_AT_ONCE):
                    if not xids.wait(0.0, time.time()):
                        break
                _show(collector, xids, families)


def _show(collector: Collector, xids: Xids, families: Families) -> None:
    collector.add_events(families, time.time())
    remember = {"xids": xids.remember(), "collector": collector.remember()}
    _write(up=True, reason="", remember=remember, families=families.texts())


def _write(*, up: bool, reason: str, remember: dict[str, Any], families: dict[str, str] | None = None) -> None:
    line = {"up": up, "reason": reason, "families": families or {}, "remember": remember}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _leave(_: int, __: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
