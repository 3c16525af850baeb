"""Large weights that differ anywhere have different fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.engine.served_model import NUM_SAMPLES, weights_digest

SIZE = 24 * 2**20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(range(256)) * (SIZE // 256))
    return tmp_path


def change(file: Path, begin: int, length: int) -> None:
    with file.open("r+b") as content:
        content.seek(begin)
        content.write(b"\xff" * length)


@pytest.mark.parametrize("file", ["model-1.safetensors", "model-2.safetensors"])
@pytest.mark.parametrize("place", [0, 3 * 2**20, SIZE // 2, SIZE - 4 * 2**20, SIZE - 64 * 1024])
def test_a_tensor_that_changes_anywhere_is_seen(model: Path, file: str, place: int) -> None:
    before = weights_digest(model)
    assert weights_digest(model) == before
    change(model / file, place, 4 * SIZE // NUM_SAMPLES)
    assert weights_digest(model) != before


def test_what_is_no_weight_does_not_count_and_a_file_does(model: Path) -> None:
    before = weights_digest(model)
    (model / "README.md").write_text("hello")
    assert weights_digest(model) == before
    one = model / "model-1.safetensors"
    assert weights_digest(one) not in (before, weights_digest(model / "model-2.safetensors"))
    (model / "empty.safetensors").touch()
    assert weights_digest(model) != before


def test_few_bytes_of_a_large_file_are_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = model / "large.safetensors"
    with large.open("wb") as content:
        content.truncate(10 * 10**9)  # a sparse file takes no room on a disk
    read = 0

    class Counted:
        def __init__(self, file: Path) -> None:
            self.content = open(file, "rb", buffering=0)  # noqa: SIM115

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self.content.close()

        def seek(self, place: int) -> None:
            self.content.seek(place)

        def read(self, size: int) -> bytes:
            nonlocal read
            data = self.content.read(size) or b""
            read += len(data)
            return data

    monkeypatch.setattr("pathlib.Path.open", lambda self, *_, **__: Counted(self))
    weights_digest(large)
    assert read < 5 * 2**20
