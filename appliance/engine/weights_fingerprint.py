"""Fingerprints weights without reading all of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from appliance.files import open_regular
from appliance.gguf_names import parts_of

END_BYTES = 2**20  # at either end of a file, where headers are
SAMPLE_BYTES = 1024
NUM_SAMPLES = 2048  # of all files, in proportion to their sizes
_LEAST_SAMPLES = 16  # per file


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
