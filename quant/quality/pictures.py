"""Measures how likely a checkpoint and its base find texts about pictures, as they are served."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, QuantizeError
from appliance.quant.quality.card import Figure, PictureLoss
from appliance.quant.text.answers import score_pictures

if TYPE_CHECKING:
    from pathlib import Path

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")


def pictures_in(folder: Path) -> list[tuple[Path, str]]:
    """Return a folder's pictures in the order of their names, each with the text beside it.

    That of `cat.jpg` is in `cat.txt`; "" without one.

    Raises:
        QuantizeError: there is none, or a text cannot be read.
    """
    try:
        files = sorted(one for one in folder.iterdir() if one.suffix.lower() in SUFFIXES)
        beside = [one.with_suffix(".txt") for one in files]
        texts = [one.read_text("utf-8").strip() if one.exists() else "" for one in beside]
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizeError(f"--pictures {folder} cannot be read: {error}") from error
    if not files:
        raise QuantizeError(
            f"--pictures {folder} has no picture ({', '.join(SUFFIXES)}); name a folder of them,"
            " each with a text about it in a .txt file of its name, or without"
        )
    return list(zip(files, texts, strict=True))


def compare_pictures(
    model: Path,
    base: Path,
    folder: Path,
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> PictureLoss:
    """Compare the losses of texts behind pictures; say why not if a model cannot run here.

    Where a picture has no text, the base writes one.

    Args:
        max_ram: limit in bytes of this process and a model's; None takes what is free.

    Raises:
        QuantizeError: as `pictures_in`.
    """
    pictures = pictures_in(folder)
    try:
        before = score_pictures(base, pictures, device=device, max_ram=max_ram)
        known = [(path, text) for (path, _), text in zip(pictures, before.texts, strict=True)]
        after = score_pictures(model, known, device=device, max_ram=max_ram)
    except ApplianceError as error:
        return PictureLoss(0, reason=str(error))
    losses = [-statistics.fmean(one) for one in before.logprobs]
    pairs = zip(after.logprobs, losses, strict=True)
    changes = [-statistics.fmean(one) - loss for one, loss in pairs]
    return PictureLoss(
        len(pictures),
        tokens=sum(map(len, before.logprobs)),
        written=sum(not text for _, text in pictures),
        base=_mean(losses),
        change=_mean(changes),
        same_top_percent=_mean(
            [
                100 * statistics.fmean(map(int.__eq__, ours, theirs))
                for ours, theirs in zip(after.tops, before.tops, strict=True)
            ]
        ),
    )


def _mean(values: list[float]) -> Figure:
    """Return the mean over pictures and its standard error, 0 of a single one."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Figure(statistics.fmean(values), error)
