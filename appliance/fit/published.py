"""Speeds that others published for cards. None of them was measured here, or with this program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        weights: how they are stored, as published.
        bits: of a layers' weight with its scales, and of the head's, as that form usually has.
        engine: with its version, if the source says it.
        tokens: a second, as published: a number, or the least and the most; `~` is about.
        settings: what else the source says.
        date: of the source, or of its measurement.
        source: a name for it.
        address: where it was read.
        context: tokens before those that were timed; 0: few.
    """

    card: str
    model: str
    words: tuple[str, ...]
    weights: str
    bits: tuple[float, float]
    engine: str
    tokens: str
    settings: str
    date: str
    source: str
    address: str
    context: int = 0


_27B, _35B = ("qwen3.", "27b"), ("qwen3.", "35b", "a3b")
_26B, _30B = ("gemma4", "26b", "a4b"), ("qwen3", "30b", "a3b")
_GEMMA_3, _QWEN_8B, _LLAMA_8B = ("gemma3", "27b"), ("qwen38b",), ("llama3", "8b")
# Usual bits of layers and head. Q4_K_M: 4.84 by llama.cpp's quantize for a 7B, its head Q6_K.
# AutoRound and AWQ leave the head in 16.
_Q4_K_M, _Q4_0, _INT4 = (4.84, 6.56), (4.5, 6.56), (4.25, 16.0)
_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"
_CLUB = "https://github.com/noonghunna/club-3090"
_COFFIE = "https://calebcoffie.com/benchmarks"
_SMELT = "https://smeltcore.com/recipes/gemma-4-26b-a4b-it-on-"
_INSIDER = "https://insiderllm.com/guides/wicked-fast-gemma-4-26b-a4b-vs-qwen-3-6-27b-rtx-3090/"
_BRIC = "https://bric.pe.kr/blog/qwen3-27b-rtx-3090-llama-cpp-mtp-doubling-tokens"
QUOTES = (
    Quote(
        "RTX 3090", "Qwen3.6-27B", _27B, "Q4_K_M", _Q4_K_M, "llama.cpp 59778f0", "20-21.6",
        "chat to agent prompts", "by 2026-08", "calebcoffie", _COFFIE,
    ),
    Quote(
        "RTX 3090", "Qwen3.6-27B", _27B, "Q4_K_M", _Q4_K_M, "llama.cpp f9cd456ea", "41.27",
        "mean of nine prompts", "2026-05-08", "insiderllm", _INSIDER,
    ),
    Quote(
        "RTX 3090", "Qwen3.6-27B", _27B, "Q4_K_M", _Q4_K_M, "ik_llama.cpp", "41.9",
        "200 tokens", "2026-06-09", "bric.pe.kr", _BRIC,
    ),
    Quote(
        "RTX 3090", "Qwen3.6-27B", _27B, "INT4 (AutoRound)", _INT4, "vLLM", "32-33",
        "TurboQuant KV of 3 bits, 350 W, mean of 5", "2026-05-03", "club-3090",
        f"{_CLUB}/blob/master/BENCHMARKS.md",
    ),
    Quote(
        "RTX 3090", "Qwen3.8-27B", _27B, "W4A16", _INT4, "vLLM, tuned", "46",
        "vllm bench serve, eight prompts", "by 2026-08-22", "syv-ai",
        "https://github.com/syv-ai/qwen38-27b-rtx3090",
    ),
    Quote(
        "RTX 3090", "Qwen3.6-35B-A3B", _35B, "4 bits", _Q4_K_M, "llama.cpp", "146-148",
        "narrative and code", "by 2026-08-22", "club-3090", f"{_CLUB}/blob/master/BENCHMARKS.md",
    ),
    Quote(
        "RTX 3090", "Gemma 4 26B-A4B", _26B, "Q4_K_M", _Q4_K_M, "llama.cpp 59778f0", "74.7-101.4",
        "chat to agent prompts", "by 2026-08", "calebcoffie", _COFFIE,
    ),
    Quote(
        "RTX 3090", "Gemma 4 26B-A4B", _26B, "UD-Q4_K_XL", _Q4_K_M, "llama.cpp f9cd456ea",
        "128.08", "mean of nine prompts", "2026-05-08", "insiderllm", _INSIDER,
    ),
    Quote(
        "RTX 3090", "Gemma 4 26B-A4B", _26B, "Q4_0", _Q4_0, "llama.cpp a3cec6ab6", "190.09",
        "llama-bench, prompt of 256 row by row", "2026", "llama.cpp 29152",
        f"{_LLAMA_CPP}/pull/29152",
    ),
    Quote(
        "RTX 3090", "Gemma 4 26B-A4B, 32k deep", _26B, "Q4_0", _Q4_0, "llama.cpp a3cec6ab6",
        "151.95", "llama-bench, prompt of 256 row by row", "2026", "llama.cpp 29152",
        f"{_LLAMA_CPP}/pull/29152", 32768,
    ),
    Quote(
        "RTX 4090", "Qwen3.5-27B", _27B, "Q4_K_M", _Q4_K_M, "llama.cpp", "39.3",
        "KV q4_0, context of 2,048 half full", "2026-04-05", "tianchengwu",
        "https://www.tianchengwu.com/2026/04/05/Running-Qwen-3.5-27B-on-RTX-4090",
    ),
    Quote(
        "RTX 4090", "Qwen3.5-27B", _27B, "Q4_K_M", _Q4_K_M, "llama.cpp", "44",
        "llama-server, contexts of 16k to 128k", "2026", "patrickgawron",
        "https://patrickgawron.com/articles/qwen35-27b-distilled-on-rtx4090",
    ),
    Quote(
        "RTX 4090", "Gemma 3 27B", _GEMMA_3, "Q4", _Q4_K_M, "llm-speed", "47",
        "short prompts", "2026-07-03", "llm-speed",
        "https://llm-speed.com/blog/gemma-3-speed-rtx-4090",
    ),
    Quote(
        "RTX 4090", "Gemma 4 26B-A4B", _26B, "Q4", _Q4_K_M, "llama.cpp", "~149", "second hand",
        "2026", "runaihome",
        "https://dev.to/jovan_chan_9500711396d4e6/google-gemma-4-for-local-ai-which-size-fits-your-gpu-2026-guide-4l4b",
    ),
    Quote(
        "RTX 4090", "Qwen3-8B", _QWEN_8B, "BF16", (16.0, 16.0), "vLLM", "58.7",
        "llmfit bench, 300 tokens", "2026-09-15", "llmfit 1046",
        "https://github.com/AlexsJones/llmfit/pull/1046",
    ),
    Quote(
        "RTX 4090", "Llama 3.1 8B, 32k deep", _LLAMA_8B, "Q4_0", _Q4_0, "llama.cpp", "102.76",
        "llama-bench, prompt of 512 row by row", "2025", "llama.cpp 17505",
        f"{_LLAMA_CPP}/pull/17505", 32768,
    ),
    Quote(
        "RTX 5090", "Qwen3-8B", _QWEN_8B, "Q4_K_M", _Q4_K_M, "llama.cpp", "221.7",
        "WSL 2", "2026-06-15", "continuum 1627",
        "https://github.com/CambrianTech/continuum/pull/1627",
    ),
    Quote(
        "RTX 5090", "Qwen3.5-27B", _27B, "Q4_K_M", _Q4_K_M, "llama.cpp b10741", "30.09",
        "llama-bench tg400, Windows; the source calls it a fault", "2026-09-01",
        "llama.cpp 28196", f"{_LLAMA_CPP}/issues/28196",
    ),
    Quote(
        "RTX 5090", "Qwen3-30B-A3B", _30B, "Q4_K_M", _Q4_K_M, "llama.cpp b10741", "134.18",
        "llama-bench tg400, Windows", "2026-09-01", "llama.cpp 28196",
        f"{_LLAMA_CPP}/issues/28196",
    ),
    Quote(
        "RTX 5090", "Qwen3.5-35B-A3B", _35B, "Q4_K_M", _Q4_K_M, "llama.cpp b8870",
        "214", "llama-bench, WSL 2", "2026-04-21", "zenn",
        "https://zenn.dev/toki_mwc/articles/rtx5090-qwen36-35b-a3b-llmacpp-bench?locale=en",
    ),
    Quote(
        "RTX 5090", "Gemma 4 26B-A4B", _26B, "Q4_K_M", _Q4_K_M, "llama.cpp", "180.3",
        "context of 4,096", "2026-05", "smeltcore",
        f"{_SMELT}rtx-5090-q8-0-quality-tier-via-ggml-org-gguf-llama-cpp/", 4096,
    ),
    Quote(
        "RTX 5090", "Gemma 4 26B-A4B", _26B, "AWQ", _INT4, "vLLM 0.19.2rc1", "~228",
        "256 tokens in, 1,024 out", "2026-05-08", "a post, by ai-navigate-news",
        "https://ai-navigate-news.com/en/articles/4f879f43-9bb7-4d75-95a9-ac1e12a98ccf",
    ),
)  # fmt: skip


def quotes_for(card: str, model: str) -> Sequence[Quote]:
    """Return what others published for a model on a card, both by name."""
    bare = card.removeprefix("NVIDIA ").removeprefix("GeForce ").partition(",")[0]
    name = model.lower().replace("_", "").replace("-", "")
    return [one for one in QUOTES if one.card == bare and all(word in name for word in one.words)]
