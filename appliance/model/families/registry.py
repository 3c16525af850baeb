"""Finds a checkpoint's model family by its architecture, or says what to do without one.

Labels of GGUF architectures are those of llama.cpp's `MODEL_ARCH_NAMES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.model.encoder.families import find_encoder, why_unread
from appliance.model.fallback.gguf_classes import GGUF_CLASSES
from appliance.model.families.baichuan import BAICHUAN
from appliance.model.families.bailing import BAILING_MOE, BAILING_MOE_V2
from appliance.model.families.bamba import BAMBA
from appliance.model.families.chatglm import CHATGLM
from appliance.model.families.cohere import COHERE, COHERE2
from appliance.model.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
)
from appliance.model.families.dots1 import DOTS1
from appliance.model.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from appliance.model.families.exaone4 import EXAONE4
from appliance.model.families.falcon import FALCON
from appliance.model.families.gemma2 import GEMMA, GEMMA2
from appliance.model.families.gemma3 import GEMMA3
from appliance.model.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from appliance.model.families.glm4 import GLM, GLM4
from appliance.model.families.glm4_moe import GLM4_MOE
from appliance.model.families.gpt_neox import GPT_NEOX
from appliance.model.families.gpt_oss import GPT_OSS
from appliance.model.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from appliance.model.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from appliance.model.families.internlm2 import INTERNLM2
from appliance.model.families.lfm2 import LFM2, LFM2_MOE
from appliance.model.families.lfm3 import LFM3
from appliance.model.families.limits import short
from appliance.model.families.llama import ARCEE, EXAONE, LLAMA, PADDLEOCR_VL
from appliance.model.families.llama4 import LLAMA4
from appliance.model.families.minicpm import MINICPM, MINICPM3
from appliance.model.families.minimax_m2 import MINIMAX_M2
from appliance.model.families.ministral3 import MINISTRAL3
from appliance.model.families.mistral import MISTRAL
from appliance.model.families.mistral4 import MISTRAL4
from appliance.model.families.mixtral import MIXTRAL
from appliance.model.families.nemotron import NEMOTRON
from appliance.model.families.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from appliance.model.families.olmo2 import OLMO2, OLMO3
from appliance.model.families.olmoe import OLMOE
from appliance.model.families.opt import OPT
from appliance.model.families.phi import PHI
from appliance.model.families.phi3 import PHI3
from appliance.model.families.qwen import QWEN
from appliance.model.families.qwen2 import QWEN2, QWEN2_VL
from appliance.model.families.qwen2_moe import QWEN2_MOE
from appliance.model.families.qwen3 import QWEN3, QWEN3_VL
from appliance.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from appliance.model.families.qwen3_moe import QWEN3_MOE, QWEN3_VL_MOE
from appliance.model.families.qwen3_next import QWEN3_NEXT
from appliance.model.families.seed_oss import SEED_OSS
from appliance.model.families.smollm3 import SMOLLM3
from appliance.model.families.stablelm import STABLELM
from appliance.model.families.starcoder2 import STARCODER2
from appliance.model.families.step3p7 import STEP3P7
from appliance.model.families.text_parts import FAMILIES_OF_TEXTS
from appliance.model_files.rankers import is_ranker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.families.family import Family


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
    "phimoe": ("a router of its own chooses experts", "PhimoeForCausalLM"),
    "starcoder": ("its positions are learned", "GPTBigCodeForCausalLM"),
}
# Reasons of labels that llama.cpp serves, and nobody here.
_OF_LLAMA_CPP: dict[str, tuple[str, ...]] = {
    _STATES: ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    "its layers have Mamba-1 states": ("plamo2",),
    "its linear attention is neither Gated DeltaNet nor Mamba-2": (
        "kimi-k3", "minimax-01", "bailingmoe3",
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
        "codeshell", "deepseek", "deepseek2-ocr", "maincoder", "orion", "pangu-embedded",
        "plamo", "plamo3", "talkie", "xverse",
    ),
}  # fmt: skip
# Others: the reason, and what to do.
_OTHERS: dict[str, tuple[str, ...]] = {
    "it only reads texts; `appliance serve` serves its embeddings, and nothing else can be done "
    "with it here": (
        "bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v3", "modern-bert",
        "eurobert", "gemma-embedding", "llama-embed",
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
        "llada", "llada-moe", "dream", "rnd1",
    ),
    f"{_POSITIONS}; serve the folder that it was made from, for contexts of as many tokens as it "
    "chooses": ("deepseek32", "glm-dsa"),
    "it drafts tokens for another model and is none by itself; give that model's file": (
        "dflash", "eagle3", "gemma4-assistant",
    ),
    "it makes sound or codes of sound, not text; run it with llama.cpp": (
        "pockettts", "qwen3tts", "wavtokenizer-dec",
    ),
    "its GGUF files are not read; serve the folder that it was made from": ("step35",),
}  # fmt: skip
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
        ("a projector file, with which a model reads pictures, and no model itself",
         "give the model's own file, beside which this one is found"),
    ),
}  # fmt: skip
FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    GEMMA3,
    GEMMA4,
    GEMMA4_UNIFIED,
    PHI3,
    QWEN3_MOE,
    MIXTRAL,
    QWEN2_MOE,
    GLM4_MOE,
    GPT_OSS,
    LFM2,
    LFM2_MOE,
    LFM3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    GRANITE,
    GRANITE_MOE,
    GRANITE_HYBRID,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    BAMBA,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    MISTRAL4,
    OPT,
    FALCON,
    GEMMA,
    GEMMA2,
    SMOLLM3,
    SEED_OSS,
    ERNIE4_5,
    GLM,
    GLM4,
    COHERE,
    COHERE2,
    OLMO2,
    OLMO3,
    EXAONE4,
    HUNYUAN,
    HUNYUAN_MOE,
    MINIMAX_M2,
    QWEN2_VL,
    PADDLEOCR_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    STABLELM,
    STARCODER2,
    INTERNLM2,
    MINICPM,
    MINICPM3,
    QWEN,
    CHATGLM,
    BAILING_MOE_V2,
    ARCEE,
    EXAONE,
    OLMOE,
    LLAMA4,
    STEP3P7,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
    PHI,
    GPT_NEOX,
    BAICHUAN,
    NEMOTRON,
    BAILING_MOE,
    DOTS1,
    ERNIE4_5_MOE,
)
# Types for which transformers takes the class of another one, with settings and defaults of their
# own; their makers' files name classes of code that comes with them.
CLASSES_OF_TYPES = {
    "exaone": "LlamaForCausalLM",
    "internlm3": "LlamaForCausalLM",
    "iquestcoder": "LlamaForCausalLM",
    "sarvam_mla": "DeepseekV3ForCausalLM",
    "sarvam_moe": "Glm4MoeForCausalLM",
}
# Two-way classes that are another one but for their defaults, by model_type.
TWO_WAY_RELATIVES = {"eurobert": "llama", "llama_bidirec": "llama"}
# GGUF architectures that are another one but for the direction of attention, by label.
GGUF_RELATIVES = {
    label: family.gguf.architecture
    for family in FAMILIES
    if family.gguf is not None
    for label in family.gguf.two_way
}
TWO_WAY_KEYS = (("use_bidirectional_attention", True), ("is_causal", False))
_BASE_CLASSES = ("{}Model", "{}TextModel")


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Find a Hugging Face config's family, or None.

    Raises:
        UnsupportedModelError: it is an encoder, or a decoder that only reads.
    """
    architectures = _architectures(config)
    if only_reads(config):
        said = [key for key, value in TWO_WAY_KEYS if config.get(key) is value]
        why = f", as {said[0]} is {str(config[said[0]]).lower()}" if said else ""
        raise UnsupportedModelError(
            f"architecture {', '.join(map(str, architectures))} reads texts and writes none{why}: "
            "nothing else can be done with it here; use `appliance serve`, which serves its "
            "embeddings or ranking"
        )
    of_name = [f for f in FAMILIES if any(name in f.architectures for name in architectures)]
    if of_name:
        return next((family for family in of_name if family.covers(config)), None)
    if why := why_unread(config):
        named = ", ".join(map(str, architectures)) or str(config.get("model_type"))
        raise UnsupportedModelError(f"architecture {named} is not supported: {why}")
    if not architectures and (of_type := family_of_text(config)) is not None:
        return of_type
    if find_encoder(config) is not None:
        raise UnsupportedModelError(
            f"architecture {', '.join(map(str, architectures))} is an encoder, which generates no "
            "text; use `appliance serve`, which serves its embeddings and ranking"
        )
    return None


