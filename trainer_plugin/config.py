"""`Config`: every option of guard.yaml, and its reader."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import yaml
from msgspec.structs import replace

from exporter.runs import valid_run_name
from trainer_plugin.checkpoints.retention import CheckpointsConfig
from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.policy.budget import BudgetConfig
from trainer_plugin.policy.decisions import ActionsConfig, Mode

# As NVML and dcgm-exporter spell it: series are joined by it.
_GPU_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class OptionsLoader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number, as YAML 1.2 and everybody who writes learning rates has it."""


OptionsLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`metrics:` of guard.yaml. Port 0 stands for any free one; `advertise` is the address told to Prometheus.

    A port in `advertise` that is `port` stands for the one that was had, should another job have that.
    Of several ranks on a host the first has this port and address, the next one the next port, and so on.

    Each layer's weights, updates and moments are read once in `layers_every` steps (0: never), with `activations` its
    largest activation too.

    `gpu_uuid` is the GPU on which this rank runs, as `nvidia-smi -L` has it (null: the one that torch tells of; not all
    its versions do). Each of several ranks is given its own, by a mapping in the place of a file that all of them read.
    """

    host: str = "127.0.0.1"
    port: int = 9401
    advertise: str | None = None
    layers_every: int = 50
    activations: bool = False
    gpu_uuid: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"`port` must be between 0 and 65535, found {self.port}")
        if self.layers_every < 0:
            raise ValueError(f"`layers_every` must be at least 0, found {self.layers_every}")
        if self.activations and not self.layers_every:
            raise ValueError("`activations` needs `layers_every` above 0")
        if self.gpu_uuid is not None and _GPU_UUID.fullmatch(self.gpu_uuid) is None:
            wanted = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx in small hexadecimal letters"
            raise ValueError(f"`gpu_uuid` must be {wanted}, found {self.gpu_uuid!r}")


class PullConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`pull:` of guard.yaml, for a job that shares no folder with the receiver: its address, and what it asks for.

    `ca_file` is for a receiver whose certificate no public CA has signed; `cert_file` and `key_file` are the job's own.
    """

    url: str | None = None
    bearer_token_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        if self.url is not None and re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", self.url) is None:
            raise ValueError(f"`url` must be http(s)://HOST:PORT, found {self.url!r}")
        if self.url is not None and self.bearer_token_file is None and self.cert_file is None:
            raise ValueError("`url` needs `bearer_token_file` or `cert_file`: commands are not told to strangers")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("`cert_file` and `key_file` are wanted together")


class RanksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ranks:` of guard.yaml. A rank that is silent for `timeout_seconds` ends the others (null: never)."""

    timeout_seconds: float | None = 600.0

    def __post_init__(self) -> None:
        if self.timeout_seconds is not None and not self.timeout_seconds >= 1.0:
            raise ValueError(f"`timeout_seconds` must be at least 1 or null, found {self.timeout_seconds}")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """guard.yaml. Every key is optional; relative folders are relative to the working directory of the job."""

    run: str = "gpt-0"
    runs: str = "runs"
    mode: Mode = "auto"
    metrics: MetricsConfig = MetricsConfig()
    detection: DetectionConfig = DetectionConfig()
    actions: ActionsConfig = ActionsConfig()
    budget: BudgetConfig = BudgetConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    recorder_steps: int = 2000
    pull: PullConfig = PullConfig()
    ranks: RanksConfig = RanksConfig()

    def __post_init__(self) -> None:
        if self.recorder_steps < 0:
            raise ValueError(f"`recorder_steps` must be at least 0, found {self.recorder_steps}")
        if self.run == "targets":
            raise ValueError("`run` must not be 'targets': that folder is for Prometheus")
        if not valid_run_name(self.run):
            raise ValueError(f"`run` must be letters, digits, '.', '_' or '-', found {self.run!r}")


def read_config(source: "str | Path | Mapping[str, Any] | Config", *, run: str | None = None) -> Config:
    """A Config from a YAML file's path, a mapping, or a Config; `run` replaces its run name.

    Raises:
        ValueError: in one line: where, which key, what was wanted, what was found.
        OSError: the file cannot be read.
    """
    if isinstance(source, Config):
        values: Any = msgspec.to_builtins(source)
        where = "config"
    elif isinstance(source, Mapping):
        values, where = dict(source), "config"
    else:
        where = str(source)
        try:
            values = yaml.load(Path(source).read_text(), Loader=OptionsLoader)  # noqa: S506 - a SafeLoader
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise ValueError(f"{where}: must be a mapping of options, found {type(values).__name__}")  # noqa: TRY004 - bad input
    if run is not None:
        values["run"] = run
    try:
        return msgspec.convert(values, type=Config)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {_explain(str(error), values)}") from error


def with_absolute_folders(config: Config) -> Config:
    """The same, with folders that a change of the working directory does not move."""
    tiers = config.checkpoints
    return replace(
        config,
        runs=str(Path(config.runs).absolute()),
        checkpoints=replace(tiers, local=str(Path(tiers.local).absolute()), shared=str(Path(tiers.shared).absolute())),
    )


def same_everywhere(config: Config) -> dict[str, Any]:
    """The options that all ranks of a job must have alike: all but folders and addresses, which are each host's own."""
    options: dict[str, Any] = msgspec.to_builtins(config)
    del options["runs"], options["checkpoints"]["local"], options["checkpoints"]["shared"]
    return {**options, "metrics": {"layers_every": config.metrics.layers_every}}


def _explain(message: str, values: Any) -> str:  # noqa: ANN401 - whatever the user wrote
    """What msgspec says, with the known keys added for an unknown one, and the value found for a wrong one."""
    what, _, path = message.partition(" - at `")
    if path.startswith("key` in "):
        return "every option's name must be text"
    keys = [key for key in path.rstrip("`").removeprefix("$").split(".") if key and not key.endswith("]")]
    section: Any = Config()
    for key in keys:
        section = getattr(section, key) if hasattr(getattr(section, key), "__struct_fields__") else section
    if "Invalid enum value" in what:
        known = get_args(get_type_hints(type(section))[keys[-1]])
        what = f"must be {', '.join(known[:-1])} or {known[-1]}"
    if "unknown field" in what:
        what = f"{what}; known are {', '.join(type(section).__struct_fields__)}"
        return f"{what} (in `{'.'.join(keys)}`)" if keys else what
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else values
    place = f"`{'.'.join(keys)}`: " if keys else ""
    return f"{place}{what}" if "found" in what else f"{place}{what}, found {values!r}"
