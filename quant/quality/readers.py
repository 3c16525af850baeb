"""Lists the programs that can read a checkpoint, by its format.

Statements about other engines come from their sources or from trials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.model.source import ModelSource

OURS = "appliance"


def readers_of(source: ModelSource) -> tuple[str, ...]:
    """List the programs that can read the model, one line each."""
    if source.path.is_file():
        return (OURS, "llama.cpp and what is built on it")
    config = source.config.get("quantization_config")
    if not isinstance(config, dict):
        return (OURS, "transformers", "vLLM", "SGLang")
    match config.get("quant_method"):
        case "compressed-tensors":
            return (OURS, *_compressed_tensors(config))
        case "gptq":
            return (OURS, "vLLM", "SGLang", "TGI", "transformers with gptqmodel")
        case "awq":
            return (OURS, "vLLM", "SGLang", "TGI", "transformers with gptqmodel")
        case "fp8":
            return (OURS, "vLLM", "SGLang", "transformers on a GPU of capability 8.9 or later")
    return (OURS,)


def _compressed_tensors(config: dict[str, Any]) -> tuple[str, ...]:
    groups = config.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
    if any(scheme.get("num_bits") not in (4, 8) for scheme in weights):
        return ()
    if all(scheme.get("symmetric", True) for scheme in weights):
        return ("vLLM", "SGLang", "transformers with compressed-tensors")
    only = "transformers only with CompressedTensorsConfig(dequantize=True), for its zero points"
    return ("vLLM", "SGLang", only)
