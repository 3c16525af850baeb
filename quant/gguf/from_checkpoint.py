"""Settings of a GGUF file for a Hugging Face checkpoint, proved by reading them back.

Keys are those of the GGUF specification (docs/gguf.md of the ggml project). A model whose spec or
tokens are not the same when read from the file is refused: so are settings that GGUF cannot say.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from appliance.errors import ApplianceError, QuantizeError
from appliance.model.gguf_tensors import FREQUENCY_DIVISORS, LONG_FACTORS, SHORT_FACTORS
from appliance.model.rope import Rope, distinct_ropes
from appliance.model.source import open_model
from appliance.model.spec import AttentionSpec, MLPSpec, RopeScaling, RopeSpec
from appliance.model.vision.families.registry import tower_family
from appliance.model.vision.source import open_tower
from appliance.model_files.checkpoint import read_config
from appliance.quant.formats.ggml_blocks import type_of_scheme
from appliance.quant.gguf.file_writer import PlannedFile, TypedTensor
from appliance.quant.gguf.mixes import MIXES
from appliance.quant.gguf.tensors import FileSetting, FileSettings, file_tensors, mapping_of
from appliance.quant.walk.places import is_plain
from appliance.tokenizer import Tokenizer
from appliance.tokenizer.from_folder import load_from_folder
from appliance.tokenizer.from_gguf import BYTE_LEVEL, SENTENCEPIECE
from appliance.tokenizer.word_rules import UNNAMED, WORD_RULES
from gguf import TokenType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec, LayerSpec
    from appliance.quant.run.options import QuantizeOptions
    from appliance.quant.run.plan import QuantizePlan
    from appliance.tokenizer.word_rules import WordRules

PREFIX = "tokenizer.ggml."
NO_ROPE = RopeSpec(theta=1.0, rotary_dim=0)
# A tokenizer splits each of these in its own way.
SAMPLES = (
    "It's 12345 o'clock, isn't it?  Two  spaces,\ttabs\n\n\nand lines.",
    "def add(a_b, c):\r\n    return a_b+c  # 3.14e-10\n",
    "Größe, naïve café, 東京タワー, здравствуйте, \u0645\u0631\u062d\u0628\u0627, 🙂👍🏽 — …",
    " leading and trailing ",
)


def plan_file(source: ModelSource, plan: QuantizePlan, options: QuantizeOptions) -> PlannedFile:
    """Plan the file, with settings and tokenizer of the model that is quantized.

    Raises:
        QuantizeError: no GGUF file of such a model is written here; says why.
    """
    tensors, method = file_tensors(source), options.method
    if method.needs_text and not all(map(is_plain, source.spec.layers)):
        raise QuantizeError(
            f"{source.path} has layers that are not attention and an MLP with gates, which"
            f" --method {method.value} does not quantize for --format gguf; use --method rtn"
        )
    planned = []
    stored = {tensor.name: tensor for tensor in plan.tensors}
    for tensor in tensors:
        found = stored[tensor.slot.name]
        (layout,) = found.stored
        if found.scheme is None:
            planned.append(TypedTensor.plain(tensor, layout))
        else:
            type_name = type_of_scheme(found.name, found.scheme)
            planned.append(TypedTensor(tensor, type_name, layout))
    is_file = source.path.is_file()
    settings = FileSettings.of_file(source.path) if is_file else settings_of(source)
    if not is_file:
        check_as_read(source, settings, planned)
    kind = FileSetting.of("general.file_type", MIXES[options.file_type].number)
    return PlannedFile.of(replace(settings, settings=(*settings.settings, kind)), planned)


def settings_of(source: ModelSource) -> FileSettings:
    """Describe a checkpoint in a folder.

    Raises:
        QuantizeError: its tokenizer cannot be described.
    """
    mapping, spec = mapping_of(source.family), source.spec
    assert mapping is not None, "it was looked at"
    attention, mlp = spec.layers[0].mixer, spec.layers[0].mlp
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MLPSpec)
    full = next((m for m in spec.attention_layers.values() if m.window is None), attention)
    windows = {m.window for m in spec.attention_layers.values()} - {None}
    found: dict[str, Any] = {
        "block_count": len(spec.layers),
        "context_length": spec.context_length,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": mlp.intermediate_size,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        f"attention.layer_norm{'' if spec.final_norm.centered else '_rms'}_epsilon": (
            spec.final_norm.eps
        ),
        "rope.dimension_count": full.rope.rotary_dim,
        "rope.freq_base": full.rope.theta,
        "vocab_size": spec.vocab_size,
        **_scaling(full.rope),
    }
    if windows:
        found["attention.sliding_window"] = windows.pop()
        if attention.rope.theta != full.rope.theta:
            found["rope.freq_base_swa"] = attention.rope.theta
    caps = {
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }
    found |= {key: cap for key, cap in caps.items() if cap is not None}
    label, more = label_of_text(source, mapping.architecture)
    found |= more
    prefix = f"{label}."
    settings = [
        FileSetting.of("general.type", "model"),
        FileSetting.of("general.name", source.path.resolve().name),
        *(FileSetting.of(prefix + key, value) for key, value in found.items()),
        *vocabulary_of(source.path, spec.num_embedded),
    ]
    return FileSettings(label, tuple(settings), _factors(full.rope))


def label_of_text(source: ModelSource, own: str) -> tuple[str, dict[str, Any]]:
    """Return the architecture of a folder's text, and settings that a tower asks of it.

    Args:
        own: the text's architecture without a tower.
    """
    config = read_config(source.path)
    family = tower_family(config)
    if family is None or family.clip is None:
        return own, {}
    label = family.clip.architecture_of(config["model_type"], own)
    tower = None if label is None else open_tower(source.path)
    if label is None or tower is None:
        return own, {}
    settings: dict[str, Any] = {}
    if (axes := tower.spec.text_axes) is not None:
        settings["rope.dimension_sections"] = [*axes.sections, 0]
    if tower.spec.taps:
        settings["n_deepstack_layers"] = len(tower.spec.taps)
    return label, settings


def _scaling(rope: RopeSpec) -> dict[str, Any]:
    match rope.scaling:
        case RopeScaling.LINEAR:
            return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
        case RopeScaling.YARN:
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": rope.factor,
                "rope.scaling.original_context_length": rope.original_context,
                "rope.scaling.yarn_beta_fast": rope.beta_fast,
                "rope.scaling.yarn_beta_slow": rope.beta_slow,
            }
        case RopeScaling.LONGROPE:
            return {
                "rope.scaling.original_context_length": rope.original_context,
                "rope.scaling.attn_factor": rope.attention_factor,
            }
    return {}


def _factors(rope: RopeSpec) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of factors that divide frequencies."""
    if rope.scaling is RopeScaling.LLAMA3:
        plain = _frequencies(replace(rope, scaling=RopeScaling.NONE), 0)
        return {FREQUENCY_DIVISORS: plain / _frequencies(rope, 0)}
    if rope.scaling is RopeScaling.LONGROPE:
        return {
            LONG_FACTORS: np.array(rope.long_factors, dtype=np.float32),
            SHORT_FACTORS: np.array(rope.short_factors, dtype=np.float32),
        }
    return {}


