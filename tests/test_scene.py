"""The spike scene on disk: plain JSON with every number in it, and no other version's is taken for ours."""

import json
import math

import msgspec
import pytest

from trainer_plugin.scenes import scene
from trainer_plugin.scenes.scene import Scene, factory_name, plain_signals
from trainer_plugin.signals import LayerReading, Signals

READING = LayerReading(
    weight_norm=3.0, update_ratio=None, first_moment_norm=0.1, second_moment_norm=math.inf, activation_max=None
)
SIGNALS = Signals(
    step=9,
    loss=math.nan,
    grad_norm=math.inf,
    layer_grad_norms={"wte": 1.5, "blocks.0": -math.inf},
    learning_rates=(0.1, 0.2),
    sample_ids=("a", "b"),
    layers={"wte": READING},
)


def made(**changes) -> Scene:
    """A scene of step 9."""
    fields = {
        "run": "tiny", "step": 9, "weights_step": 8, "steps_total": 12, "branch": 1, "created": 1e9, "incident": 2,
        "class_": "numerical", "evidence": ["loss is NaN"], "steps": [plain_signals(SIGNALS)], "positions": [8],
        "batches": 1, "batches_left_out": "", "torch": "2.13",
    }  # fmt: skip
    return Scene(**{**fields, **changes})


def test_a_scene_comes_back_as_it_was_written(tmp_path):
    """What is written is read again, equal in every field."""
    scene.write(tmp_path, made())
    assert scene.read(tmp_path) == made()


def test_it_is_strict_json_with_every_number_in_it(tmp_path):
    """NaN and the infinities are texts that float() reads; layers, ids and rates are there under their names."""
    scene.write(tmp_path, made())
    told = json.loads((tmp_path / "scene.json").read_text(), parse_constant=pytest.fail)
    (step,) = told["steps"]
    assert (told["schema"], told["class"], told["weights_step"]) == (1, "numerical", 8)
    assert math.isnan(float(step["loss"]))
    assert float(step["grad_norm"]) == math.inf
    assert step["layer_grad_norms"] == {"wte": 1.5, "blocks.0": "-inf"}
    assert step["layers"]["wte"]["second_moment_norm"] == "inf"
    assert (step["sample_ids"], step["learning_rates"]) == (["a", "b"], [0.1, 0.2])
    assert set(step) == set(Signals.__struct_fields__)


@pytest.mark.parametrize("text", ["train", "train:", ":build", "train.py:build()", "a b:c", "../train:build"])
def test_a_factory_is_named_as_module_and_function(text):
    """Found out at the start, not when a scene is replayed; none is fine too."""
    assert factory_name("") == ""
    assert factory_name("package.train:Job.build") == "package.train:Job.build"
    with pytest.raises(ValueError, match="`module:function` wanted"):
        factory_name(text)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": 3}', b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_scene_is_none(tmp_path, content):
    """Rubbish in the file's place is not read."""
    (tmp_path / "scene.json").write_bytes(content)
    assert scene.read(tmp_path) is None


def test_another_versions_scene_is_none(tmp_path):
    """A schema that this does not know is not guessed at; nor is a folder read as a file."""
    scene.write(tmp_path, msgspec.structs.replace(made(), schema=99))
    assert scene.read(tmp_path) is None
    (tmp_path / "scene.json").unlink()
    (tmp_path / "scene.json").mkdir()
    assert scene.read(tmp_path) is None
