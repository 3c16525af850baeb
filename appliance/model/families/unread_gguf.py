"""Architectures of GGUF files that converters write and nobody here reads, with what to do instead.

The labels are those of llama.cpp's `MODEL_ARCH_NAMES`. Knows no family.
"""

from __future__ import annotations

_POSITIONS = "it chooses the positions that a query sees (indexed attention)"
_BIASED = "its scores have biases by distance (ALiBi)"
_STATES = "no layer has attention"
_EXPERTS = "its experts and their router are not described here"
_GATED_HEADS = "its attention has gates with a matrix of their own"
_UNKNOWN = "nothing here describes its arithmetic, and transformers has no class of it"

# Labels whose models transformers' modules run from a folder: the reason, and their class.
_CLASSES: dict[str, tuple[str, str]] = {
    "afmoe": (_GATED_HEADS, "AfmoeForCausalLM"),
    "bitnet": ("norms stand between the linears of a part", "BitNetForCausalLM"),
    "bloom": (_BIASED, "BloomForCausalLM"),
    "cohere2moe": ("attention and experts are side by side", "Cohere2MoeForCausalLM"),
    "deepseek4": (_POSITIONS, "DeepseekV4ForCausalLM"),
    "exaone-moe": (_EXPERTS, "ExaoneMoeForCausalLM"),
    "gpt2": ("its positions are learned", "GPT2LMHeadModel"),
    "gptj": ("attention and MLP are side by side, and its head has a bias", "GPTJForCausalLM"),
    "granite_swa": ("its attention has sinks and multipliers", "GraniteSWAForCausalLM"),
    "hy_v3": (_EXPERTS, "HYV3ForCausalLM"),
    "jais2": ("it is LayerNorm with a bias, and an MLP without gates", "Jais2ForCausalLM"),
    "jamba": ("its layers have Mamba-1 states", "JambaForCausalLM"),
    "kimi-linear": (
        "its linear attention is neither Gated DeltaNet nor Mamba-2",
        "KimiLinearForCausalLM",
    ),
    "laguna": (_GATED_HEADS, "LagunaForCausalLM"),
    "mamba": (_STATES, "MambaForCausalLM"),
    "mamba2": (_STATES, "Mamba2ForCausalLM"),
    "mellum": (_EXPERTS, "MellumForCausalLM"),
    "mimo2": ("its values are narrower than its keys", "MiMoV2FlashForCausalLM"),
    "minimax-m3": (_POSITIONS, "MiniMaxM3VLForCausalLM"),
    "mpt": (_BIASED, "MptForCausalLM"),
    "muse-glimmer": (
        "norms and multipliers of its stream are not described here",
        "MuseGlimmerForConditionalGeneration",
    ),
    "olmo": ("its norms have no weights", "OlmoForCausalLM"),
    "paddleocr": (
        "its text has the positions of images",
        "PaddleOCRVLForConditionalGeneration",
    ),
    "phimoe": ("a router of its own chooses experts", "PhimoeForCausalLM"),
    "starcoder": ("its positions are learned", "GPTBigCodeForCausalLM"),
}
# Reasons of labels that llama.cpp serves, and nobody here.
_OF_LLAMA_CPP: dict[str, tuple[str, ...]] = {
    _STATES: ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    "its layers have Mamba-1 states": ("plamo2",),
    "its linear attention is neither Gated DeltaNet nor Mamba-2": (
        *("kimi-k3", "minimax-01", "bailingmoe3"),
    ),
    _BIASED: ("jais", "refact"),
    _POSITIONS: ("dots3note",),
    "it limits what queries, keys and values may be (clip_qkv)": ("dbrx",),
    "the heads and widths of its layers differ, and some have no attention": ("deci", "openelm"),
    "it runs its layers several times in turn": ("nanbeige",),
    "tokens switch between adapters that are part of it": ("graniteswitch",),
    "its router caps its logits": ("grok",),
    "groups of its experts share further experts": ("grovemoe",),
    "its router reads what attention reads": ("smallthinker",),
    "experts and an MLP are side by side in each layer": ("arctic",),
    "images pass through linears of their own": ("cogvlm",),
    "queries and keys have a LayerNorm whose weights differ by head": ("chameleon",),
    "its positions have four parts (XD-RoPE)": ("hunyuan_vl",),
    "its latent attention has an MLP of its own kind": ("plm",),
    _UNKNOWN: (
        *("codeshell", "deepseek", "deepseek2-ocr", "maincoder", "orion", "pangu-embedded"),
        *("plamo", "plamo3", "talkie", "xverse"),
    ),
}
# Others: the reason, and what to do.
_OTHERS: dict[str, tuple[str, ...]] = {
    "it only reads texts; `appliance serve` serves its embeddings, and nothing else can be done "
    "with it here": (
        *("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v3", "modern-bert"),
        *("eurobert", "gemma-embedding", "llama-embed"),
    ),
    "it is an encoder whose scores have biases by distance (ALiBi), and its files are not read; "
    "use the folder of jina-embeddings-v2-base-en, or another encoder": ("jina-bert-v2",),
    "it is an encoder that transformers has no class of; use ModernBERT's or BERT's": ("neo-bert",),
    "it is T5's encoder, whose scores have biases by relative position; use another encoder": (
        "t5encoder",
    ),
    "it has an encoder beside its decoder; run the folder that it was made from with "
    "transformers": ("t5",),
    "it writes by diffusion, not in turn; run this file with llama-diffusion-cli of llama.cpp": (
        *("llada", "llada-moe", "dream", "rnd1"),
    ),
    f"{_POSITIONS}; serve the folder that it was made from, for contexts of as many tokens as it "
    "chooses": ("deepseek32", "glm-dsa"),
    "it drafts tokens for another model and is none by itself; give that model's file": (
        *("dflash", "eagle3", "gemma4-assistant"),
    ),
    "it makes sound or codes of sound, not text; run it with llama.cpp": (
        *("pockettts", "qwen3tts", "wavtokenizer-dec"),
    ),
    "its GGUF files are not read; serve the folder that it was made from": ("step35",),
}
UNREAD_GGUF = (
    {
        label: f"{reason}; serve the folder that it was made from, which transformers' {name} runs"
        for label, (reason, name) in _CLASSES.items()
    }
    | {
        label: f"{reason}; serve this file with llama.cpp"
        for reason, labels in _OF_LLAMA_CPP.items()
        for label in labels
    }
    | {label: reason for reason, labels in _OTHERS.items() for label in labels}
)

# GGUF files that are no models, by `general.type` or architecture: what they are, what to give.
NO_MODELS = {
    "adapter": ("an adapter beside a model", "give the model's own file, and this one with --lora"),
    "imatrix": (
        "an importance matrix, which llama.cpp quantizes with",
        "give the model's own file",
    ),
    "controlvector": ("a control vector beside a model", "give the model's own file"),
    **dict.fromkeys(
        ("mmproj", "clip"),
        ("the projector of images beside a model, and generates no text",
         "give the model's own file"),
    ),
}  # fmt: skip