def check_as_read(
    source: ModelSource, settings: FileSettings, tensors: Sequence[TypedTensor]
) -> None:
    """Read the settings back from a file without weights.

    Raises:
        QuantizeError: the file would be another model; the message names what differs.
    """
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        path = Path(folder) / "without-weights.gguf"
        PlannedFile.of(settings, tensors).write_without_weights(path)
        try:
            read = open_model(path).spec
            theirs = Tokenizer.from_path(path)
        except ApplianceError as error:
            reason = str(error).replace(str(path), "the file")
            raise QuantizeError(f"{source.path} is not written as GGUF: {reason}") from error
    for what in _differences(source.spec, read):
        raise QuantizeError(
            f"{source.path} has a setting that its GGUF file cannot say: {what}; use a GGUF file"
            " of the same model as the base, or --format compressed-tensors"
        )
    _check_tokens(source.path, Tokenizer.from_path(source.path), theirs)


def _check_tokens(folder: Path, ours: Tokenizer, theirs: Tokenizer) -> None:
    for token_id in range(ours.vocab_size):
        if ours.token_bytes(token_id) != theirs.token_bytes(token_id):
            raise refusal(folder, f"a token {ours.token_text(token_id)!r}")
    for text in SAMPLES:
        one, other = (t.encode(text, add_special_tokens=True) for t in (ours, theirs))
        if one != other:
            raise refusal(folder, f"rules that split {text!r} into other tokens")


