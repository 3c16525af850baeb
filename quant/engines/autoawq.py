"""Quantizes with the AutoAWQ library."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.quant.formats.scheme import WeightScheme

# Found in a trial run; the package is archived, so this will not change.
TRIED = (
    "autoawq 0.2.9, its last release, worked with transformers 5.23 and torch 2.13, with datasets"
    " and zstandard beside it; with transformers 4.57.6 it cannot be imported"
)


def installed() -> str:
    """Return the library's version, or raise ImportError."""
    import awq  # noqa: F401 - it fails to import with some versions of transformers

    return version("autoawq")


def quantize(model_path: Path, out: Path, scheme: WeightScheme, rows: Tensor) -> None:
    """Quantize a Hugging Face folder into an AWQ folder.

    Args:
        model_path: folder of the 16-bit model.
        scheme: 4 bits, asymmetric, in groups.
        rows: (num_rows, row_tokens) int64 calibration tokens.
    """
    from awq import AutoAWQForCausalLM

    model: Any = AutoAWQForCausalLM.from_pretrained(
        str(model_path), device_map="cpu" if not torch.cuda.is_available() else None
    )
    model.quantize(
        None,
        quant_config={
            "zero_point": True,
            "q_group_size": scheme.group_size,
            "w_bit": scheme.bits,
            "version": "GEMM",
        },
        calib_data=rows.tolist(),
        max_calib_samples=rows.shape[0],
        max_calib_seq_len=rows.shape[1],
    )
    model.save_quantized(str(out))
