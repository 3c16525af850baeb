"""Finds a model that transformers knows and we do not, and describes it to the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from appliance.errors import UnsupportedModelError, one_line
from appliance.kernels.activation import Activation
from appliance.model.fallback.conversion import names_in_model, names_of_text, renamed
from appliance.model.fallback.decoder import SERVING, register
from appliance.model.fallback.experts import (
    IMPLEMENTATION,
    are_apart,
    expert_slots,
    has_experts,
)
from appliance.model.fallback.experts import register as register_experts
from appliance.model.fallback.matrices import StoredMatrices
from appliance.model.fallback.measure import ProbeResult, measured, probe
from appliance.model.fallback.modules import fill_buffers
from appliance.model.families.family import Family
from appliance.model.families.limits import RANGES, check_spec, in_words, wrong
from appliance.model.families.registry import CLASSES_OF_TYPES
from appliance.model.families.text_parts import SECTIONS
from appliance.model.names import TensorNames
from appliance.model.spec import DecoderSpec, LayerSpec, MLPSpec, NormSpec
from appliance.model.tensors import Role, TensorSlot

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from appliance.model.fallback.renamed import Stored
    from appliance.model.families.reader import ConfigReader

_LAYER = re.compile(r"^(.*?\.)(\d+)\.")
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# What would let a checkpoint choose code, or what we read ourselves.
_NOT_FOR_TRANSFORMERS = {
    "quantization_config", "auto_map", "attn_implementation", "experts_implementation",
}  # fmt: skip
_FLOAT = "__float__"
# Of a class that runs by caches of its own: what names the longest context, and the context where
# nothing does, as a state has no longest one.
_CONTEXTS = (
    "max_position_embeddings", "model_max_length", "max_seq_len", "context_length",
    "seq_length", "max_sequence_length", "n_positions", "n_ctx",
)  # fmt: skip
_UNNAMED_CONTEXT = 32768
_CROSS_ATTENTION = {"encoder_attn", "cross_attn", "crossattention"}  # names of modules
_OWN_ROPES = {"dynamic", "longrope"}  # whose angles depend on the longest sequence of a step


@dataclass(frozen=True, slots=True)
class FallbackModel:
    """A model as transformers knows it.

    Attributes:
        name: its class.
        config: transformers' own.
        attention: modules that attend, in the order of the layers.
        family: names of its ends and layers, for what asks a family.
        slots: tensors that its checkpoint must hold.
        between: names of matrices that are no linears, which have the type of activations.
        read: names of linears whose matrix a module reads without calling them.
        matrices: tensors that hold linears inputs first, or many in one.
        stored: what the checkpoint has, by the names of the model.
        ignored: patterns of tensors in checkpoints that it does not read.
        is_whole: the class has other parts as well, which are left out.
        is_one_by_one: those are presented as matrices of their own, outputs first.
        inside: modules and their attributes that hold a part of what a sequence has behind it, of a
            class with caches of its own.
    """

    name: str
    config: Any
    attention: tuple[str, ...]
    family: Family
    slots: tuple[TensorSlot, ...]
    between: frozenset[str]
    read: frozenset[str]
    matrices: tuple[StoredMatrices, ...]
    stored: dict[str, Stored]
    ignored: tuple[str, ...]
    is_whole: bool = False
    is_one_by_one: bool = False
    inside: tuple[tuple[str, str], ...] = ()

    def build(self) -> Any:
        """Build its modules without memory, on the device `meta`."""
        attention = SERVING if self.attention else None
        return build_empty(self.name, self.config, attention, is_whole=self.is_whole)

    def is_ignored(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)


def class_of(config: Mapping[str, Any], *, is_part: bool = False) -> str | None:
    """Return the class by which transformers serves a config as a causal language model.

    Without code from the checkpoint; None if there is none. A text part is known by its
    `model_type` alone, for `architectures` names the whole; so is a config without any.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named, kind = config.get("architectures"), str(config.get("model_type"))
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if not isinstance(found, str) or is_part or not named or kind in CLASSES_OF_TYPES:
        return found if isinstance(found, str) else None
    # Makers write MPTForCausalLM and PhiMoEForCausalLM for MptForCausalLM and PhimoeForCausalLM.
    names = [str(name).lower() for name in named] if isinstance(named, list) else []
    return found if found.lower() in names else None


