"""`python -m exporter`: GPU metrics and the webhook receiver, and the rules out of the installed package.

It shows this host's GPUs to Prometheus, takes alerts from Alertmanager and puts commands into the inboxes of the runs.
Settings come from exporter.yaml; an argument beats the file. Exit code 0: done, 1: the work failed, 2: bad usage or
settings.
"""

import argparse
import logging
import os
import ssl
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import msgspec

from exporter.access import NOBODY_ASKED, Credentials, read_credentials, tls_context
from exporter.config import Address, Config, Receiver, load, refuse_unsafe
from exporter.files import packaged_files, write_files
from exporter.gpu.endpoint import GpuEndpoint, is_wanted, wait_for_the_end

logger = logging.getLogger("exporter")

_EXAMPLE = """example:
  python -m exporter --config exporter.yaml
  python -m exporter --runs /shared/runs --listen 127.0.0.1:9402
  python -m exporter files --out monitoring
"""
_FILES_EXAMPLE = """example:
  python -m exporter files --out monitoring    # writes monitoring/alert_rules/* and monitoring/grafana_dashboards/*
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def cli(*arguments: str) -> int:
    """Run the command line and return its exit code."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:  # --help, or bad usage.
        return end.code if isinstance(end.code, int) else 2
    if options.command == "files":
        return _files(options.out, options.job_runs)
    try:
        config = _settings(options)
        receiver = _receiver(config)
        credentials = read_credentials(receiver) if receiver is not None else None
        tls = tls_context(receiver.tls) if receiver is not None else None
    except ValueError as error:
        return _fail(2, error)
    return _serve(config, receiver, credentials, tls)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m exporter",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="settings, as YAML; without it the defaults hold")
    parser.add_argument("--runs", metavar="DIR", help="the folder that holds the runs' folders (default: runs)")
    parser.add_argument("--listen", metavar="HOST:PORT", help="the receiver's address (default: 127.0.0.1:9402)")
    commands = parser.add_subparsers(dest="command", metavar="files")
    files = commands.add_parser(
        "files",
        help="write rules, dashboards and example configurations out of the installed package",
        description="Write the rules and example configurations (for Kubernetes and Slurm too) to DIR/alert_rules, and "
        "the dashboards to DIR/grafana_dashboards, all or none: nothing where a file is there already and differs.",
        epilog=_FILES_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files.add_argument("--out", metavar="DIR", type=Path, required=True, help="where to make these folders")
    files.add_argument(
        "--runs", dest="job_runs", metavar="DIR", type=Path, default=Path("runs"),
        help="the folder of the runs, where prometheus.yml shall look for targets (default: runs)",
    )  # fmt: skip
    return parser


def _settings(options: argparse.Namespace) -> Config:
    """The file's settings with the arguments over them."""
    config = load(options.config)
    if options.runs is not None:
        config = msgspec.structs.replace(config, runs=options.runs)
    if options.listen is not None:
        receiver = Receiver() if isinstance(config.receiver, str) else config.receiver
        try:
            receiver = msgspec.structs.replace(receiver, listen=Address(options.listen))
        except ValueError as error:
            raise ValueError(f"--listen: {error}") from error
        config = msgspec.structs.replace(config, receiver=receiver)
    return config


def _receiver(config: Config) -> Receiver | None:
    """The receiver's settings; None where there is to be none.

    Raises:
        ValueError: they would leave it open, or leave nothing to serve.
    """
    if isinstance(config.receiver, str):
        if isinstance(config.gpu, str):
            raise ValueError("receiver: it is off, and so is gpu: nothing to serve")  # noqa: TRY004 - its value is at fault
        return None
    refuse_unsafe(config.receiver)
    return config.receiver


def _serve(
    config: Config, receiver: Receiver | None, credentials: Credentials | None, tls: ssl.SSLContext | None
) -> int:
    missing = _missing() if receiver is not None else None
    if missing is not None:
        return _fail(1, f"{missing} is not installed: pip install 'pretraining-guard[receiver]'")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    with ExitStack() as undo:
        if not isinstance(config.gpu, str) and is_wanted(config):
            try:
                # Kubernetes tells a pod its node's name that way, and dcgm-exporter reads the same.
                gpu = GpuEndpoint(config.gpu, node_name=os.environ.get("NODE_NAME"))
            except (OSError, UnicodeError) as error:
                refused = f"gpu.listen: {config.gpu.listen}: {_reason(error)}"
                if receiver is None or config.gpu.mode == "always":
                    return _fail(1, refused)
                # A dcgm-exporter is usually there: no reason to be no receiver.
                logger.warning("no GPU metrics: %s", refused)
            else:
                undo.callback(gpu.close)
                gpu.start()
                print(f"GPU metrics on {gpu.url}", flush=True)
        if receiver is not None:
            return _receive(config, receiver, credentials, tls)
        wait_for_the_end()
        return 0


def _missing() -> str | None:
    """What the receiver needs and is not installed: the job's machine may have the package without the extra."""
    return next((name for name in ("uvicorn", "starlette") if find_spec(name) is None), None)


def _receive(config: Config, receiver: Receiver, credentials: Credentials | None, tls: ssl.SSLContext | None) -> int:
    # Here, because they need what `files` and GPU metrics must do without.
    from exporter.server import listen, serve  # noqa: PLC0415
    from exporter.webhook import build_app  # noqa: PLC0415

    try:
        listener = listen(receiver.listen)
    except (OSError, UnicodeError) as error:
        return _fail(1, f"receiver.listen: {receiver.listen}: {_reason(error)}")
    if credentials and tls is None and not receiver.listen.is_loopback():
        logger.warning("receiver.listen: %s without TLS: whoever is on the way can read the secret", receiver.listen)
    if not Path(config.runs).is_dir():
        logger.warning("runs: %s is not there yet: until a job makes it, no alert finds its run", config.runs)
    app = build_app(
        Path(config.runs),
        credentials=credentials or NOBODY_ASKED,
        pull=bool(credentials) or receiver.tls.client_ca_file is not None,
        stale_after_seconds=receiver.stale_after_seconds,
    )
    with listener:
        serve(app, listener, tls=tls)
    return 0


def _reason(error: OSError | UnicodeError) -> str:
    """Why an address can't be had; a UnicodeError is a host that no name server would take."""
    return str(error.strerror).partition(" (while")[0] if isinstance(error, OSError) else "no host name"


def _files(out: Path, runs: Path) -> int:
    try:
        for path in write_files(out, packaged_files(runs=runs)):
            print(path)
    except (OSError, ModuleNotFoundError) as error:
        return _fail(1, error)
    return 0


def _fail(code: int, error: object) -> int:
    print(f"python -m exporter: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(cli(*sys.argv[1:]))
