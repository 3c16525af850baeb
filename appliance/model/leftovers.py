"""Accounts for the tensors of a checkpoint that no slot of the decoder reads.

Each is known to change nothing, is named in a note, or is a reason to refuse the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import CheckpointError, ModelError
from appliance.kernels import arrays
from appliance.model.tensors import tensor_slots
from appliance.model_files.checkpoint import CONFIG_NAME
from appliance.quant.formats.kv_plan import KEY_SCALES, VALUE_SCALES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from appliance.model.source import ModelSource

# What the KV cache reads if it is FP8, and what follows from the settings.
USED_ELSEWHERE = (
    *KEY_SCALES, *VALUE_SCALES, ".kv_scale",
    ".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq",  # buffers of older checkpoints
)  # fmt: skip
# Parameters of activations quantized by other engines, as compressed-tensors, vLLM, ModelOpt and
# Quark call them.
_OF_ACTIVATIONS = tuple(
    f".{name}_{part}"
    for name in ("input", "output", "q", "k", "v", "kv", "prob", "prob_output", "qkv_output")
    for part in ("scale", "zero_point", "global_scale")
)
_DRAFTS = "mtp_layers."  # MiMo's, which join hidden state and embedding in their own order
_BIAS = ".bias"
_BIAS_KEYS = ("attention_bias", "mlp_bias", "use_bias", "qkv_bias")


_OTHER_MODEL = f"take {CONFIG_NAME} and weights of one model and revision"


def leftovers(source: ModelSource) -> list[str]:
    """List a folder's tensors that no slot reads and that no setting explains, sorted."""
    if source.path.is_file():
        return []
    names = source.family.names
    left = set(source.weights.tensor_names()) - {slot.name for slot in source.slots()}
    if source.spec.tied_head:
        left.discard(f"{names.head}.weight")  # copy of the embedding
    unused = (*_draft_layers(source), *_unread_keys(source), *_indexers(source))
    if source.fallback is not None:
        left = {name for name in left if not source.fallback.is_ignored(name)}
    return sorted(n for n in left if not n.endswith(USED_ELSEWHERE) and not n.startswith(unused))


def leftover_problems(source: ModelSource, left: Iterable[str]) -> Iterator[CheckpointError]:
    """Find the tensors among `left` that would change the model's answers if they were read."""
    for name in left:
        if name.endswith(_OF_ACTIVATIONS) or _is_draft(source, name):
            continue
        if not name.endswith(_BIAS):
            yield CheckpointError(
                f"{source.path.name}: tensor {name} has no place in a {source.spec.architecture}"
                f" model of {len(source.spec.layers)} layers; {_OTHER_MODEL}"
            )
        elif not _is_zero(source, name):
            key = _bias_key(source, name)
            advice = (
                f'set "{key}" to true in {CONFIG_NAME}, which makes them read'
                if key
                else _OTHER_MODEL
            )
            yield CheckpointError(
                f"{source.path.name}: tensor {name} is not zero, but by its settings a"
                f" {source.spec.architecture} model has no such biases; {advice}"
            )


def leftover_notes(left: Iterable[str]) -> tuple[str, ...]:
    """Say which tensors are left out, all of which `leftover_problems` has let pass."""
    left = list(left)
    scales = [name for name in left if name.endswith(_OF_ACTIVATIONS)]
    drafts = sum(_DRAFTS in name for name in left)
    biases = len(left) - len(scales) - drafts
    notes = [f"{biases} biases that are all zero are left out"] if biases else []
    if scales:
        notes.append(
            f"{len(scales)} parameters of activations, such as {scales[0]}, are left out, as"
            " activations stay in 16 bits"
        )
    if drafts:
        notes.append(
            f"{drafts} tensors that predict further tokens ({_DRAFTS}) are left out, as drafts of"
            " this layout are not read"
        )
    return tuple(notes)


def _is_draft(source: ModelSource, name: str) -> bool:
    return _DRAFTS in name and bool(source.config.get("num_nextn_predict_layers"))


def _is_zero(source: ModelSource, name: str) -> bool:
    bias = source.weights.load(name)
    return arrays.is_array(bias) and not bool((bias != 0).any())


def _bias_key(source: ModelSource, name: str) -> str | None:
    """Return the setting with which the family reads a bias; None if it never does."""
    if source.fallback is not None:
        return None
    for key in _BIAS_KEYS:
        try:
            spec = source.family.spec(source.config | {key: True}, CONFIG_NAME)
        except ModelError:
            continue
        if any(slot.name == name for slot in tensor_slots(spec, source.family.names)):
            return key
    return None


def _unread_keys(source: ModelSource) -> tuple[str, ...]:
    """Return the name prefixes of keys and values in layers that read other layers'."""
    names = source.family.names
    return tuple(
        f"{names.in_layer(index, part)}."
        for index, mixer in source.spec.attention_layers.items()
        if mixer.kv_layer is not None
        for part in (*names.qkv[1:], names.key_norm)
    )


def _indexers(source: ModelSource) -> tuple[str, ...]:
    """Return the name prefixes of indexers, which choose every position of the contexts here."""
    names = source.family.names
    layers = source.spec.latent_layers.items()
    chosen = (index for index, mixer in layers if mixer.chosen is not None)
    return tuple(f"{names.in_layer(index, names.latent.indexer)}." for index in chosen)


def _draft_layers(source: ModelSource) -> tuple[str, ...]:
    """Return the name prefixes of layers that predict further tokens, after the last."""
    number = source.config.get("num_nextn_predict_layers")
    first = len(source.spec.layers)
    count = min(number, first) if isinstance(number, int) else 0
    keys = ("mtp_num_hidden_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    if any(map(source.config.get, keys)):
        return ("mtp.",)
    return tuple(source.family.names.layer.format(first + i) for i in range(count))