def class_of_whole(config: Mapping[str, Any]) -> str | None:
    """Return the class by which transformers serves a model of several parts; None without one."""
    from transformers.models.auto import modeling_auto

    kind = str(config.get("model_type"))
    for names in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        found = getattr(modeling_auto, f"MODEL_FOR_{names}_MAPPING_NAMES", {}).get(kind)
        if isinstance(found, str):
            return found
    return None


def describe(
    config: Mapping[str, Any],
    origin: str,
    stored: list[str],
    *,
    whole: Mapping[str, Any] | None = None,
) -> tuple[FallbackModel, DecoderSpec]:
    """Describe the model of a Hugging Face config.

    A text part is served by the class of its own, if the checkpoint has the tensors of that by
    other prefixes, and else by the class of the whole, whose other parts are left out.

    Args:
        origin: the settings' file, for messages.
        stored: names of the checkpoint's tensors.
        whole: settings of the model whose text part the config is of; None if it is text alone.

    Raises:
        CheckpointError: a setting is out of range.
        UnsupportedModelError: transformers has no class for it, or the engine cannot serve it so.
    """
    alone = class_of(config, is_part=whole is not None)
    outer = None if whole is None else class_of_whole(whole)
    if alone is None and outer is None:
        raise UnsupportedModelError(_why_unknown(config, is_part=whole is not None))
    _check_numbers(config, origin)
    _check_settings(config)
    if alone is not None:
        found = _described_as(alone, config, origin, stored, is_part=whole is not None)
        if outer is None or not _missing(*found):
            return found
    assert outer is not None
    assert whole is not None
    given = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    if not any(isinstance(whole.get(key), dict) for key in SECTIONS):
        given["text_config"] = dict(config)  # whose settings lie beside the others
    return _described_as(outer, {**whole, **given}, origin, stored, is_whole=True)


def _missing(fallback: FallbackModel, spec: DecoderSpec) -> set[str]:
    """Return the tensors that the checkpoint lacks; a tied head may stand for the embedding."""
    missing = {slot.name for slot in fallback.slots} - fallback.stored.keys()
    names = fallback.family.names
    if spec.tied_head and f"{names.head}.weight" in fallback.stored:
        missing.discard(f"{names.embedding}.weight")
    return missing


def _described_as(
    name: str,
    config: Mapping[str, Any],
    origin: str,
    stored: list[str],
    *,
    is_part: bool = False,
    is_whole: bool = False,
) -> tuple[FallbackModel, DecoderSpec]:
    settings = _config_of(config, origin)
    if hasattr(settings, "rescale_every"):
        settings.rescale_every = 0  # RWKV's guard of 16 bits, which halves its weights as it runs
    model = build_empty(name, settings, SERVING, is_whole=is_whole)
    text = config.get("text_config", config) if is_whole else config
    _check_modules(model)
    _check_ropes(text, model)
    names = names_of_text(model, stored) if is_part else {name: name for name in stored}
    found = renamed(names_in_model(model, names), names)
    if is_whole:
        found = _of_body(found, model)
    described = _Described(name, settings, model, found, body_of(model, is_whole=is_whole))
    try:
        fallback, spec = _on_pages(described, text)
    except UnsupportedModelError as error:
        fallback, spec = _with_own_caches(described, error, is_whole=is_whole)
    check_spec(spec, origin)
    fill_buffers(model, torch.device("cpu"))  # what has no value would be found when it is loaded
    return replace(fallback, is_whole=is_whole), spec


@dataclass(frozen=True, slots=True)
class _Described:
    """A class of transformers' without weights, and what the checkpoint has for it."""

    name: str
    config: Any
    model: Any
    stored: dict[str, Stored]
    body: Any


def _on_pages(described: _Described, text: Mapping[str, Any]) -> tuple[FallbackModel, DecoderSpec]:
    """Describe a model whose layers ask the engine's attention, over its cache.

    Raises:
        UnsupportedModelError: they do otherwise.
    """
    if text.get("alibi"):
        raise UnsupportedModelError("its positions are biases of attention (alibi)")
    for kinds in (text, described.config.get_text_config().to_dict()):
        _check_layer_types(kinds.get("layer_types"))
    if getattr(described.model, "_is_stateful", False):
        raise UnsupportedModelError("it has recurrent layers")
    return _described(described, probe(described.model, described.body))


