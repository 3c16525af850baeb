"""Speeds that others published for cards, and what is expected of ours beside them.

None of these was measured here: a quoted figure is its source's, and an expected one is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.model.spec import ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.model.spec import DecoderSpec

# Assumed of a graph's kernels: the time from one's end to the next one's start, and how many a
# layer has without and with experts.
KERNEL_SECONDS = 2e-6
LAYER_KERNELS, EXPERT_LAYER_KERNELS = 8, 12
FORM = (
    "Ran it on a card? `appliance bench MODEL` prints a report to post in an issue of the project."
)


@dataclass(frozen=True, slots=True)
class Quote:
    """A published speed of one stream without drafts, on one card.

    Attributes:
        card: as `appliance fit --gpu` names it.
        model: in words.
        words: in all of the model's names, lower case and without hyphens.
        weights: how they are stored.
        tokens: a second, as published.
    """

    card: str
    model: str
    words: tuple[str, ...]
    weights: str
    engine: str
    tokens: str
    source: str


_27B, _35B = ("qwen3.", "27b"), ("qwen3.6", "35b", "a3b")
_26B, _8B = ("gemma4", "26b", "a4b"), ("llama3", "8b")
QUOTES = (
    Quote("RTX 3090", "Qwen3.6-27B", _27B, "Q4_K_M", "llama.cpp", "20-21.6", "calebcoffie"),
    Quote("RTX 3090", "Qwen3.6-27B", _27B, "4 bits", "vLLM", "32-33", "club-3090"),
    Quote("RTX 3090", "Qwen3.8-27B", _27B, "W4A16", "vLLM, tuned", "46", "syv-ai"),
    Quote("RTX 3090", "Qwen3.6-35B-A3B", _35B, "4 bits", "llama.cpp", "146-148", "club-3090"),
    Quote("RTX 3090", "Gemma 4 26B-A4B", _26B, "Q4_K_M", "llama.cpp", "75-101", "club-3090"),
    Quote("RTX 4090", "Gemma 4 26B-A4B", _26B, "Q4_K_M", "llama.cpp", "149.6", "llamaperf"),
    Quote("RTX 4090", "Llama 8B, 32k deep", _8B, "Q4_0", "llama.cpp", "102.8", "llama.cpp 17505"),
    Quote("RTX 4090", "Llama-3.1-8B", _8B, "EXL3, 4 bits", "ExLlamaV3", "180 (?)", "solosoft"),
    Quote("RTX 5090", "Qwen3-8B", ("qwen38b",), "Q4_K_M", "llama.cpp", "221.7", "continuum 1627"),
    Quote("RTX 5090", "Qwen3.6-35B-A3B", _35B, "NVFP4", "vLLM", "252-258", "club-3090"),
    Quote("RTX 5090", "Qwen3.6-35B-A3B", _35B, "Q4_K_M", "llama.cpp", "214", "zenn"),
    Quote(
        "RTX 5090",
        "Qwen3-Coder-30B-A3B",
        ("qwen3", "30b", "a3b"),
        "AWQ",
        "vLLM",
        "142 (7.06 ms a token)",
        "a post",
    ),
)


def quotes_for(card: str, model: str) -> Sequence[Quote]:
    """Return what others published for a model on a card, both by name."""
    bare = card.removeprefix("NVIDIA ").removeprefix("GeForce ").partition(",")[0]
    name = model.lower().replace("_", "").replace("-", "")
    return [one for one in QUOTES if one.card == bare and all(word in name for word in one.words)]


def expected_rate(most: float, spec: DecoderSpec) -> float:
    """Return the tokens/s of one stream on a GPU that are expected, not measured.

    Args:
        most: that the bytes and the bandwidth allow.
        spec: of the model, whose kernels start one after another.
    """
    kernels = sum(
        EXPERT_LAYER_KERNELS if isinstance(layer.mlp, ExpertsSpec) else LAYER_KERNELS
        for layer in spec.layers
    )
    return 1 / (1 / most + kernels * KERNEL_SECONDS)
