"""Opens a model on disk in any supported format, and checks it before loading weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance.errors import ApplianceError, CheckpointError, UnsupportedModelError
from appliance.gguf import GGUFFile, starts_as_gguf
from appliance.model.expert_tensors import separate_experts
from appliance.model.fallback.gguf_classes import GGUF_CLASSES, WeightsOfClass
from appliance.model.families.limits import check_quantization
from appliance.model.families.registry import (
    family_of_gguf,
    family_of_text,
    find_family,
    unsupported,
)
from appliance.model.families.text_parts import family_settings, text_settings
from appliance.model.gguf_tensors import names_of_file, with_stored_biases
from appliance.model.gguf_weights import GGUFReader, GGUFWeights
from appliance.model.leftovers import leftover_notes, leftover_problems, leftovers
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import TensorSlot, slots_beside, tensor_slots
from appliance.model.text_part import TextPart, names_in, not_found
from appliance.model.tied_ends import (
    StoredEnds,
    apart_note,
    head_as_embedding,
    stored_ends,
    untied,
)
from appliance.model_files.checkpoint import (
    CONFIG_NAME,
    QUANTIZATION,
    SafetensorsFolder,
    read_config,
)
from appliance.model_files.gguf_names import is_gguf
from appliance.quant.formats import WeightReader, is_read, open_weights, trellis
from appliance.quant.formats.exl3 import Exl3Weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Set
    from pathlib import Path

    from appliance.model.fallback.description import FallbackModel
    from appliance.model.families.family import Family
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checked model whose weights can be read one by one.

    Attributes:
        family: gives the names of its tensors.
        config: its Hugging Face config; for a GGUF file, the equivalent one.
        weights: tensors by their Hugging Face names; packed ones keep their codes.
        fallback: transformers' model, if no family supports it; else None.
        notes: on what is unusual in its files, one line each; those on tensors are of `weights`.
        only_reads: it writes no texts, though it is described as a decoder.
    """

    path: Path
    family: Family
    config: dict[str, Any]
    spec: DecoderSpec
    weights: WeightReader
    fallback: FallbackModel | None = None
    notes: tuple[str, ...] = ()
    only_reads: bool = False

    @property
    def is_trellis(self) -> bool:
        """True if its weights are of the trellis format, whose codes are no integers."""
        return (self.config.get(QUANTIZATION) or {}).get("quant_method") == trellis.METHOD

    def settings(self) -> ModelSettings:
        """Read the settings again, to learn which of them counted."""
        return ModelSettings(_read_by(self.family, self.config), self.spec)

    def slots(self) -> list[TensorSlot]:
        """List every tensor that the decoder reads, by its Hugging Face name."""
        if self.fallback is not None:
            return list(self.fallback.slots)
        return tensor_slots(self.spec, self.family.names)

    def num_parameters(self) -> int:
        """Count the weights that the decoder reads, packed or not; a tied head's once."""
        return sum(math.prod(slot.shape) for slot in self.slots())


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of a folder, read: those assumed and without effect, and what they describe."""

    reader: ConfigReader
    spec: DecoderSpec


def open_model(path: Path, *, in_torch: bool = True) -> ModelSource:
    """Open a GGUF file, or a folder with config.json and safetensors.

    Args:
        in_torch: read tensors as torch's; otherwise as `HostArray`, which any executor takes.

    Raises:
        CheckpointError: a part is missing, cut or of the wrong shape; names the first.
        UnsupportedModelError: the architecture or a setting is not supported.
    """
    source = open_unchecked(path, in_torch=in_torch)
    for problem in tensor_problems(source):
        raise problem
    return replace(source, notes=(*source.notes, *leftover_notes(leftovers(source))))


def open_unchecked(
    path: Path, *, in_torch: bool = True, settings: Mapping[str, Any] | None = None
) -> ModelSource:
    """Open a model as `open_model` does, but leave its tensors unchecked.

    Args:
        settings: replace config.json's, or a GGUF file's metadata, to learn what depends on them.
    """
    if path.is_dir():
        return _open_folder(path, in_torch, settings)
    if path.is_file() and (is_gguf(path) or starts_as_gguf(path)):
        return _open_gguf(path, in_torch, settings)
    raise CheckpointError(f"{path} is neither a .gguf file nor a folder with config.json; give one")


def read_settings(path: Path) -> ModelSettings | None:
    """Read a folder's settings without its weights; None if no family describes the model.

    Raises:
        CheckpointError: config.json is missing or damaged, or a setting is.
        UnsupportedModelError: the architecture or a setting is not supported.
    """
    whole = read_config(path)
    text = text_settings(whole)
    family = find_family(whole) if text is None else family_of_text(text)
    if family is None:
        return None
    config = dict(whole) if text is None else text
    spec = family.spec(config, str(path / CONFIG_NAME))
    return ModelSettings(_read_by(family, config), spec)


def _read_by(family: Family, config: Mapping[str, Any]) -> ConfigReader:
    reader = family.reader(config)
    family.read(reader)
    return reader


def _open_folder(path: Path, in_torch: bool, settings: Mapping[str, Any] | None) -> ModelSource:
    folder = SafetensorsFolder(path, in_torch=in_torch)
    folder.config = folder.config if settings is None else dict(settings)
    origin = str(path / CONFIG_NAME)
    text = text_settings(folder.config)
    is_part, config = text is not None, text or dict(folder.config)
    family = family_of_text(config) if is_part else find_family(config) or _of_merged(config)
    if family is None:
        return _open_fallback(folder, config, origin, folder.config if is_part else None)
    weights = _open_weights(folder, config, origin)
    family = replace(family, names=names_in(weights, family.names, family.other_names))
    if is_part:
        # Which part of older files says so differs by class; one without a head is tied.
        if f"{family.names.head}.weight" not in weights.tensor_names():
            config["tie_word_embeddings"] = True
        config["architectures"] = list(family.architectures[:1])
    spec = family.spec(config, origin)
    config = family_settings(config, family.model_type) if is_part else config
    if isinstance(weights, Exl3Weights):
        wanted = {slot.name: slot.shape for slot in tensor_slots(spec, family.names)}
        # Embedding and head are apart there, also where the settings tie them.
        wanted[f"{family.names.head}.weight"] = (spec.vocab_size, spec.hidden_size)
        weights.fit(wanted)
    if spec.has_experts:
        weights = separate_experts(weights, spec, family.names, path.name)
    present = weights.tensor_names()
    # With the embedding, which nearly every folder has, the many names need not be listed.
    if present and f"{family.names.embedding}.weight" not in present:
        own = {slot.name for slot in tensor_slots(spec, family.names)}
        if (own - {f"{family.names.head}.weight"}).isdisjoint(present):
            raise UnsupportedModelError(
                not_found(path.name, family.model_type, family.names, present)
            )
    if is_part:
        weights = TextPart(weights, family.names)
    source = ModelSource(path, family, config, spec, weights, notes=_of_indexer(spec))
    return _with_stored_ends(source, folder) if spec.tied_head else source


def _of_indexer(spec: DecoderSpec) -> tuple[str, ...]:
    """Say how long contexts can be, of a model that chooses the positions that it sees."""
    chosen = [m.chosen for m in spec.latent_layers.values() if m.chosen is not None]
    if not chosen:
        return ()
    return (
        f"contexts end at {spec.context_length} tokens: so many positions its lightning indexer"
        " chooses for each token, and attention to chosen positions alone is not computed here",
    )


def _with_stored_ends(source: ModelSource, folder: SafetensorsFolder) -> ModelSource:
    """Keep the head of a tied model that the file stores with other values, or alone."""
    names, weights = source.family.names, source.weights
    match stored_ends(folder, weights, names):
        case StoredEnds.HEAD_ONLY:
            return replace(source, weights=head_as_embedding(weights, names))
        case StoredEnds.APART:
            spec = replace(source.spec, tied_head=False)
            notes = (*source.notes, apart_note(names))
            return replace(source, spec=spec, config=untied(source.config), notes=notes)
    return source


def _of_merged(config: Mapping[str, Any]) -> Family | None:
    """Find the family of a text that merging tools left alone under its whole's architecture."""
    named = config.get("architectures")
    is_whole = isinstance(named, list) and any(
        str(name).endswith("ForConditionalGeneration") for name in named
    )
    return family_of_text(config) if is_whole else None


