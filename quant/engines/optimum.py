"""Quantizes with the Optimum library, which calls GPTQModel."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.quant.formats.scheme import WeightScheme

TRIED = (
    "optimum 2.3.0 quantizes by gptqmodel 7 only: of that, 7.7.0 needs torch 2.14.1 or newer, and"
    " 7.5.0 fails on two processors"
)


def installed() -> str:
    """Return the versions of both libraries, or raise ImportError."""
    import gptqmodel  # noqa: F401 - optimum imports without it and fails later
    import optimum.gptq  # noqa: F401

    return f"{version('optimum')} with gptqmodel {version('gptqmodel')}"


def quantize(model_path: Path, out: Path, scheme: WeightScheme, rows: Tensor) -> None:
    """Quantize a Hugging Face folder into a GPTQ folder.

    Args:
        model_path: folder of the 16-bit model.
        scheme: 4 or 8 bits.
        rows: (num_rows, row_tokens) int64 calibration tokens.
    """
    from optimum.gptq import GPTQQuantizer
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float16)
    quantizer: Any = GPTQQuantizer(
        bits=scheme.bits,
        dataset=[
            {"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in rows
        ],
        group_size=scheme.group_size or -1,
        sym=scheme.symmetric,
        desc_act=False,
        model_seqlen=rows.shape[1],
    )
    quantizer.save(quantizer.quantize_model(model, None), str(out))
