"""Drops, nulls and changes settings one at a time, and compares with transformers' results."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from support.models.class_tables import settings_of

from appliance.errors import ApplianceError

if TYPE_CHECKING:
    from pathlib import Path

# Read only in training, or by code that generates.
HARMLESS = {
    "attention_dropout", "bos_token_id", "chunk_size", "classifier_dropout", "embd_pdrop",
    "eos_token_id", "hidden_dropout", "init_std", "initializer_range", "mamba_chunk_size",
    "num_logits_to_keep", "output_router_logits", "pad_token_id", "pretraining_tp",
    "rescale_prenorm_residual", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise",
    "use_cache", "use_mamba_kernels", "z_loss_coefficient", "dropout", "layerdrop",
}  # fmt: skip
# Changing these contradicts other settings: a refusal names the others.
OPPOSED = {
    "enable_moe_block": ["use_double_wide_mlp"],
    "layer_types": ["per_layer_config", "num_kv_shared_layers", "sliding_window"],
    "n_embed": ["num_attention_heads"],
    "num_experts": ["n_routed_experts"],
    "num_local_experts": ["n_routed_experts"],
    "qk_nope_head_dim": ["partial_rotary_factor"],
    "qk_rope_head_dim": ["partial_rotary_factor"],
    "rope_type": ["partial_rotary_factor"],
}
# Without these, the defaults of others do not fit the rest: a refusal names those.
_NEEDED = {"num_experts_per_tok", "topk_group", "rope_type"}
# transformers fails without the first two, and with the last beside no embeddings of layers.
_OPEN = {"llama_4_scaling_beta", "rope_type", "num_kv_shared_layers"}
_OTHER_WORDS = {"silu": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class Change:
    """One changed setting of a config.

    Attributes:
        how: drop, null, flip or set.
        also: other settings that changed with it.
    """

    key: str
    how: str
    config: dict[str, Any]
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = "" if self.how in ("drop", "null") else f" to {_value_of(self.config, self.key)!r}"
        others = "".join(f", {key}: {_value_of(self.config, key)!r}" for key in self.also)
        return f"{self.how} {self.key}{values}{others}"


def _value_of(config: dict[str, Any], key: str) -> Any:
    if key in config:
        return config[key]
    inside = [part for part in config.values() if isinstance(part, dict)]
    return next((found for part in inside if (found := _value_of(part, key)) is not None), None)


def changes(config: dict[str, Any], harmless: Set[str] = HARMLESS) -> Iterator[Change]:
    """Every change of a config; includes settings that it leaves out but its class knows."""
    known = settings_of(config["model_type"])
    for key in sorted((known.keys() | config.keys()) - harmless):
        if key not in known:
            continue
        inside = config.get(key)
        if isinstance(inside, dict):
            for path in _paths(inside):
                yield from _changes_at(config, (key, *path), known)
        yield from _changes_at(config, (key,), known)


def _paths(section: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in section.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))


def _changes_at(
    config: dict[str, Any], path: tuple[str, ...], known: dict[str, Any]
) -> Iterator[Change]:
    key = path[-1]
    value: Any = config
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    if value is not None:
        yield Change(key, "drop", with_setting(config, path, None, drop=True))
    yield Change(key, "null", with_setting(config, path, None))
    given = others(value) if value is not None else [known.get(key), *others(known.get(key))]
    for other in given:
        if other is None or isinstance(other, dict):
            continue
        yield Change(key, "flip", with_setting(config, path, other))


def with_setting(
    config: dict[str, Any], path: tuple[str, ...], value: Any, drop: bool = False
) -> dict[str, Any]:
    """Return a copy of a config with one setting, in a section or not, replaced or removed."""
    changed = copy.deepcopy(config)
    inside = changed
    for part in path[:-1]:
        inside = inside[part]
    if drop:
        inside.pop(path[-1], None)
    else:
        inside[path[-1]] = value
    return changed


def others(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value] if value > 1 else [value + 1]
    if isinstance(value, float):
        return [1.5 * value] if value else [0.5]
    if isinstance(value, str):
        return [_OTHER_WORDS.get(value, "silu")]
    if isinstance(value, list):
        return [value[::-1], value[:-1]]
    return []


class Oracle:
    """A transformers model whose settings change while its weights stay."""

    def __init__(self, model: Any, token_ids: list[int]) -> None:
        self._class, self._config_class = type(model), type(model.config)
        self._weights = model.state_dict()
        self._shapes = {name: tensor.shape for name, tensor in self._weights.items()}
        self._tied = model.config.tie_word_embeddings
        self._token_ids = token_ids
        self._known: dict[str, torch.Tensor | None] = {}

    def logits(self, config: dict[str, Any]) -> torch.Tensor | None:
        """Logits (num_tokens, vocab_size), a head's (num_labels,), or hidden states without a head.

        None if transformers refuses, or the weights do not fit.
        """
        try:
            made = self._config_class.from_dict(_decoded(copy.deepcopy(config)))
            meaning = json.dumps(made.to_dict(), sort_keys=True, default=str)
        except Exception:  # transformers raises any kind of error
            return None
        if meaning not in self._known:
            self._known[meaning] = self._run(made)
        return self._known[meaning]

    def _run(self, config: Any) -> torch.Tensor | None:
        if self._tied and not config.tie_word_embeddings:
            return None  # the folder lacks the head that the config asks for
        config.tie_word_embeddings = self._tied  # an own head is never tied
        for attention in ("eager", "sdpa"):  # only the second reads null scales as a value
            config._attn_implementation = attention
            try:
                with torch.device("meta"):
                    empty = self._class(copy.deepcopy(config))
                asked = {name: tensor.shape for name, tensor in empty.state_dict().items()}
                if not asked.items() <= self._shapes.items():
                    return None
                model = self._class(copy.deepcopy(config)).eval()
                model.load_state_dict(self._weights, strict=False)
                cap = getattr(config, "attn_logit_softcapping", None)
                left_out = cap is not None and config.model_type == "gemma3_text"
                extra = {"softcap": cap} if left_out else {}
                with torch.inference_mode():
                    made = model(torch.tensor([self._token_ids]), **extra)
                found = (made.logits if "logits" in made else made.last_hidden_state)[0]
            except Exception:  # transformers raises any kind of error
                continue
            return found if math.isfinite(found.abs().max()) else None
        return None


def _decoded(value: Any) -> Any:
    """Read numbers that JSON lacks, in transformers' spelling."""
    if isinstance(value, dict):
        return math.inf if "__float__" in value else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def write(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def disagreements(
    folder: Path,
    oracle: Oracle,
    open_spec: Callable[[], object],
    ours_of: Callable[[], torch.Tensor],
    harmless: Set[str] = HARMLESS,
) -> tuple[list[str], int]:
    """Change each setting of a folder's config in turn, and compare our model with transformers'.

    Args:
        open_spec: opens the folder; changes that give an equal spec are computed once.
        ours_of: computes our result.

    Returns:
        The differences, and the number of changes that both accept.
    """
    config = json.loads((folder / "config.json").read_text())
    unchanged, usual = open_spec(), ours_of()
    found, compared = [], 0
    for change in changes(config, harmless):
        write(change.config, folder)
        theirs, ours, message = oracle.logits(change.config), None, ""
        try:
            spec = open_spec()
        except ApplianceError as error:
            message = str(error)
        else:
            if spec == unchanged and theirs is None:
                continue  # has no effect here
            ours = usual if spec == unchanged else ours_of()
        compared += theirs is not None and ours is not None
        found.append(_disagreement(change, theirs, ours, message))
    return [text for text in found if text], compared


def _disagreement(
    change: Change,
    theirs: torch.Tensor | None,
    ours: torch.Tensor | None,
    message: str,
) -> str:
    """Describe how both differ on a change; empty if they agree, or if we may refuse it."""
    key = change.key
    names = (key, *OPPOSED.get(key, ()), "tensor ")
    if ours is None and not any(name in message for name in names):
        return f"{change}: refused without its name: {message}"
    if theirs is None:
        fine = ours is None or key in _OPEN
        return "" if fine else f"{change}: accepted, and refused by transformers"
    if ours is None:
        fine = change.how == "flip" or "tensor " in message or key in _NEEDED
        return "" if fine else f"{change}: refused, and accepted by transformers: {message}"
    same = ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=3e-4, rtol=1e-4)
    return "" if same else f"{change}: other logits"
