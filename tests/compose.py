"""docker-compose.yml as Compose itself reads it, and its services as processes of this machine."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools import ROOT, programs_of

FILE = ROOT / "docker-compose.yml"


def services() -> dict[str, dict[str, Any]]:
    """Every service, the `gpu` profile's too, with what Compose fills in."""
    program = programs_of("compose-trixie").parent / "libexec/docker/cli-plugins/docker-compose"
    command = [program, "--file", FILE, "--profile", "gpu", "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    return read


def mounts(service: Mapping[str, Any]) -> dict[str, Path]:
    """The host's files and folders that a service sees, by their places in the container."""
    return {each["target"]: Path(each["source"]) for each in service["volumes"] if each["type"] == "bind"}


def on_this_machine(text: str, places: Mapping[str, str | Path], addresses: Mapping[str, str]) -> str:
    """A command line or a configuration with the paths and addresses that hold outside of a container."""
    for place in sorted(places, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.]){re.escape(place)}(?![\w])", str(places[place]), text)
    for address, here in addresses.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(address)}(?!\d)", here, text)
    return text
