"""`python -m trainer_plugin`: the commands around a guarded training job."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_plugin.demo.run import run_demo
from trainer_plugin.demo.scenarios import SCENARIOS
from trainer_plugin.run_folder import RunInUseError

_DEMO_EXAMPLE = """example:
  python -m trainer_plugin demo --scenario sustained --json demo.json

exit code: 0 done, 1 it did not go as it must, 2 bad usage"""


def cli(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
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
    except (ValueError, RunInUseError) as error:
        print(f"trainer_plugin: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"trainer_plugin: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trainer_plugin: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_plugin", description="Commands around a guarded training job."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
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


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