def _with_own_caches(
    described: _Described, why: UnsupportedModelError, *, is_whole: bool
) -> tuple[FallbackModel, DecoderSpec]:
    """Describe a model each of whose sequences has a cache of the class's own.

    Args:
        why: it does not run over the engine's cache.

    Raises:
        UnsupportedModelError: it does not run so either.
    """
    name, config = described.name, described.config
    text = config.get_text_config()
    try:
        model = build_empty(name, config, None, is_whole=is_whole)
        context, has_limit = _own_context(text)
        body = body_of(model, is_whole=is_whole)
        way = measured(model, body, context, str(why), has_limit=has_limit)
        layers = _layers_of(body)
        if layers is None:
            raise UnsupportedModelError("it has no list of layers")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{why}; and by caches of its own class: {error}") from why
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{why}; and it has no head") from why
    read = frozenset(
        part
        for part, module in model.named_modules()
        if is_linear(module) and part not in way.called
    )
    slots, between, matrices = _slots(model, described.stored.keys(), read)
    widest = max(max(slot.shape, default=1) for slot in slots if slot.layer is not None)
    mlp = MLPSpec(intermediate_size=widest, activation=Activation.SILU)  # for its width alone
    spec = DecoderSpec(
        architecture=f"{name} of transformers",
        hidden_size=way.hidden_size,
        vocab_size=head.weight.shape[0],
        context_length=context,
        layers=(LayerSpec(mixer=None, mlp=mlp, norm=NormSpec(eps=1e-6)),) * len(layers),
        final_norm=NormSpec(eps=1e-6),
        tied_head=head.weight is model.get_input_embeddings().weight,
        own_cache=way.spec,
    )
    names = {id(module): found for found, module in model.named_modules()}
    family = _family(name, model, f"{names[id(layers)]}.0.")
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    given = (read, matrices, described.stored, ignored)
    return FallbackModel(name, config, (), family, slots, between, *given, inside=way.inside), spec


def _layers_of(body: Any) -> Any:
    """Return the longest list of modules, which the layers are."""
    lists = [part for part in body.modules() if isinstance(part, nn.ModuleList) and len(part)]
    return max(lists, key=len, default=None)


def _own_context(config: Any) -> tuple[int, bool]:
    """Return the longest context, and True if a setting names it."""
    for key in _CONTEXTS:
        length = getattr(config, key, None)
        if isinstance(length, int) and not isinstance(length, bool) and length > 1:
            rope = getattr(config, "rope_parameters", None)
            is_yarn = isinstance(rope, dict) and rope.get("rope_type") == "yarn"
            return (_context(config) if is_yarn else length), True
    return _UNNAMED_CONTEXT, False


def build_empty(name: str, config: Any, attention: str | None, *, is_whole: bool = False) -> Any:
    """Build a model whose parameters take no memory; its buffers are empty as well.

    Args:
        attention: by what its layers attend; None is transformers' choice.
        is_whole: leave out what is beside the text.
    """
    import transformers

    register()
    register_experts()
    config._attn_implementation = attention
    config._experts_implementation = IMPLEMENTATION
    config.get_text_config()._experts_implementation = IMPLEMENTATION
    try:
        with torch.device("meta"):
            model = getattr(transformers, name)(config).eval()
    except KeyError as error:  # from a table of kinds, such as activations
        if attention is not None and error.args == (attention,):
            # GPT-Neo's class has a table of its own kinds of attention, and asks for no other.
            return build_empty(name, config, None, is_whole=is_whole)
        raise UnsupportedModelError(
            f"{name} of transformers knows no kind {error}, which a setting names"
        ) from error
    except Exception as error:  # its classes raise what they like for settings that are wrong
        raise UnsupportedModelError(
            f"{name} of transformers cannot be built ({type(error).__name__}: {one_line(error)})"
        ) from error
    if is_whole:
        body, outer = model.get_decoder(), model.get_submodule(model.base_model_prefix)
        for part, module in list(outer.named_children()):
            if all(inner is not body for inner in module.modules()):
                delattr(outer, part)
    return model


def body_of(model: Any, *, is_whole: bool) -> Any:
    """Return what is called for the hidden states of text."""
    return model.get_decoder() if is_whole else getattr(model, model.base_model_prefix)


def _of_body(stored: dict[str, Stored], model: Any) -> dict[str, Stored]:
    """Leave out what the checkpoint has of a whole's other parts."""
    names = {id(module): name for name, module in model.named_modules()}
    body, own = f"{names[id(model.get_decoder())]}.", model.state_dict().keys()
    return {name: of for name, of in stored.items() if name.startswith(body) or name in own}


