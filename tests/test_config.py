"""guard.yaml: every way to give it, its defaults, and what is said of a mistake."""

import re

import msgspec
import pytest
import yaml

from trainer_plugin.config import Config, read_config

# The defaults that the contract shows; `scenes` is not there yet.
CONTRACT = """
run: gpt-0
runs: runs
mode: auto
metrics: {host: 127.0.0.1, port: 9401, advertise: null}
detection: {warmup_steps: 500, ema_alpha: 0.99, loss_ratio: 3.0, grad_norm_ratio: 10.0, window: 50, sigma: 3.5,
  sustained_steps: 200}
actions: {clip_max_norm: 1.0, lr_factor: 0.5, rollback_optimizer: restore, alert_grace_seconds: 30}
budget: {rollbacks_per_day: 3, same_target: 2, lr_floor: 0.1}
checkpoints: {local: checkpoints/local, shared: checkpoints/shared, every: 1000, keep_local: 2, keep_shared: 5}
"""
MISTAKES = [
    ({"rn": "a"}, "unknown field `rn`; known are run, runs, mode, metrics, detection, actions, budget, checkpoints"),
    (
        {"metrics": {"prt": 1}},
        "`prt`; known are host, port, advertise, layers_every, activations, gpu_uuid (in `metrics`)",
    ),
    ({"run": 7}, "`run`: Expected `str`, got `int`, found 7"),
    ({"metrics": {"port": "x"}}, "`metrics.port`: Expected `int`, got `str`, found 'x'"),
    ({"detection": {"window": 2.5}}, "`detection.window`: Expected `int`, got `float`, found 2.5"),
    ({"actions": {"clip_max_norm": "no"}}, "`actions.clip_max_norm`: Expected `float | null`, got `str`, found 'no'"),
    ({"metrics": None}, "`metrics`: Expected `object`, got `null`, found None"),
    ({"metrics": [1]}, "`metrics`: Expected `object`, got `array`, found [1]"),
    ({"metrics": 9401}, "`metrics`: Expected `object`, got `int`, found 9401"),
    ({"mode": "on"}, "`mode`: must be observe, assist or auto, found 'on'"),
    ({"mode": True}, "`mode`: Expected `str`, got `bool`, found True"),
    (
        {"actions": {"rollback_optimizer": "forget"}},
        "`actions.rollback_optimizer`: must be restore, reset or keep, found 'forget'",
    ),
    ({"run": "a/b"}, "`run` must be letters, digits, '.', '_' or '-', found 'a/b'"),
    ({"metrics": {"port": 65_536}}, "`metrics`: `port` must be between 0 and 65535, found 65536"),
    ({"metrics": {"gpu_uuid": "0"}}, "`metrics`: `gpu_uuid` must be GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx in small"),
    ({"metrics": {"gpu_uuid": "GPU-8F6A0B1C-1111-2222-3333-444444444444"}}, "letters, found 'GPU-8F6A0B1C-"),
    ({"detection": {"window": 0}}, "`detection`: `window` must be at least 1, found 0"),
    ({"detection": {"sustained_steps": 0}}, "`sustained_steps` must be at least 1, found 0"),
    ({"detection": {"warmup_steps": -1}}, "`warmup_steps` must be at least 0, found -1"),
    ({"detection": {"ema_alpha": 1.0}}, "`ema_alpha` must be between 0 and 1, found 1.0"),
    ({"detection": {"ema_alpha": float("nan")}}, "`ema_alpha` must be between 0 and 1, found nan"),
    ({"detection": {"loss_ratio": 1.0}}, "`loss_ratio` must be above 1, found 1.0"),
    ({"detection": {"loss_ratio": float("nan")}}, "`loss_ratio` must be above 1, found nan"),
    ({"detection": {"sigma": float("nan")}}, "`sigma` must be above 0, found nan"),
    ({"detection": {"robust_score": 0}}, "`robust_score` must be above 0, found 0"),
    ({"actions": {"clip_max_norm": 0.0}}, "`actions`: `clip_max_norm` must be above 0 or null, found 0.0"),
    ({"actions": {"clip_max_norm": float("nan")}}, "`clip_max_norm` must be above 0 or null, found nan"),
    (
        {"actions": {"suspect_data": "drop"}},
        "`actions.suspect_data`: must be skip or reweight, found 'drop'",
    ),
    ({"actions": {"suspect_weight": 0.0}}, "`suspect_weight` must be between 0 and 1, found 0.0"),
    ({"actions": {"lr_factor": 1.0}}, "`lr_factor` must be between 0 and 1, found 1.0"),
    ({"actions": {"alert_grace_seconds": -1}}, "`alert_grace_seconds` must be at least 0, found -1"),
    ({"actions": {"alert_grace_seconds": float("nan")}}, "`alert_grace_seconds` must be at least 0, found nan"),
    ({"budget": {"rollbacks_per_day": -1}}, "`budget`: `rollbacks_per_day` must be at least 0, found -1"),
    ({"budget": {"lr_floor": 0.0}}, "`lr_floor` must be above 0 and at most 1, found 0.0"),
    ({"checkpoints": {"every": 0}}, "`checkpoints`: `every` must be at least 1, found 0"),
    ({"checkpoints": {"local": "a", "shared": "./a"}}, "`local` and `shared` must be two folders, found 'a' twice"),
    ({7: 1}, "every option's name must be text"),
    ({"metrics": {True: 1}}, "every option's name must be text"),
]