def _differences(ours: DecoderSpec, read: DecoderSpec) -> Iterator[str]:
    """Describe settings that differ; frequencies count, not how they are stated."""
    context = ours.context_length
    for one, other in zip(distinct_ropes(ours), distinct_ropes(read), strict=False):
        same = np.allclose(_frequencies(one, context), _frequencies(other, context), rtol=1e-4)
        if not same or abs(one.attention_factor - other.attention_factor) > 1e-4:
            yield f"rotary frequencies ({one.scaling.value})"
    if len(distinct_ropes(ours)) != len(distinct_ropes(read)):
        yield "rotary frequencies of some layers"
    for index, (layer, other_layer) in enumerate(zip(ours.layers, read.layers, strict=False)):
        yield from unlike(f"layer {index}", _without_rope(layer), _without_rope(other_layer))
    yield from unlike(
        "the model",
        replace(ours, layers=()),
        replace(read, layers=(), architecture=ours.architecture),
    )


def _without_rope(layer: LayerSpec) -> LayerSpec:
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec)
    return replace(layer, mixer=replace(mixer, rope=NO_ROPE))


def unlike(where: str, one: Any, other: Any) -> Iterator[str]:
    """Describe where two descriptions differ, down to their parts."""
    if is_dataclass(one) and type(one) is type(other):
        for part in fields(one):
            yield from unlike(
                f"{where}, {part.name}", getattr(one, part.name), getattr(other, part.name)
            )
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for ours, theirs in zip(one, other, strict=True):
            yield from unlike(where, ours, theirs)
    elif isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > 1e-6 * abs(one):
            yield f"{where} is {one}, and would be {other}"
    elif one != other:
        yield f"{where} is {one}, and would be {other}"


def _frequencies(rope: RopeSpec, context_length: int) -> NDArray[np.float32]:
    frequencies: NDArray[np.float32] = Rope.of(rope, context_length, None).frequencies.numpy()
    return frequencies


