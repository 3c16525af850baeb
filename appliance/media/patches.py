"""Makes a tower's patches of resized pixels, with NumPy, on the engine's side.

Values are those of transformers' Pillow processors to the last bit: scaled in double precision,
rounded, then normalised in single. Its torchvision processors fold the scale into mean and
deviation and come out one unit in the last place apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.media.sizing import Canvas
    from appliance.media.spec import ImageProcessorSpec


def patches(spec: ImageProcessorSpec, canvas: Canvas, pixels: bytes) -> NDArray[np.float32]:
    """Cut a canvas into patches.

    A still picture stands for all frames of a tower that takes several: its kernel over frames is
    to be added up, so a patch is here once.

    Args:
        pixels: (height, width, 3) bytes, as the canvas says.

    Returns:
        (tiles, patches of a tile, 3 * patch * patch) float32. Patches are in raster order, or in
        that of squares of `block` x `block`; inside they are (3, patch, patch), or
        (patch, patch, 3) where `channels_last`.
    """
    high, wide = (side // spec.patch // spec.block for side in canvas.tile)
    cut = np.frombuffer(pixels, np.uint8).reshape(
        canvas.rows, high, spec.block, spec.patch, canvas.columns, wide, spec.block, spec.patch, 3
    )
    inner = (3, 7, 8) if spec.channels_last else (8, 3, 7)
    ordered = cut.transpose(0, 4, 1, 5, 2, 6, *inner)
    channel = np.arange(3)
    if not spec.channels_last:
        channel = channel[:, None, None]
    values, found = _values(spec), np.empty(ordered.shape, np.float32)
    for line in range(high):  # NumPy widens each byte that looks up a number
        found[:, :, line] = values[channel, ordered[:, :, line]]
    return found.reshape(canvas.tiles, high * wide * spec.block**2, 3 * spec.patch**2)


def _values(spec: ImageProcessorSpec) -> NDArray[np.float32]:
    """Return the number for each byte in each channel: (3, 256) float32."""
    scaled = (np.arange(256, dtype=np.float64) * spec.rescale).astype(np.float32)
    if spec.mean is None or spec.std is None:
        return np.stack([scaled] * 3)
    mean = np.array(spec.mean, dtype=np.float32)[:, None]
    return (scaled - mean) / np.array(spec.std, dtype=np.float32)[:, None]