def part_of(shown, whole):
    """Whether every key shown has its value in the whole."""
    return all(part_of(value, whole[key]) if isinstance(value, dict) else whole[key] == value
               for key, value in shown.items())  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """Write guard.yaml; return its path."""

    def write(content):
        path = tmp_path / "guard.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_defaults_are_those_of_the_contract():
    """Every key that the contract shows has the default that it shows."""
    assert part_of(yaml.safe_load(CONTRACT), msgspec.to_builtins(Config()))


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "{}", "null"])
def test_an_empty_file_gives_the_defaults(write, content):
    """A file without a key is valid."""
    assert read_config(write(content)) == Config()


def test_a_path_a_text_a_mapping_and_a_config_give_the_same(write):
    """The options may come as a file's path, as its name, as a mapping, or as a Config."""
    path = write("mode: observe\nmetrics: {port: 0}\nactions: {clip_max_norm: null, alert_grace_seconds: 5}\n")
    config = read_config(path)
    assert (config.mode, config.metrics.port, config.actions.clip_max_norm) == ("observe", 0, None)
    mapping = {
        "mode": "observe", "metrics": {"port": 0}, "actions": {"clip_max_norm": None, "alert_grace_seconds": 5}
    }  # fmt: skip
    assert read_config(str(path)) == read_config(mapping) == read_config(config) == config


def test_the_run_given_beats_the_files(write):
    """The run's name may be given apart, and is checked like the file's; what was handed over stays as it was."""
    mapping = {"run": "a"}
    assert read_config(mapping, run="b").run == read_config(Config(), run="b").run == "b"
    assert read_config(write("run: a"), run="b").run == "b"
    assert mapping == {"run": "a"}
    with pytest.raises(ValueError, match="`run` must be letters"):
        read_config(mapping, run="../b")


@pytest.mark.parametrize(("options", "wanted"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_told_in_one_line(options, wanted):
    """The path of the option, what was wanted and what was found; unknown keys with the known ones."""
    with pytest.raises(ValueError, match=re.escape(wanted)) as caught:
        read_config(options)
    assert str(caught.value).startswith("config: ")
    assert "\n" not in str(caught.value)


def test_a_mistake_in_a_file_names_the_file(write):
    """The file's name stands at the beginning of the line."""
    path = write("detection:\n  sigmma: 3\n")
    with pytest.raises(ValueError, match="unknown field `sigmma`") as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("content", ["run: [", "a: b: c", "\tx: 1", b"run: \xff\xfe", "run: &a *b", "a\0b"])
def test_what_is_not_yaml_is_said_to_be_none(write, content):
    """A file that cannot be parsed is refused in one line with its name."""
    path = write(content)
    with pytest.raises(ValueError, match="not YAML: ") as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "found"), [("- run\n- b\n", "list"), ("run", "str"), ("7", "int")])
def test_a_file_that_is_no_mapping_is_refused(write, content, found):
    """A list or a bare word is told apart from options."""
    with pytest.raises(ValueError, match=f"must be a mapping of options, found {found}"):
        read_config(write(content))


def test_a_missing_file_keeps_its_own_error(tmp_path):
    """No file, or a folder in its place, is the system's own error, which names the path."""
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(OSError, match=re.escape(str(path))):
            read_config(path)
