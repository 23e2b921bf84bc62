"""The manifest: a checkpoint is real when it is there, and whole when every file is what it says."""

import msgspec
import pytest

from trainer_plugin import manifest
from trainer_plugin.manifest import File, Manifest


def describe(files: dict[str, File]) -> Manifest:
    """A manifest of step 40."""
    return Manifest(
        run="tiny", step=40, branch=1, kind="periodic", finite=True, created=1.0, files=files, torch="2.13"
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A sealed checkpoint of two files."""
    folder = tmp_path / "step-000000040-001"
    folder.mkdir()
    (folder / "plain.pt").write_bytes(b"plain")
    (folder / "tensors").write_bytes(bytes(3_000_000))
    manifest.seal(folder, describe)
    return folder


def test_a_sealed_folder_is_a_whole_checkpoint(folder):
    """What was sealed can be read, is named as its folder, and has no faults."""
    found = manifest.read(folder)
    assert found.name == folder.name
    assert found.files["tensors"].bytes == 3_000_000
    assert set(found.files) == {"plain.pt", "tensors"}
    assert manifest.faults(folder, found) == []


def damage_bit(path):
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    """Take the last byte off."""
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("hurt", [damage_bit, cut, lambda path: path.unlink()], ids=["flipped", "truncated", "missing"])
@pytest.mark.parametrize("name", ["plain.pt", "tensors"])
def test_any_damage_is_found_and_named(folder, name, hurt):
    """One flipped bit, one missing byte or a missing file is a fault with the file's path in it."""
    hurt(folder / name)
    (problem,) = manifest.faults(folder, manifest.read(folder))
    assert str(folder / name) in problem


def test_a_folder_without_a_manifest_is_no_checkpoint(folder):
    """Without the manifest nothing in the folder counts."""
    (folder / manifest.NAME).unlink()
    assert manifest.read(folder) is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"step": 41},
        {"files": {"../elsewhere": File(bytes=1, sha256="0")}},
    ],
    ids=["schema", "name", "path"],
)
def test_a_manifest_that_does_not_fit_is_none(folder, change):
    """Another schema, another folder's manifest, or a file outside the folder is not read as a checkpoint."""
    found = manifest.read(folder)
    (folder / manifest.NAME).write_bytes(msgspec.json.encode(msgspec.structs.replace(found, **change)))
    assert manifest.read(folder) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_a_damaged_manifest_is_none(folder, content):
    """A manifest that cannot be decoded is none."""
    (folder / manifest.NAME).write_bytes(content)
    assert manifest.read(folder) is None


def test_a_copy_is_whole_and_replaces_what_was_there(folder, tmp_path):
    """A copy is verified on arrival; what lay half-done in its place is gone, and drafts are not copied."""
    target = tmp_path / "shared" / folder.name
    target.mkdir(parents=True)
    (target / "leftover").touch()
    (folder / "stray").touch()
    assert manifest.copy(folder, target) == manifest.read(folder)
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "plain.pt", "tensors"]
    assert manifest.faults(target, manifest.read(target)) == []


def test_a_damaged_source_does_not_become_a_copy(folder, tmp_path):
    """When the files do not arrive as the manifest says, nothing stays in the target."""
    damage_bit(folder / "tensors")
    with pytest.raises(OSError, match="not what was written"):
        manifest.copy(folder, tmp_path / "shared" / folder.name)
    assert not (tmp_path / "shared" / folder.name).exists()


def test_no_checkpoint_cannot_be_copied(tmp_path):
    """A folder without a manifest has nothing to copy, and makes nothing."""
    with pytest.raises(OSError, match="no checkpoint"):
        manifest.copy(tmp_path, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_manifest_is_removed_first(folder, tmp_path):
    """A removal that fails half-way leaves no checkpoint behind."""
    link = tmp_path / "link"
    link.symlink_to(folder)  # A tree behind a link is not removed.
    with pytest.raises(OSError, match="link"):
        manifest.remove(link)
    assert manifest.read(folder) is None
    assert (folder / "tensors").exists()


def test_removing_what_is_gone_is_nothing(folder):
    """A checkpoint is removed with all its files; doing so again is no error."""
    manifest.remove(folder)
    manifest.remove(folder)
    assert not folder.exists()