def _why_unknown(config: Mapping[str, Any], *, is_part: bool) -> str:
    if "auto_map" in config:
        return (
            "transformers knows no class of its own for it, and code that comes with a checkpoint"
            " (auto_map) is never run"
        )
    model_type = config.get("model_type")
    if is_part:
        return (
            f"transformers knows no causal language model for a text part of model_type"
            f" {model_type!r}"
        )
    return f"transformers knows no causal language model of model_type {model_type!r} by that name"


def _check_numbers(config: Mapping[str, Any], origin: str) -> None:
    """Check the numbers that decide how much is built."""
    for key, value in config.items():
        usual = RANGES.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if usual is not None and is_number and value and value not in usual:
            raise wrong(origin, key, value, f"a number {in_words(usual)}")


def _check_settings(config: Mapping[str, Any]) -> None:
    """Refuse by name what is more than one decoder that looks back."""
    for key in ("is_encoder_decoder", "add_cross_attention"):
        if config.get(key):
            raise UnsupportedModelError(f"{key} = {config[key]!r} is not honoured")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("it attends in both directions (is_causal)")


def _check_modules(model: Any) -> None:
    """Refuse an encoder, and the half of a model that reads what an encoder says."""
    for name, module in model.named_modules():
        if getattr(module, "is_decoder", None) is False:
            raise UnsupportedModelError(
                "is_decoder = False: its layers attend in both directions, as those of an encoder"
            )
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise UnsupportedModelError(
                "it counts positions from the number of its padding token, as RoBERTa does, which"
                " is not honoured"
            )
        if name.rpartition(".")[2] in _CROSS_ATTENTION:
            raise UnsupportedModelError(
                f"{name} attends to what an encoder says, and there is none; choose a model that"
                " only decodes"
            )


def _check_layer_types(kinds: object) -> None:
    for kind in kinds if isinstance(kinds, list) else []:
        if kind not in _KNOWN_LAYERS:
            raise UnsupportedModelError(
                f"layer_types has {kind!r}: only layers of attention alone are served so, to all"
                " earlier positions or a window of them, no recurrent, chunked, compressed or"
                " indexed ones"
            )


def _check_ropes(config: Mapping[str, Any], model: Any) -> None:
    """Refuse rotations that depend on the length of a sequence."""
    # HunYuan's, which are called dynamic, are fixed by their alpha.
    has_fixed = any(hasattr(part, "compute_ntk_alpha_rope_parameters") for part in model.modules())
    for key in ("rope_parameters", "rope_scaling"):
        section = config.get(key)
        parts = section.values() if isinstance(section, dict) else ()
        for part in (section, *parts):
            kind = part.get("rope_type", part.get("type")) if isinstance(part, dict) else None
            is_fixed = has_fixed and isinstance(part, dict) and part.get("alpha")
            if kind in _OWN_ROPES and not is_fixed:
                raise UnsupportedModelError(
                    f"{key}.rope_type = {kind!r} turns all sequences of a step by the longest one"
                )


def _config_of(config: Mapping[str, Any], origin: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**_for_transformers(config))
    except Exception as error:  # its classes raise what they like for settings that are wrong
        raise UnsupportedModelError(f"transformers refuses {origin}: {one_line(error)}") from error


def _for_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _in_python(value)
        for key, value in config.items()
        if key not in _NOT_FOR_TRANSFORMERS and not key.startswith("_")
    }


def _in_python(value: Any) -> Any:
    """Return a setting without what transformers writes for numbers that JSON lacks."""
    if isinstance(value, dict):
        return float(value[_FLOAT]) if value.keys() == {_FLOAT} else _for_transformers(value)
    return [_in_python(item) for item in value] if isinstance(value, list) else value


def _described(described: _Described, probed: ProbeResult) -> tuple[FallbackModel, DecoderSpec]:
    name, config, model = described.name, described.config, described.model
    stored = described.stored
    attention = probed.attention
    config_of_text = config.get_text_config()
    num_layers = config_of_text.num_hidden_layers
    if len(attention) != num_layers:
        raise UnsupportedModelError(
            f"{len(attention)} of its {num_layers} layers (num_hidden_layers) ask for attention;"
            " the others are recurrent, or attend in a way of their own"
        )
    places = [_LAYER.match(part) for part in attention]
    if [int(place[2]) for place in places if place] != list(range(num_layers)):
        raise UnsupportedModelError("its layers do not attend one after another")
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv1d)]
    if convolutions:
        raise UnsupportedModelError("it has convolutions over positions (Conv1d)")
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    read = frozenset(
        part
        for part, module in model.named_modules()
        if is_linear(module) and part not in probed.called
    )
    slots, between, matrices = _slots(model, stored.keys(), read)
    widest = max(max(slot.shape, default=1) for slot in slots if slot.layer is not None)
    layers = tuple(
        LayerSpec(
            mixer=mixer,
            # Of its MLPs only the memory plan reads, and only the width.
            mlp=MLPSpec(intermediate_size=widest, activation=Activation.SILU),
            norm=NormSpec(eps=1e-6),
        )
        for mixer in attention.values()
    )
    spec = DecoderSpec(
        architecture=f"{name} of transformers",
        hidden_size=probed.hidden_size,
        vocab_size=probed.vocab_size,
        context_length=_context(config_of_text),
        layers=layers,
        final_norm=NormSpec(eps=1e-6),
        tied_head=tied,
    )
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    family = _family(name, model, next(iter(attention)))
    return FallbackModel(
        name, config, tuple(attention), family, slots, between, read, matrices, stored, ignored
    ), spec