def _open_weights(folder: SafetensorsFolder, config: dict[str, Any], origin: str) -> WeightReader:
    quantization = config.get("quantization_config")
    if is_read(quantization):
        check_quantization(quantization, origin)
    return open_weights(folder)


def _open_fallback(
    folder: SafetensorsFolder, config: dict[str, Any], origin: str, whole: dict[str, Any] | None
) -> ModelSource:
    """Open a model, or the text part of one, that transformers describes; loads both libraries."""
    from appliance.model.fallback.description import describe
    from appliance.model.fallback.renamed import RenamedWeights

    weights = _open_weights(folder, config, origin)
    stored = weights.tensor_names()
    notes: tuple[str, ...] = ()
    try:
        fallback, spec = describe(config, origin, stored, whole=whole)
        own = RenamedWeights(weights, fallback.stored, is_part=whole is not None)
        names = fallback.family.names
        ends = stored_ends(folder, own, names, fallback.stored) if spec.tied_head else None
        if ends is StoredEnds.APART:
            config, notes = untied(config), (apart_note(names),)
            whole = None if whole is None else untied(whole)
            fallback, spec = describe(config, origin, stored, whole=whole)
    except UnsupportedModelError as error:
        raise unsupported(config, str(error)) from error
    if whole is not None and fallback.is_whole:
        config = dict(whole)
    if isinstance(weights, Exl3Weights):
        places = ((fallback.stored.get(slot.name), slot.shape) for slot in fallback.slots)
        weights.fit({place: shape for place, shape in places if isinstance(place, str)})
    found = head_as_embedding(own, names) if ends is StoredEnds.HEAD_ONLY else own
    return ModelSource(folder.path, fallback.family, config, spec, found, fallback, notes)