def unsupported(config: Mapping[str, Any], reason: str = "") -> UnsupportedModelError:
    """Build the error for a config without a family, which lists all families.

    Args:
        reason: why transformers' modules cannot serve it either.
    """
    supported = ", ".join(dict.fromkeys(n for family in FAMILIES for n in family.architectures))
    what = ", ".join(map(str, _architectures(config))) or str(config.get("model_type"))
    if not config.keys() & {"architectures", "model_type"}:
        return UnsupportedModelError(
            "config.json names neither an architecture nor a model_type; take the one of its makers"
        )
    why = f" by transformers' modules: {reason}" if reason else ""
    return UnsupportedModelError(
        f"architecture {what} is not supported{why}; choose a model among {supported}"
    )


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    named = config.get("architectures")
    known = CLASSES_OF_TYPES.get(str(config.get("model_type")))
    if known is not None:
        return [known]
    return named if isinstance(named, list) else []


def family_of_text(config: Mapping[str, Any]) -> Family | None:
    """Find the family of the text part of a larger model by its `model_type`; None: none has it."""
    named = str(config.get("model_type"))
    named = FAMILIES_OF_TEXTS[named].model_type if named in FAMILIES_OF_TEXTS else named
    found = next((family for family in FAMILIES if family.model_type == named), None)
    return found if found is not None and found.covers(config) else None


