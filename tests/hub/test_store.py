"""Models in the hub's cache, filled from a local replacement of the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from appliance.errors import ModelError
from appliance.hub import remote, store
from appliance.hub.hashes import find_damaged, known_hashes, known_hashes_of
from appliance.hub.packaged import PACKAGED
from appliance.hub.remote import HubName

OLD, NEW = "0" * 40, "1" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two revisions of a folder that share a file, and two GGUF files."""
    hub = tmp_path / "hub"
    monkeypatch.setattr(store, "hub_cache", lambda: hub)
    assert remote.folder_name("org/model") == "models--org--model"
    for commit, weights in ((OLD, b"old weights"), (NEW, b"new weights")):
        link(hub / "models--org--model", commit, "config.json", b"{}")
        link(hub / "models--org--model", commit, "model.safetensors", weights)
    name(hub / "models--org--model", "main", NEW)
    link(hub / "models--org--gguf", NEW, "a-Q4_0.gguf", b"GGUF a")
    link(hub / "models--org--gguf", NEW, "sub/b-Q8_0.gguf", b"GGUF b, longer")
    name(hub / "models--org--gguf", "main", NEW)
    return hub


def link(folder: Path, commit: str, file: str, content: bytes) -> None:
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    path = folder / "snapshots" / commit / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(blob)


def name(folder: Path, ref: str, commit: str) -> None:
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/model", HubName("org/model")),
        ("org/model@v1.0", HubName("org/model", "v1.0")),
        ("org/model@refs/pr/3", HubName("org/model", "refs/pr/3")),
        ("org/m.x:sub/a.gguf", HubName("org/m.x", None, "sub/a.gguf")),
        ("org/model@main:a.gguf", HubName("org/model", "main", "a.gguf")),
        ("model", None),
        ("./a.gguf", None),
        ("org/a.gguf", None),
        ("org/model@", None),
        ("org/model@a/../../../b", None),
    ],
)
def test_names_of_the_hub(text: str, expected: HubName | None) -> None:
    assert HubName.parse(text) == expected
    assert expected is None or str(expected) == text


def test_what_is_kept_has_the_name_that_serves_it(cache: Path, tmp_path: Path) -> None:
    packaged = tmp_path / "models" / PACKAGED["smollm2-135m"].filename
    packaged.parent.mkdir()
    packaged.write_bytes(b"GGUF, cut off")
    kept = {model.name: model for model in store.kept_models(tmp_path)}
    assert set(kept) == {
        "org/model", f"org/model@{OLD}", "org/gguf:a-Q4_0.gguf", "org/gguf:sub/b-Q8_0.gguf",
        "smollm2-135m",
    }  # fmt: skip
    assert kept["org/model"].num_bytes == len(b"{}") + len(b"new weights")
    assert [name for name, model in kept.items() if not model.complete] == ["smollm2-135m"]
    assert all(HubName.parse(one) for one in kept if "/" in one)


def test_a_name_may_leave_out_what_is_clear(cache: Path, tmp_path: Path) -> None:
    def found(wanted: str) -> str:
        return store.find_kept(wanted, tmp_path).name

    assert found("org/model") == "org/model", "main, though there is an older one"
    assert found("org/model@000") == f"org/model@{OLD}"
    assert found("org/gguf:a-Q4_0.gguf") == "org/gguf:a-Q4_0.gguf"
    with pytest.raises(ModelError, match=r"is several models; name one of org/gguf:"):
        found("org/gguf")
    with pytest.raises(ModelError, match="is not among the downloaded models; here are"):
        found("org/none")


def test_a_file_goes_with_the_last_model_that_needs_it(cache: Path, tmp_path: Path) -> None:
    folder = cache / "models--org--model"
    freed = store.remove_kept(store.find_kept(f"org/model@{OLD}", tmp_path))
    assert freed == len(b"old weights")
    left = {blob.read_bytes() for blob in (folder / "blobs").iterdir()}
    assert left == {b"{}", b"new weights"}
    assert store.find_kept("org/model", tmp_path).num_bytes == 13
    store.remove_kept(store.find_kept("org/model", tmp_path))
    assert not folder.exists()
    assert (cache / "models--org--gguf").exists()


