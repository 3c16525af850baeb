"""Files with every tensor in its place, in whatever order tensors arrive."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.run.shard_writer import ShardWriter, TensorLayout, split_into_shards

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]
layouts = st.lists(
    st.builds(
        lambda dtype, shape: (dtype, tuple(shape)),
        st.sampled_from(DTYPES),
        st.lists(st.integers(1, 5), min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=6,
).map(lambda items: [TensorLayout(f"t{i}", *item) for i, item in enumerate(items)])


def values(layout: TensorLayout) -> torch.Tensor:
    numbers = torch.arange(layout.nbytes // layout.dtype.itemsize) + ord(layout.name[-1])
    return numbers.to(layout.dtype).view(layout.shape)


@given(layouts, st.integers(1, 200), st.randoms(use_true_random=False))
@settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(
    tmp_path: Path, layouts: list[TensorLayout], max_bytes: int, random: object
) -> None:
    for old in tmp_path.iterdir():
        old.unlink()
    order = list(layouts)
    random.shuffle(order)  # type: ignore[attr-defined]
    with ShardWriter(tmp_path, layouts, max_bytes) as writer:
        for layout in order:
            assert writer.write(layout.name, torch.split(values(layout), 2)) == layout.nbytes
    (tmp_path / "config.json").write_text("{}")
    folder = SafetensorsFolder(tmp_path)
    assert sorted(folder.tensor_names()) == sorted(layout.name for layout in layouts)
    for layout in layouts:
        assert torch.equal(folder.load(layout.name), values(layout))
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as independent:
            for name in independent.keys():  # noqa: SIM118 - not a mapping
                layout = next(layout for layout in layouts if layout.name == name)
                assert torch.equal(independent.get_tensor(name), values(layout))


@given(layouts, st.integers(1, 200))
@settings(derandomize=True)
def test_shards_keep_the_order_and_the_limit(layouts: list[TensorLayout], max_bytes: int) -> None:
    shards = split_into_shards(layouts, max_bytes)
    assert [layout for shard in shards for layout in shard] == layouts
    for shard in shards:
        assert len(shard) == 1 or sum(layout.nbytes for layout in shard) <= max_bytes


def test_several_files_have_an_index(tmp_path: Path) -> None:
    layouts = [TensorLayout(name, torch.float32, (4,)) for name in "abc"]
    with ShardWriter(tmp_path, layouts, 32) as writer:
        for layout in layouts:
            writer.write(layout.name, [torch.zeros(4)])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }


def test_the_space_is_taken_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        ShardWriter(tmp_path, [TensorLayout("a", torch.float32, (4,))], 100)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(5), torch.zeros(3), torch.zeros(4, dtype=torch.float16)]
)
def test_a_tensor_that_is_not_as_announced_is_a_mistake(
    tmp_path: Path, wrong: torch.Tensor
) -> None:
    layouts = [TensorLayout("a", torch.float32, (4,))]
    with pytest.raises(AssertionError), ShardWriter(tmp_path, layouts, 100) as writer:
        writer.write("a", [wrong])


def test_a_tensor_that_never_came_is_a_mistake(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, [TensorLayout("a", torch.float32, (4,))], 100)
    with pytest.raises(AssertionError, match="not written"), writer:
        pass