def vocabulary_of(folder: Path, vocab_size: int) -> list[FileSetting]:
    """Describe a folder's tokenizer.

    Args:
        vocab_size: rows of the embedding; ids without a token get a placeholder.

    Raises:
        ModelError: there is no tokenizer.json.
        QuantizeError: GGUF has no such tokenizer; the message names the part.
    """
    source = load_from_folder(folder)
    rules = json.loads(source.backend.to_str())
    model = rules["model"]
    if model["type"] != "BPE":
        raise refusal(folder, f"a {model['type']} model")
    is_bytes = not model.get("byte_fallback")
    if is_bytes and not model["merges"]:
        raise refusal(folder, "a vocabulary of bytes without merges")
    for content, index in _ids(rules):
        if index >= vocab_size:
            raise refusal(
                folder,
                f"a token {content!r} of id {index}, beyond the {vocab_size} rows of the embedding",
            )
    tokens, types = _tokens(rules, vocab_size, is_bytes=is_bytes)
    found: dict[str, Any] = {"model": BYTE_LEVEL if is_bytes else SENTENCEPIECE}
    if is_bytes:
        found["pre"] = _pre_tokenizer(folder, rules)
    else:
        found["pre"] = "default"
    found |= {"tokens": tokens, "token_type": types}
    if is_bytes:
        found["merges"] = [
            merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
        ]
    else:
        found["scores"] = [-float(index) for index in range(len(tokens))]
        found["add_space_prefix"] = _adds_space(rules)
    found["add_bos_token"] = Tokenizer.from_path(folder).add_bos
    ids = {
        "bos_token_id": source.bos_token_id,
        "eos_token_id": next(iter(source.eos_token_ids), None),
        "unknown_token_id": _id_of(tokens, model.get("unk_token")),
    }
    found |= {key: value for key, value in ids.items() if value is not None}
    settings = [FileSetting.of(PREFIX + key, value) for key, value in found.items()]
    template = source.chat_template
    if template is not None:
        settings.append(FileSetting.of("tokenizer.chat_template", template.source))
        if template.tool_source is not None:
            settings.append(
                FileSetting.of("tokenizer.chat_template.tool_use", template.tool_source)
            )
    return settings


def refusal(folder: Path, what: str) -> QuantizeError:
    return QuantizeError(
        f"the tokenizer of {folder} has {what}, which is not written to GGUF files; use a GGUF"
        " file of the same model as the base, or --format compressed-tensors"
    )


def _ids(rules: dict[str, Any]) -> Iterator[tuple[str, int]]:
    yield from rules["model"]["vocab"].items()
    yield from ((token["content"], token["id"]) for token in rules["added_tokens"])


def _tokens(
    rules: dict[str, Any], vocab_size: int, *, is_bytes: bool
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    for content, index in rules["model"]["vocab"].items():
        tokens[index] = content
        is_byte = not is_bytes and len(content) == 6 and content.startswith("<0x")
        types[index] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in rules["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    unknown = _id_of(tokens, rules["model"].get("unk_token"))
    if unknown is not None and not is_bytes:
        types[unknown] = TokenType.UNKNOWN
    return tokens, [int(kind) for kind in types]


def _id_of(tokens: list[str], content: str | None) -> int | None:
    return tokens.index(content) if content in tokens else None


def _pre_tokenizer(folder: Path, rules: dict[str, Any]) -> str:
    """Return the name of the rules that split words as the folder's do."""
    wanted = _comparable(rules)
    for name, known in WORD_RULES.items():
        if name != UNNAMED and _comparable(_as_json(known)) == wanted:
            return name
    raise refusal(folder, "rules of its own to split words")


def _as_json(known: WordRules) -> dict[str, Any]:
    backend = Backend(BPE(ignore_merges=known.ignore_merges))
    backend.pre_tokenizer = known.pre_tokenizer()
    if known.normalizer is not None:
        backend.normalizer = known.normalizer()
    rules: dict[str, Any] = json.loads(backend.to_str())
    return rules


def _comparable(rules: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the tokens: offsets do not, nor a sequence of one."""
    ignores = bool(rules["model"].get("ignore_merges"))
    return {
        "ignore_merges": ignores,
        "normalizer": list(_steps(rules["normalizer"], "normalizers")),
        "pre_tokenizer": list(_steps(rules["pre_tokenizer"], "pretokenizers")),
    }


def _steps(rule: dict[str, Any] | None, parts: str) -> Iterator[dict[str, Any]]:
    if rule is None:
        return
    if rule["type"] == "Sequence":
        for part in rule[parts]:
            yield from _steps(part, parts)
        return
    yield {key: value for key, value in rule.items() if key != "trim_offsets"}


def _adds_space(rules: dict[str, Any]) -> bool:
    normalizers = list(_steps(rules["normalizer"], "normalizers"))
    splitters = list(_steps(rules["pre_tokenizer"], "pretokenizers"))
    return any(step["type"] == "Prepend" for step in normalizers) or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in splitters
    )