def _family(name: str, model: Any, attention: str) -> Family:
    """Name the model's ends and layers, from the name of the first module that attends."""
    names = {id(module): found for found, module in model.named_modules()}
    place = _LAYER.match(attention)
    assert place is not None
    return Family(
        name=name,
        model_type=model.config.model_type,
        architectures=(name,),
        read=_described_already,
        names=TensorNames(
            embedding=names[id(model.get_input_embeddings())],
            head=names[id(model.get_output_embeddings())],
            layer=f"{place[1]}{{}}.",
        ),
    )


def _described_already(reader: ConfigReader) -> DecoderSpec:
    raise AssertionError(f"transformers described {reader.origin}")


def _context(config: Any) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 2:
        raise UnsupportedModelError("config.json has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return length
    # Beyond it, as `max_position_embeddings` may be the length before.
    return max(length, int(rope["factor"] * rope.get("original_max_position_embeddings", length)))


def _slots(
    model: Any, stored: Set[str], read: Set[str]
) -> tuple[tuple[TensorSlot, ...], frozenset[str], tuple[StoredMatrices, ...]]:
    """List the tensors of a checkpoint: parameters, a tied one once, and buffers that are kept.

    Returns:
        The tensors, the names of matrices that are neither linears nor embeddings, and the
        tensors that hold linears in another form.
    """
    state = dict(model.named_parameters())
    saved = model.state_dict().keys()
    state |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    modules = dict(model.named_modules())
    ends = {
        id(model.get_input_embeddings()): Role.EMBEDDING,
        id(model.get_output_embeddings()): Role.HEAD,
    }
    found: list[TensorSlot] = []
    between, matrices = set(), []
    apart: set[str] = set()
    for name, tensor in state.items():
        owner_name = name.rpartition(".")[0]
        owner, place = modules[owner_name], _LAYER.match(name)
        layer = int(place[2]) if place else None
        if has_experts(owner) and are_apart(owner_name, stored):
            if owner_name not in apart:
                found += expert_slots(owner_name, owner, layer)
            apart.add(owner_name)
            continue
        is_called = type(owner) is nn.Linear and owner_name not in read
        role = ends.get(id(owner), Role.UP if is_called else Role.ROUTER)
        if tensor.dim() <= 1:
            role = Role.NORM
        elif owner_name in read or not _is_laid_out(owner):
            between.add(name)
        slot = TensorSlot(name, tuple(tensor.shape), role, layer)
        if has_experts(owner) and tensor.dim() == 3:
            matrices.append(StoredMatrices(slot, turned=owner.is_transposed))
        elif has_inputs_first(owner) and tensor.dim() == 2:
            matrices.append(StoredMatrices(slot, turned=True))
        found.append(slot)
    return tuple(found), frozenset(between), tuple(matrices)


def _is_laid_out(module: nn.Module) -> bool:
    return is_linear(module) or is_embedding(module) or has_experts(module)


def is_linear(module: nn.Module) -> bool:
    """Return True for what multiplies its input by a matrix and does nothing else."""
    return type(module) is nn.Linear or has_inputs_first(module)


def is_embedding(module: nn.Module) -> bool:
    """Return True for what looks rows up, and multiplies them by a number at most."""
    is_scaled = isinstance(module, nn.Embedding) and isinstance(
        getattr(module, "embed_scale", None), torch.Tensor
    )
    return type(module) is nn.Embedding or is_scaled


def has_inputs_first(module: nn.Module) -> bool:
    """Return True for GPT-2's linears, whose matrices are (in_features, out_features)."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D
