"""The manifest: a checkpoint is real when it is there, and whole when every file is what it says."""

import hashlib
import os

import msgspec
import pytest
from tiers import flip

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.manifest import File, HashedFile, Manifest


@pytest.fixture
def folder(tmp_path):
    """A sealed checkpoint of two files."""
    folder, files = tmp_path / "step-000000040-001", {}
    folder.mkdir()
    for name, content in (("plain.pt", b"plain"), ("tensors", bytes(3_000_000))):
        with HashedFile(folder / name) as file:
            file.write(content)
        files[name] = file.entry
    sealed = Manifest(
        run="tiny", step=40, branch=1, kind="periodic", finite=True, created=1.0, files=files, torch="2.13"
    )  # fmt: skip
    manifest.seal(folder, sealed)
    return folder


def test_a_file_is_hashed_while_it_is_written(tmp_path):
    """Whatever it is given in whatever pieces, size and hash are those of the file that lies there in the end."""
    with HashedFile(tmp_path / "file") as file:
        assert [file.write(piece) for piece in (b"a" * 100_000, bytearray(b"bc"), memoryview(b"def")[::1], b"")] == [
            100_000,
            2,
            3,
            0,
        ]
    content = (tmp_path / "file").read_bytes()
    assert file.entry == File(bytes=100_005, sha256=hashlib.sha256(content).hexdigest())
    assert content.endswith(b"abcdef")
    assert file.closed


def test_a_sealed_folder_is_a_whole_checkpoint(folder):
    """What was sealed can be read, is named as its folder, and has no faults."""
    found = manifest.read(folder)
    assert found.name == folder.name
    assert found.files["tensors"].bytes == 3_000_000
    assert set(found.files) == {"plain.pt", "tensors"}
    assert manifest.faults(folder, found) == []


def cut(path):
    """Take the last byte off."""
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("hurt", [flip, cut, lambda path: path.unlink()], ids=["flipped", "truncated", "missing"])
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2, "writer": "pretraining-guard 9"}, "schema 2, written by pretraining-guard 9; this reads 1"),
        ({"schema": 2, "writer": ""}, "schema 2, written by an unnamed version; this reads 1"),
        ({"schema": 2, "writer": "two\nlines"}, "schema 2, written by an unnamed version; this reads 1"),
        ({"schema": 2, "writer": "x" * 1000}, "schema 2, written by an unnamed version; this reads 1"),
        ({"schema": ["2"]}, "its manifest is damaged, or another checkpoint's"),
        ({"step": 41}, "its manifest is damaged, or another checkpoint's"),
    ],
)
def test_why_a_manifest_is_not_read_is_one_line(folder, change, reason):
    """What wrote an unknown schema is told; what it says of itself is shown only if it is a short line."""
    fields = msgspec.json.decode((folder / manifest.NAME).read_bytes())
    (folder / manifest.NAME).write_bytes(msgspec.json.encode({**fields, **change}))
    assert manifest.read(folder) is None
    assert manifest.refusal(folder) == reason


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000], ids=["empty", "cut", "list", "deep"])
def test_a_damaged_manifest_is_none(folder, content):
    """A manifest that cannot be decoded is none."""
    (folder / manifest.NAME).write_bytes(content)
    assert manifest.read(folder) is None
    assert manifest.refusal(folder) == "its manifest is damaged"


def test_a_copy_is_whole_and_replaces_what_was_there(folder, tmp_path):
    """A copy is verified on arrival; what lay half-done in its place is gone, and drafts are not copied."""
    target = tmp_path / "shared" / folder.name
    target.mkdir(parents=True)
    (target / "leftover").touch()
    (folder / "stray").touch()
    copied = manifest.copy(folder, target, tier="shared")
    assert copied == manifest.read(target) == msgspec.structs.replace(manifest.read(folder), tier="shared")
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "plain.pt", "tensors"]
    assert manifest.faults(target, manifest.read(target)) == []


def test_a_damaged_source_does_not_become_a_copy(folder, tmp_path):
    """When the files do not arrive as the manifest says, nothing stays in the target."""
    flip(folder / "tensors")
    (tmp_path / "shared").mkdir()
    with pytest.raises(OSError, match="not what was written"):
        manifest.copy(folder, tmp_path / "shared" / folder.name, tier="shared")
    assert not (tmp_path / "shared" / folder.name).exists()


def test_no_checkpoint_cannot_be_copied(tmp_path):
    """A folder without a manifest has nothing to copy, and makes nothing."""
    with pytest.raises(OSError, match="no checkpoint"):
        manifest.copy(tmp_path, tmp_path / "target", tier="shared")
    assert not (tmp_path / "target").exists()


def test_of_a_link_only_the_link_is_removed(folder, tmp_path):
    """Whoever links an archived checkpoint into a tier keeps it whole when the tier has no more use for it."""
    link = tmp_path / "local" / folder.name
    link.parent.mkdir()
    link.symlink_to(folder)
    manifest.remove(link)
    assert not link.is_symlink()
    assert manifest.faults(folder, manifest.read(folder)) == []


@pytest.mark.timeout(10)
def test_a_pipe_is_waited_for_by_nobody(folder):
    """In the place of a file it is a fault, in that of the manifest there is no checkpoint, and neither is opened."""
    found = manifest.read(folder)
    (folder / "plain.pt").unlink()
    os.mkfifo(folder / "plain.pt")
    assert manifest.faults(folder, found) == [f"{folder / 'plain.pt'}: no regular file"]
    (folder / manifest.NAME).unlink()
    os.mkfifo(folder / manifest.NAME)
    assert manifest.read(folder) is None
    assert manifest.refusal(folder) == "its manifest is damaged"


def test_fields_that_came_later_are_no_other_schema(folder):
    """A manifest of before there were tier, proof and writer is read, and one with a field more than these as well."""
    path = folder / manifest.NAME
    told = msgspec.json.decode(path.read_bytes())
    later = ("tier", "proven", "probe_loss", "writer")
    for content in ({key: value for key, value in told.items() if key not in later}, {**told, "ranks": 2}):
        path.write_bytes(msgspec.json.encode(content))
        found = manifest.read(folder)
        assert (found.step, found.proven, found.probe_loss) == (40, False, None)
        assert manifest.faults(folder, found) == []


def test_a_name_that_no_file_can_have_is_a_fault(folder):
    """A manifest that names a file with a NUL in it is held against its checkpoint, and is no error."""
    found = manifest.read(folder)
    odd = msgspec.structs.replace(found, files={**found.files, "a\0b": File(bytes=1, sha256="0")})
    assert [problem.partition(": ")[2] for problem in manifest.faults(folder, odd)] == ["embedded null byte"]


def test_removing_what_is_gone_is_nothing(folder):
    """A checkpoint is removed with all its files; doing so again is no error."""
    manifest.remove(folder)
    manifest.remove(folder)
    assert not folder.exists()