def test_one_gguf_file_of_several_is_removed(cache: Path, tmp_path: Path) -> None:
    assert store.remove_kept(store.find_kept("org/gguf:a-Q4_0.gguf", tmp_path)) == 6
    assert store.find_kept("org/gguf", tmp_path).name == "org/gguf:sub/b-Q8_0.gguf"


def test_parts_of_a_model_are_one(cache: Path, tmp_path: Path) -> None:
    folder = cache / "models--org--gguf"
    parts = [f"sub/big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, part in enumerate(parts):
        link(folder, NEW, part, b"GGUF" + bytes(10 + number))
    kept = store.find_kept(f"org/gguf:{parts[1]}", tmp_path)
    assert (kept.name, kept.num_bytes, kept.complete) == (f"org/gguf:{parts[0]}", 29, True)
    expected = known_hashes_of(kept.files)
    assert [file.name for file in expected] == [part.removeprefix("sub/") for part in parts]
    assert known_hashes(kept.files[0]) == expected
    assert len(store.kept_models(tmp_path)) == 5
    kept.files[1].unlink()
    assert not store.find_kept(f"org/gguf:{parts[0]}", tmp_path).complete
    link(folder, NEW, parts[1], b"GGUF" + bytes(11))
    assert store.remove_kept(store.find_kept(f"org/gguf:{parts[0]}", tmp_path)) == 29
    assert len(store.kept_models(tmp_path)) == 4


def test_a_projector_belongs_to_the_models_beside_it(cache: Path, tmp_path: Path) -> None:
    folder = cache / "models--org--gguf"
    link(folder, NEW, "mmproj-F16.gguf", b"GGUF, a tower")
    link(folder, NEW, "mmproj-F32.gguf", b"GGUF, a larger tower")
    kept = {model.name: model for model in store.kept_models(tmp_path)}
    assert {name for name in kept if "gguf" in name} == {
        "org/gguf:a-Q4_0.gguf", "org/gguf:sub/b-Q8_0.gguf", "org/gguf:mmproj-F32.gguf",
    }  # fmt: skip
    model = kept["org/gguf:a-Q4_0.gguf"]
    assert [file.name for file in model.files] == ["a-Q4_0.gguf", "mmproj-F16.gguf"]
    assert model.num_bytes == len(b"GGUF a") + len(b"GGUF, a tower")
    assert known_hashes(model.files[0]) == known_hashes_of(model.files)
    assert store.remove_kept(model) == len(b"GGUF a"), "the other model needs it"
    other = store.find_kept("org/gguf:sub/b-Q8_0.gguf", tmp_path)
    assert store.remove_kept(other) == len(b"GGUF b, longer") + len(b"GGUF, a tower")
    store.remove_kept(store.find_kept("org/gguf", tmp_path))
    assert not folder.exists()


def test_a_draft_head_belongs_to_the_models_beside_it(cache: Path, tmp_path: Path) -> None:
    folder = cache / "models--org--gguf"
    parts = [f"mtp-a-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        link(folder, NEW, part, f"GGUF {part}".encode())
    kept = {model.name: model for model in store.kept_models(tmp_path)}
    assert {name for name in kept if "gguf" in name} == {
        "org/gguf:a-Q4_0.gguf", "org/gguf:sub/b-Q8_0.gguf",
    }  # fmt: skip
    for model in (kept["org/gguf:a-Q4_0.gguf"], kept["org/gguf:sub/b-Q8_0.gguf"]):
        assert [file.name for file in model.files[1:]] == parts
        assert known_hashes(model.files[0]) == known_hashes_of(model.files)
        assert all(one in known_hashes(model.files[0]) for one in model.files)
        store.remove_kept(model)
    assert not folder.exists()


def test_what_broke_off_is_listed_and_can_be_removed(cache: Path) -> None:
    blobs = cache / "models--org--cut" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(bytes(100))
    (download,) = store.unfinished_downloads()
    assert (download.repo, download.num_bytes) == ("org/cut", 100)
    assert store.remove_unfinished(download) == 100
    assert not blobs.parent.exists()


def test_a_changed_file_is_found(cache: Path, tmp_path: Path) -> None:
    model = store.find_kept("org/model", tmp_path)
    expected = known_hashes_of(model.files)
    assert len(expected) == 2
    assert find_damaged(expected) == []
    weights = next(file for file in model.files if file.suffix == ".safetensors")
    weights.resolve().write_bytes(b"new weightz")
    assert find_damaged(expected) == [weights]
