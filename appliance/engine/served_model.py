"""Opens the model that the settings name, and fingerprints its weights."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import ConfigError, ModelError
from appliance.files import open_regular
from appliance.kernels.cache.state_format import StateFormat
from appliance.model.source import open_model
from appliance.model_files.files_beside import find_projector
from appliance.model_files.gguf_names import parts_of
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.model.source import ModelSource

END_BYTES = 2**20  # at either end of a file, where headers are
SAMPLE_BYTES = 1024
NUM_SAMPLES = 2048  # of all files, in proportion to their sizes
_LEAST_SAMPLES = 16  # per file


def settings_for(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """Return the settings without what a model cannot have, however it is executed.

    Where each sequence has a cache of a class of transformers', nothing of it is shared, kept or
    taken back.

    Raises:
        ConfigError: such a thing is asked for by name.
    """
    if source.spec.own_cache is None:
        return config
    asked = [] if config.speculate in ("auto", "off") else [f"--speculate {config.speculate}"]
    asked += ["--kv-host-memory"] if config.kv_host_memory else []
    asked += ["--state-checkpoint-memory"] if config.state_checkpoint_memory else []
    if config.mamba_cache_dtype not in ("auto", "fp32"):
        asked += [f"--mamba-cache-dtype {config.mamba_cache_dtype}"]
    if asked:
        raise ConfigError(
            f"{asked[0]} cannot be had with {source.spec.architecture}, whose sequences have caches"
            " of its own class, which are not taken back or kept; leave it out"
        )
    return msgspec.structs.replace(config, speculate="off", prefix_caching=False, kv_host_memory=0)


def open_served(config: EngineConfig) -> ModelSource:
    """Open the model for any executor.

    Raises:
        ConfigError: its weights have no more bits than they should be rounded to.
        ModelError: as `open_model`.
    """
    source = with_state_format(open_model(Path(config.model), in_torch=False), config)
    source = beside_own_tower(source, config)
    if config.weight_bits is None and config.end_bits is None:
        return source
    from appliance.model.narrowed import narrowed

    found = narrowed(source, config.weight_bits, config.end_bits)
    if found is None and config.weight_bits is None:
        raise ConfigError(
            f"--end-bits {config.end_bits}: embedding and head of {config.model} have no more bits"
            " already, or their width does not divide by 32; leave it out"
        )
    if found is None:
        raise ConfigError(
            f"--weight-bits {config.weight_bits}: most weights of {config.model} have no more bits"
            " already, or their width does not divide by 32; leave it out"
        )
    return found


def beside_own_tower(source: ModelSource, config: EngineConfig) -> ModelSource:
    """Give a model that reads pictures the positions that its tower's family gives their rows."""
    if not config.images:
        return source
    projector = find_projector(source.path, config.mmproj)
    if projector is None and source.path.is_file():
        return source
    from appliance.model.vision.source import beside_tower, tower_of

    try:
        tower = tower_of(source, projector, in_torch=False)
    except ModelError:  # said where the tower is loaded
        return source
    return source if tower is None else beside_tower(source, tower)


def with_state_format(source: ModelSource, config: EngineConfig) -> ModelSource:
    """Return the model with its recurrent states kept as the settings say."""
    name = config.mamba_cache_dtype
    kept = StateFormat.FP32 if name == "auto" else StateFormat(name)
    return replace(source, spec=replace(source.spec, state_format=kept))


def weights_digest(path: Path) -> bytes:
    """Return a digest of a model's weight files: names, sizes, both ends, and samples.

    Takes a sample every 5 MB of 10 GB, so newly trained or quantized weights differ. May miss a
    manual change of a few megabytes.

    Args:
        path: file, any part of a split model, or folder with safetensors files.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else parts_of(path)
    sizes = [file.stat().st_size for file in files]
    digest = hashlib.blake2b(digest_size=16)
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{file.name} {size}\n".encode())
        samples = max(_LEAST_SAMPLES, NUM_SAMPLES * size // max(1, sum(sizes)))
        with open_regular(file) as buffered:
            content = buffered.raw  # samples are smaller than its buffer
            digest.update(content.read(END_BYTES))
            for number in range(1, samples):
                content.seek(size * number // samples, os.SEEK_SET)
                digest.update(content.read(SAMPLE_BYTES))
            content.seek(max(0, size - END_BYTES), os.SEEK_SET)
            digest.update(content.read(END_BYTES))
    return digest.digest()


def fingerprint_of(path: Path, arithmetic: str, projector: Path | None = None) -> str:
    """Hash everything that a seeded answer depends on: weights, formats, version.

    Args:
        projector: the file that pictures are read with, if it is another.
    """
    digest = hashlib.blake2b(weights_digest(path), digest_size=8)
    if projector is not None:
        digest.update(weights_digest(projector))
    digest.update(f"{__version__} {arithmetic}".encode())
    return f"fp_{digest.hexdigest()}"
