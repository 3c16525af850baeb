"""Opens decoders that only read texts: those that attend both ways, and those without a head.

Embedding models are made of decoders. `is_causal` false or `use_bidirectional_attention` lets a
query see what follows it, too, as transformers' masks have it; a base class such as Qwen3Model is
the decoder as it was, without a head that could write.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import UnsupportedModelError
from appliance.files import read_json
from appliance.gguf import GGUFFile
from appliance.kernels.weights.weight import dense
from appliance.model.encoder.gguf_families import check_pooling
from appliance.model.families.reader import ConfigReader, class_defaults
from appliance.model.families.registry import (
    FAMILIES,
    GGUF_RELATIVES,
    TWO_WAY_KEYS,
    TWO_WAY_RELATIVES,
    looks_both_ways,
    reading_family,
)
from appliance.model.source import open_unchecked
from appliance.model.spec import AttentionSpec, ScoreSpec
from appliance.model_files.checkpoint import CONFIG_NAME
from appliance.model_files.rankers import check_labels, is_ranker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec, LayerSpec

_NVIDIA = "llama_bidirec"  # whose head reads means and has a temperature
# Settings of such files that their decoder's family does not know.
_READ_HERE = ("attention.causal", "classifier.pooling_type")


def gguf_only_reads(metadata: Mapping[str, Any]) -> bool:
    """Return True if a GGUF file is of a decoder that attends in both directions."""
    label = str(metadata.get("general.architecture"))
    known = {family.gguf.architecture for family in FAMILIES if family.gguf is not None}
    is_causal = metadata.get(f"{label}.attention.causal") is not False
    return label in GGUF_RELATIVES or (label in known and not is_causal)


def open_decoder(path: Path, settings: Mapping[str, Any] | None = None) -> ModelSource:
    """Open a decoder that only reads, its tensors unchecked; they are `HostArray`.

    Args:
        settings: replace config.json's, or a GGUF file's metadata.

    Raises:
        CheckpointError: a setting is missing, or out of range.
        UnsupportedModelError: the architecture or a setting is not supported.
    """
    source = _open_folder(path, settings) if path.is_dir() else _open_gguf(path, settings)
    spec = source.spec
    if why := _why_not(spec):
        raise UnsupportedModelError(
            f"{path.name}: a {spec.architecture} decoder that only reads cannot be served: {why};"
            " choose another embedding model"
        )
    # Nothing is written, so a head would only take memory.
    spec = replace(spec, tied_head=True, head_bias=False)
    return replace(source, spec=spec, only_reads=True)


def _open_folder(path: Path, given: Mapping[str, Any] | None) -> ModelSource:
    config = read_json(path / CONFIG_NAME) if given is None else given
    two_way, halves = looks_both_ways(config), config.get("use_bidirectional_attention") is True
    family = reading_family(config)
    if family is None:
        raise UnsupportedModelError(
            f"{path.name}: model_type {config.get('model_type')!r} of {_named(config)} is not one "
            "of a decoder that is read here; choose another embedding model, or one of this kind "
            "that transformers has a class of"
        )
    kind = config["model_type"]
    usual = class_defaults(kind) if kind in TWO_WAY_RELATIVES else None
    settings = {} if usual is None else dict(usual.values)
    settings |= {key: config[key] for key in config if key not in dict(TWO_WAY_KEYS)}
    settings |= {
        "model_type": TWO_WAY_RELATIVES.get(kind, kind),
        "architectures": list(family.architectures[:1]),
        "tie_word_embeddings": False,
    }
    source = open_unchecked(path, in_torch=False, settings=settings)
    spec = _both_ways(source.spec, halves) if two_way else source.spec
    score = _score(config, str(path / CONFIG_NAME)) if is_ranker(config) else None
    return replace(source, spec=replace(spec, score=score))


def _score(config: Mapping[str, Any], origin: str) -> ScoreSpec:
    check_labels(config, origin)
    reader = ConfigReader(config, origin, class_defaults(config["model_type"]))
    if config["model_type"] != _NVIDIA:
        padding = reader.value("pad_token_id")
        return ScoreSpec(padding=padding if type(padding) is int else None)
    if reader.text("pooling", "avg") != "avg":
        raise reader.refuse("pooling", "avg")
    return ScoreSpec(mean=True, temperature=reader.number("temperature", 1.0))


def score_row(source: ModelSource) -> NDArray[np.float32] | None:
    """Read the row that judges texts, (hidden_size,), over its temperature; None without one."""
    if source.spec.score is None:
        return None
    row = dense(source.weights.load(f"{source.family.names.score}.weight"), "float32")
    found: NDArray[np.float32] = np.asarray(row)[0] / np.float32(source.spec.score.temperature)
    return found


def _open_gguf(path: Path, given: Mapping[str, Any] | None) -> ModelSource:
    file = GGUFFile(path, in_torch=False, vocabulary=False)
    file = file if given is None else file.with_metadata(given)
    check_pooling(file, ranks=False)
    metadata = file.metadata
    label = metadata["general.architecture"]
    relative = GGUF_RELATIVES.get(label, label)
    renamed = {
        relative + key.removeprefix(label) if key.startswith(f"{label}.") else key: value
        for key, value in metadata.items()
        if key.removeprefix(f"{label}.") not in _READ_HERE
    }
    source = open_unchecked(
        path, in_torch=False, settings=renamed | {"general.architecture": relative}
    )
    # llama.cpp's windows of such files are symmetric: half of them on each side.
    return replace(source, spec=_both_ways(source.spec, halves=True))


def _both_ways(spec: DecoderSpec, halves: bool) -> DecoderSpec:
    """Let queries see what follows them.

    Args:
        halves: a window lies half on each side; otherwise the whole of it on each.
    """

    def layer(one: LayerSpec) -> LayerSpec:
        if not isinstance(one.mixer, AttentionSpec):
            return one
        window = one.mixer.window
        reach = window if window is None or not halves else window // 2
        seen = None if reach is None else reach + 1
        return replace(one, mixer=replace(one.mixer, window=seen, looks_ahead=True))

    return replace(spec, layers=tuple(map(layer, spec.layers)))


def _why_not(spec: DecoderSpec) -> str:
    mixers = [layer.mixer for layer in spec.layers]
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    if len(attention) < len(mixers):
        return "not all of its layers are plain attention"
    if len({(one.num_kv_heads, one.head_dim) for one in attention}) > 1:
        return "the heads of its layers differ"
    if any(one.kv_layer is not None or one.sinks for one in attention):
        return "its attention reads other layers' keys, or has sinks"
    return "its experts are not read here" if spec.has_experts else ""


def _named(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return ", ".join(map(str, named)) if isinstance(named, list) else "no named architecture"
