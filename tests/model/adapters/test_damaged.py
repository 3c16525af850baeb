"""Damaged adapters are refused with our errors, or read as PEFT's own loader reads them."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.gguf.gguf_models import gguf_factors, write_gguf_adapter
from support.models.lora import write_adapter

from appliance.errors import ApplianceError
from appliance.model.adapters.reader import read_adapter
from appliance.model.adapters.targets import adapter_targets
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.adapters.adapter import Adapter
    from appliance.model.source import ModelSource

SEEDS = range(40)
JUNK: list[Any] = [
    None, True, -1, 0, 1.5, 2**40, 1e400, float("nan"), "", "x", "\0" * 9, "(" * 99, "(a+)+$",
    [], [None], [1], ["q_proj"], {}, {"x": 1}, {"q_proj": -3}, {"(": 2}, [["q_proj"]],
]  # fmt: skip


@pytest.fixture
def source(make_model: Callable[..., Any], save: Callable[[Any], Path]) -> ModelSource:
    return open_model(save(make_model("llama", head_dim=16, num_hidden_layers=2)))


@pytest.fixture
def folder(source: ModelSource, tmp_path: Path) -> Path:
    targets = adapter_targets(source.spec, source.family.names)
    shapes = {name: (one.slot.shape[0], one.slot.shape[1]) for name, one in targets.items()}
    return write_adapter(tmp_path / "whole", shapes)


def spoil_settings(folder: Path, dice: random.Random) -> None:
    """Another value for a setting, or a text that is not JSON settings."""
    file = folder / "adapter_config.json"
    text = file.read_text()
    if dice.random() < 0.3:
        spoilt = bytearray(text.encode())
        for _ in range(dice.randrange(1, 4)):
            spoilt[dice.randrange(len(spoilt))] = dice.randrange(256)
        file.write_bytes(spoilt[: dice.randrange(len(spoilt)) + 1])
        return
    settings = json.loads(text)
    known = ["use_rslora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save", "use_dora"]
    name = dice.choice([*settings, *known, "layers_to_transform", "exclude_modules"])
    settings[name] = dice.choice(JUNK)
    file.write_text(json.dumps(settings))


def spoil_header(file: Path, dice: random.Random) -> None:
    """Another number or word in the header of a safetensors file."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = dice.choice([one for one in header if one != "__metadata__"])
    entry = header[name]
    match dice.randrange(7):
        case 0:
            entry["dtype"] = dice.choice(["F16", "F64", "I8", "BOOL", "F8_E4M3", "X", 3, None])
        case 1:
            entry["shape"] = dice.choice([[], [0, 4], [-1, 4], [2**40, 2**40], ["x"], None, [4]])
        case 2:
            entry["data_offsets"] = dice.choice([[0, 2**50], [-4, 0], [8, 4], [0], "x", [0, 4]])
        case 3:
            del header[name]
        case 4:
            header[name.replace("lora_A", "lora_C").replace("layers", "layer")] = header.pop(name)
        case 5:
            entry["shape"].reverse()
        case _:
            header[name.replace("layers.0", "layers.7")] = dict(entry)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def spoil_bytes(file: Path, dice: random.Random) -> None:
    """A file that is truncated, extended, or has other bytes."""
    data = bytearray(file.read_bytes())
    match dice.randrange(5):
        case 0:
            data = data[: dice.randrange(len(data))]
        case 1:
            data += bytes(dice.randrange(1, 100))
        case 2:
            data[:8] = dice.randrange(2**64).to_bytes(8, "little")
        case 3:
            data[dice.randrange(min(len(data), 2000))] ^= 1 << dice.randrange(8)
        case _:
            begin = dice.randrange(len(data))
            data[begin : begin + 64] = dice.randbytes(len(data[begin : begin + 64]))
    file.write_bytes(data)


def read_or_refuse(path: Path, source: ModelSource) -> Adapter | None:
    """Read an adapter; None if an error refuses it and names it."""
    said = None
    try:
        return read_adapter(path, source, 64)
    except ApplianceError as error:
        said = str(error)
    assert str(path) in said
    return None


@pytest.mark.parametrize("spoil", ["settings", "header", "bytes"])
def test_a_damaged_folder_is_refused_or_read_as_peft_reads_it(
    source: ModelSource, folder: Path, spoil: str, tmp_path: Path
) -> None:
    from peft.utils import load_peft_weights  # PEFT takes seconds to import

    refused = 0
    for seed in SEEDS:
        dice = random.Random(f"{spoil} {seed}")
        spoilt = tmp_path / f"spoilt{seed}"
        shutil.copytree(folder, spoilt)
        weights = spoilt / "adapter_model.safetensors"
        if spoil == "settings":
            spoil_settings(spoilt, dice)
        else:
            (spoil_header if spoil == "header" else spoil_bytes)(weights, dice)
        found = read_or_refuse(spoilt, source)
        if found is None:
            refused += 1
            continue
        stored = load_peft_weights(str(spoilt), device="cpu")
        for name, part in found.parts.items():
            key = f"base_model.model.{name}.lora_"
            for factor, stored_as in ((part.a, "A"), (part.b, "B")):
                as_stored = stored[f"{key}{stored_as}.weight"].float()
                assert torch.allclose(factor, as_stored, 0, 0, equal_nan=True), (seed, name)
        assert len(stored) == 2 * len(found.parts), f"{seed}: a tensor was left out"
    assert refused > len(SEEDS) // 5


def test_a_damaged_gguf_adapter_is_refused_or_read(
    source: ModelSource, folder: Path, tmp_path: Path
) -> None:
    parts = read_adapter(folder, source, 64).parts
    whole = write_gguf_adapter(tmp_path / "whole.gguf", gguf_factors(source, parts), alpha=8.0)
    read_adapter(whole, source, 64)
    refused = 0
    for seed in SEEDS:
        dice = random.Random(f"gguf {seed}")
        spoilt = tmp_path / f"spoilt{seed}.gguf"
        shutil.copy(whole, spoilt)
        spoil_bytes(spoilt, dice)
        found = read_or_refuse(spoilt, source)
        refused += found is None
        if found is not None:
            assert found.parts.keys() <= parts.keys()
    assert refused > len(SEEDS) // 5