def _open_gguf(path: Path, in_torch: bool, settings: Mapping[str, Any] | None) -> ModelSource:
    file = GGUFFile(path, in_torch=in_torch, vocabulary=False)
    file = file if settings is None else file.with_metadata(settings)
    label = str(file.metadata.get("general.architecture"))
    if label in GGUF_CLASSES:
        return _open_gguf_class(file, label)
    family = family_of_gguf(file.metadata)
    assert family.gguf is not None
    config = family.gguf.config(file)
    config |= {"architectures": list(family.architectures[:1]), "model_type": family.model_type}
    if family.draft_head is not None:
        heads = file.metadata.get(f"{label}.nextn_predict_layers")
        config |= {family.draft_head.count: heads} if heads else {}
    present = set(file.tensor_names())
    own, stored = names_of_file(family, present)
    spec = with_stored_biases(family.spec(config, str(path)), stored, present)
    weights = GGUFWeights(file, family, spec)
    return ModelSource(file.path, replace(family, names=own), config, spec, weights)


def _open_gguf_class(file: GGUFFile, label: str) -> ModelSource:
    """Open a file of a class that transformers' modules run; loads both libraries."""
    from appliance.model.fallback.description import describe

    found = GGUF_CLASSES[label]
    config = found.settings(file, label)
    places = found.places(file, config["num_hidden_layers"])
    try:
        fallback, spec = describe(config, str(file.path), list(places))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{file.path.name}: {error}; use another file of the model, or serve this one with"
            " llama.cpp"
        ) from error
    weights = WeightsOfClass(file, found, places, fallback.slots)
    return ModelSource(file.path, fallback.family, config, spec, weights, fallback)


