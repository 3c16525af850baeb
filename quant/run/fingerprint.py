"""Collects all inputs of a result: equal fingerprints give equal bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.model_files.gguf_names import parts_of
from appliance.quant.run.options import RUN_ONLY
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.quant.run.options import QuantizeOptions
    from appliance.quant.text.calibration import Calibration

Fingerprint = dict[str, str]

MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")
SAMPLED_ABOVE = 64 << 20  # bytes; larger files are sampled every `SAMPLE_EVERY`
SAMPLE_EVERY = 16 << 20
SAMPLE_BYTES = 64 << 10


def fingerprint_of(
    model_path: Path,
    options: QuantizeOptions,
    calibration: Calibration | None,
    device: torch.device,
) -> Fingerprint:
    """Collect everything that decides the result, bit for bit.

    Files above 64 MiB count by size and 64 KiB of every 16 MiB: another model differs nearly
    everywhere, and reading a large file takes longer than rounding it.

    Args:
        options: of the run; destination and memory limits do not count.

    Raises:
        OSError: a file cannot be read.
    """
    found = {"appliance": __version__}
    files = list(parts_of(model_path))
    if model_path.is_dir():
        files = sorted(path for path in model_path.iterdir() if path.suffix in MODEL_FILES)
    found |= {f"model file {path.name}": _content_of(path) for path in files if path.is_file()}
    if calibration is None:
        options = dataclasses.replace(options, text=None)
    for field in dataclasses.fields(options):
        if field.name not in RUN_ONLY:
            found |= _flat(field.name, getattr(options, field.name))
    if calibration is not None:
        found["calibration rows"] = calibration.fingerprint
        # The order of floating-point sums depends on these.
        found["torch"] = str(torch.__version__)
        found["device"] = device.type
        if device.type == "cuda":
            found["GPU"] = torch.cuda.get_device_name(device)
        else:
            found["CPU instructions"] = torch.backends.cpu.get_cpu_capability()
            found["threads"] = str(torch.get_num_threads())
    return found


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Describe each difference in words; empty if both are equal."""
    changed = []
    for name in sorted(before.keys() | now.keys()):
        was, is_now = before.get(name), now.get(name)
        if was == is_now:
            continue
        if name.startswith("model file"):
            state = "is new" if was is None else "is gone" if is_now is None else "has changed"
            changed.append(f"{name} {state}")
        elif name == "calibration rows":
            changed.append("the calibration text has changed")
        else:
            changed.append(f"{name} was {was or 'not set'}, now {is_now or 'not set'}")
    return changed


def _content_of(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if size <= SAMPLED_ABOVE:
            starts: Iterable[int] = range(0, size, SAMPLE_BYTES)
        else:
            starts = (*range(0, size, SAMPLE_EVERY), size - SAMPLE_BYTES)
        for start in starts:
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return f"{size} bytes, {digest.hexdigest()}"


def _flat(name: str, value: Any) -> dict[str, str]:
    """Flatten a setting to strings; a dataclass gives one per field."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, str] = {}
        for field in dataclasses.fields(value):
            found |= _flat(f"{name} {field.name}", getattr(value, field.name))
        return found
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, Path):
        value = value.expanduser().resolve()
    return {} if value is None else {name: str(value)}
