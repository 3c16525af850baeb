"""A model of the shape of Llama-3-8B whose random weights are made on the GPU.

Nothing is written to a disk or copied from the host, so a start takes no longer than laying the
weights out. Its output is never text.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.config import EngineConfig
from appliance.engine.load.load_engine import load_llm_engine
from appliance.quant.formats.scheme import WeightScheme
from bench.gpu.plan import Amount
from bench.lib.model_shapes import LLAMA_3_8B, TINY_LLAMA
from bench.lib.synthetic import Schemes, synthetic_model

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine

GROUP, TINY_GROUP = 128, 64
STREAMS = 64  # the most that any benchmark runs at once


def config_of(amount: Amount) -> dict[str, Any]:
    """Return the Hugging Face config of the measured model."""
    return TINY_LLAMA if amount is Amount.TINY else LLAMA_3_8B


def schemes_of(amount: Amount, weights: str) -> Schemes:
    """Return the schemes of "bf16", or of "int4" with zero points and a head of 8 bits."""
    if weights == "bf16":
        return Schemes()
    group = TINY_GROUP if amount is Amount.TINY else GROUP
    return Schemes(*(WeightScheme(bits, group, symmetric=False) for bits in (4, 8)))


def load_engine(
    amount: Amount,
    kv: str,
    *,
    weights: str = "int4",
    graphs: str = "auto",
    kv_bytes: int | None = None,
) -> LLMEngine:
    """Load an engine with such a model on the first GPU, or on the CPU with torch's functions."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=folder,
            kv_cache_dtype=kv,
            kv_cache_memory=kv_bytes,
            max_num_seqs=STREAMS,
            max_num_batched_tokens=2048,
            prefix_caching=False,
            kernels="auto" if has_gpu else "torch",
            cuda_graphs=graphs,
        )
        schemes = schemes_of(amount, weights)
        source = synthetic_model(Path(folder), config_of(amount), schemes, device)
        return load_llm_engine(config, (), None, lambda *progress: None, source=source)
