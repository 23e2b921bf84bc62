"""`python -m trainer_plugin`: the commands around a guarded training job."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_plugin.backtest.command import run_backtest
from trainer_plugin.backtest.notes import printable
from trainer_plugin.demo.scenarios import SCENARIOS

_DEMO_EXAMPLE = """example:
  python -m trainer_plugin demo --scenario sustained --json demo.json

exit code: 0 done, 1 it did not go as it must, 2 bad usage"""
_BACKTEST_EXAMPLE = """examples:
  python -m trainer_plugin backtest old.csv --plot old.png
  python -m trainer_plugin backtest logs/*.jsonl --config guard.yaml --json found.json
  python -m trainer_plugin backtest old.csv --sweep robust_score=6,8,10 --sweep drift_limit=5,6

A log is a CSV file, JSON lines, a trainer_state.json, Megatron's text, or a TensorBoard event file (or a folder of
one run's). Nothing is healed by it: the log goes on as it was.
exit code: 0 done, 2 bad usage, or a log that cannot be read"""


def cli(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    try:
        return _backtest(options) if options.command == "backtest" else _demo(options)
    except BrokenPipeError:  # Whoever read what was printed has seen enough.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the interpreter's last flush
        return 1
    except (ValueError, OSError) as error:
        print(f"trainer_plugin: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trainer_plugin: interrupted", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace) -> int:
    # Here, because torch takes seconds to import, and the other commands do without it.
    from trainer_plugin.demo.run import run_demo  # noqa: PLC0415
    from trainer_plugin.run_folder import RunInUseError  # noqa: PLC0415

    try:
        return run_demo(
            scenario_name=options.scenario,
            steps=options.steps,
            seed=options.seed,
            out=options.out,
            local_only=options.local_only,
            json_path=options.json,
            config_path=options.config,
        )
    except RunInUseError as error:
        raise ValueError(str(error)) from error


def _backtest(options: argparse.Namespace) -> int:
    return run_backtest(
        options.log,
        config_path=options.config,
        sweep=options.sweep,
        json_path=options.json,
        plot_path=options.plot,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_plugin", description="Commands around a guarded training job."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_backtest(commands)
    demo = commands.add_parser(
        "demo",
        help="train a small GPT on real text, break it, and watch it heal",
        description="Train a small GPT on the Python standard library's source, break it on purpose, and watch real "
        "Prometheus and Alertmanager heal it. Leaves a report and everything else in --out.",
        epilog=_DEMO_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--scenario", choices=sorted(SCENARIOS), default="sustained", help="what is broken (default: sustained)"
    )
    demo.add_argument("--steps", type=int, metavar="N", help="training steps (default: the scenario's own)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: 0)")
    demo.add_argument("--out", type=Path, metavar="DIR", help="a new folder for everything (default: demo-out/...)")
    demo.add_argument("--local-only", action="store_true", help="without Prometheus: the job's own policy acts")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    demo.add_argument("--config", type=Path, metavar="FILE", help="a guard.yaml over the demo's own options")
    return parser


def _add_backtest(commands: Any) -> None:  # noqa: ANN401 - argparse's own class has no public name
    backtest = commands.add_parser(
        "backtest",
        help="what the detectors would have said on old logs",
        description="Run the job's own detectors and policy over logs of earlier runs: what each detector would have "
        "said, which incidents there were, and what would have been done.",
        epilog=_BACKTEST_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    backtest.add_argument("log", nargs="+", metavar="LOG", help="a log of an earlier run")
    backtest.add_argument("--config", type=Path, metavar="FILE", help="a guard.yaml (default: the defaults)")
    backtest.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2,...",
        help="try each value of an option; several make every combination",
    )
    backtest.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    backtest.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .png, .svg or .pdf")


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