def family_of_gguf(metadata: Mapping[str, Any]) -> Family:
    """Find a GGUF file's family by its settings, or raise UnsupportedModelError."""
    architecture = str(metadata.get("general.architecture"))
    for kind in (str(metadata.get("general.type")), architecture):
        if kind in NO_MODELS:
            raise UnsupportedModelError("this GGUF file is {}; {}".format(*NO_MODELS[kind]))
    prefix = f"{architecture}."
    settings = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    named = [f for f in FAMILIES if f.gguf is not None and f.gguf.architecture == architecture]
    # Families that check settings come before one that takes every file.
    for family in reversed(named):
        if family.gguf is not None and family.gguf.is_of(settings):
            return family
    if (why := UNREAD_GGUF.get(architecture)) is None:
        known = dict.fromkeys(family.gguf.architecture for family in FAMILIES if family.gguf)
        why = "no reader of it; choose a file among " + ", ".join((*known, *GGUF_CLASSES))
    raise UnsupportedModelError(f"GGUF architecture {short(architecture)} is not supported: {why}")


def looks_both_ways(config: Mapping[str, Any]) -> bool:
    """Return True if a config's decoder attends in both directions."""
    return str(config.get("model_type")) in TWO_WAY_RELATIVES or any(
        config.get(key) is value for key, value in TWO_WAY_KEYS
    )


def only_reads(config: Mapping[str, Any]) -> bool:
    """Return True if a config is of a decoder that attends both ways, or has no head to write."""
    if find_encoder(config) is not None:
        return False
    judges = is_ranker(config) and reading_family(config) is not None
    return looks_both_ways(config) or judges or _is_base_class(config)


def reading_family(config: Mapping[str, Any]) -> Family | None:
    """Find the family that describes a decoder that only reads; None: none does."""
    kind = str(config.get("model_type"))
    return family_of_text({**config, "model_type": TWO_WAY_RELATIVES.get(kind, kind)})


def _is_base_class(config: Mapping[str, Any]) -> bool:
    named, family = _architectures(config), reading_family(config)
    if len(named) != 1 or family is None:
        return False
    stems = [name.removesuffix("ForCausalLM") for name in family.architectures]
    return named[0] in [form.format(stem) for stem in stems for form in _BASE_CLASSES]
