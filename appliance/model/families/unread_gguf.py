"""Architectures of GGUF files that converters write and no family reads, each with the reason.

The labels are those of llama.cpp's `MODEL_ARCH_NAMES`. Knows no family.
"""

from __future__ import annotations

_FOLDER = "; use the folder that it was made from, which transformers' modules run"
_NO_CLASS = "transformers has no class of it, and no family describes its arithmetic"
_POSITIONS = "it chooses the positions that a query sees"
_SHORT = "; use the folder that it was made from, for contexts of as many tokens as it chooses"
_SPEECH = "it makes sound or codes of sound, not text"
_DRAFT = "it drafts tokens for another model and is none by itself; give that model's file"
_GATED_HEADS = f"its attention has gates with a matrix of their own{_FOLDER}"
_AS_FOLDER = "its GGUF files are not read; serve the folder that it was made from"
_EXPERTS = f"its experts and their router are not described here{_FOLDER}"

_REASONS: dict[str, tuple[str, ...]] = {
    "no layer has attention": ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    "it only reads texts: `appliance serve` serves its embeddings, and nothing else can be done "
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
    "it has an encoder beside its decoder": ("t5",),
    "its layers have Mamba-1 states": ("jamba", "plamo2"),
    "its layers attend and recur side by side": ("falcon-h1",),
    "its linear attention is neither Gated DeltaNet nor Mamba-2": (
        *("kimi-linear", "kimi-k3", "minimax-01", "bailingmoe3"),
    ),
    "its layers hold several streams and learn how to mix them": ("gemma3n",),
    "its scores have biases by distance (ALiBi)": ("bloom", "mpt", "jais", "refact"),
    "it writes by diffusion, not in turn": ("llada", "llada-moe", "dream", "rnd1"),
    f"{_POSITIONS} (indexed attention)": ("deepseek4", "dots3note"),
    f"{_POSITIONS} (indexed attention){_SHORT}": ("deepseek32", "glm-dsa"),
    f"{_POSITIONS} (indexed attention){_FOLDER}": ("minimax-m3",),
    _DRAFT: ("dflash", "eagle3", "gemma4-assistant"),
    _SPEECH: ("pockettts", "qwen3tts", "wavtokenizer-dec"),
    f"its activation (xIELU) has weights of its own{_FOLDER}": ("apertus",),
    f"its head has a bias, and attention and MLP are side by side{_FOLDER}": ("gptj",),
    f"its head has a bias, and a router of its own chooses experts{_FOLDER}": ("phimoe",),
    f"its norms have no weights{_FOLDER}": ("olmo",),
    f"norms stand between the linears of a part (BitNet){_FOLDER}": ("bitnet",),
    f"its values are narrower than its keys{_FOLDER}": ("mimo2",),
    f"its attention has sinks and multipliers{_FOLDER}": ("granite_swa",),
    f"its positions are learned{_FOLDER}": ("gpt2", "starcoder"),
    f"attention and experts are side by side{_FOLDER}": ("cohere2moe",),
    f"it is LayerNorm with a bias, and an MLP without gates{_FOLDER}": ("jais2",),
    f"its text has the positions of images{_FOLDER}": ("paddleocr",),
    _AS_FOLDER: ("step35",),
    _GATED_HEADS: ("afmoe", "laguna"),
    _EXPERTS: (*("exaone-moe", "hunyuan-moe", "hy_v3", "mellum"),),
    f"norms and multipliers of its stream are not described here{_FOLDER}": ("muse-glimmer",),
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
    _NO_CLASS: (
        *("codeshell", "deepseek"),
        *("deepseek2-ocr", "maincoder", "orion", "pangu-embedded", "plamo", "plamo3"),
        *("talkie", "xverse"),
    ),
}
UNREAD_GGUF = {label: reason for reason, labels in _REASONS.items() for label in labels}

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