def tensor_problems(source: ModelSource) -> Iterator[CheckpointError]:
    """Find every tensor that is missing, of another shape, or without a place in the model."""
    present = set(source.weights.tensor_names())
    yield from _slot_problems(source, source.slots(), present)
    if isinstance(source.weights, GGUFReader):
        for name in source.weights.unplaced():
            yield CheckpointError(
                f"{source.path.name}: tensor {name} has no place in a {source.spec.architecture} "
                f"model of {len(source.spec.layers)} layers, and an answer without it would be "
                "another model's; use a file that llama.cpp's converter made"
            )
        return
    yield from leftover_problems(source, leftovers(source))


def check_slots(source: ModelSource, slots: Iterable[TensorSlot], present: Set[str]) -> None:
    """Raise CheckpointError for the first tensor that is missing or of another shape."""
    for problem in _slot_problems(source, slots, present):
        raise problem


def _slot_problems(
    source: ModelSource, slots: Iterable[TensorSlot], present: Set[str]
) -> Iterator[CheckpointError]:
    weights = source.weights
    is_gguf = isinstance(weights, GGUFReader)  # whose tensors are listed at its start
    advice = (
        "use another file of the model"
        if is_gguf
        else "take config.json and weights of one revision"
    )
    for slot in slots:
        known = weights.usual_name(slot.name) if isinstance(weights, GGUFReader) else slot.name
        where = f"{source.path.name}: tensor {known}"
        if slot.name not in present:
            yield CheckpointError(f"{where} is missing{_asked_for(source, slot)}; {advice}")
            continue
        shape = tuple(weights.shape(slot.name))
        if shape != slot.shape:
            yield CheckpointError(
                f"{where} has shape {shape}, but the model's settings ask for "
                f"{slot.shape}{_named(source, slot)}; {advice}"
            )


def _named(source: ModelSource, slot: TensorSlot) -> str:
    """Name the settings that a shape depends on; not for GGUF files, whose names differ."""
    if source.path.is_file() or source.fallback is not None:
        return ""
    settings = deciding_settings(source.family, source.config, slot)
    return f" with {settings} in {CONFIG_NAME}" if settings else ""


def _asked_for(source: ModelSource, slot: TensorSlot) -> str:
    """Say why a tensor is expected."""
    if source.fallback is not None:
        return (
            f", which {source.fallback.name} of transformers reads; the checkpoint may have a form"
            " that is not read here"
        )
    if slot.expert is None or slot.layer is None:
        return ""
    mlp = source.spec.layers[slot.layer].mlp
    assert isinstance(mlp, ExpertsSpec)
    count = mlp.router.num_experts
    keys = [key for key, value in source.config.items() if "expert" in key and value == count]
    named = f" with {keys[0]} = {count}" if keys and source.path.is_dir() else ""
    return f", but the model's settings ask for {count} experts in this layer{named}"


def deciding_settings(family: Family, config: Mapping[str, Any], slot: TensorSlot) -> str:
    """List the settings that a tensor's shape depends on, such as "conv_L_cache = 5".

    Returns:
        An empty string if there are none.
    """
    found = [
        f"{key} = {value}"
        for key, value in sorted(config.items())
        if type(value) is int and value > 0 and _decides(family, config, slot, key, value)
    ]
    return ", ".join(found[:_MOST_NAMED])


def _decides(
    family: Family, config: Mapping[str, Any], slot: TensorSlot, key: str, value: int
) -> bool:
    for other in (2 * value, value // 2):  # one of them may contradict other settings
        try:
            spec = family.spec({**config, key: other})
        except ApplianceError:
            continue
        shapes = {beside.name: beside.shape for beside in slots_beside(spec, family.names, slot)}
        if slot.name in shapes:
            return shapes[slot.name] != slot.shape
    return False
