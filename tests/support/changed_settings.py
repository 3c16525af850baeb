"""Drops, nulls and changes settings one at a time, and asks transformers what each then means."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from class_tables import settings_of

if TYPE_CHECKING:
    from pathlib import Path

# Read in training alone, or by what generates.
HARMLESS = {
    *("attention_dropout", "bos_token_id", "chunk_size", "classifier_dropout", "embd_pdrop"),
    *("eos_token_id", "hidden_dropout", "init_std", "initializer_range", "mamba_chunk_size"),
    *("num_logits_to_keep", "output_router_logits", "pad_token_id", "pretraining_tp"),
    *("rescale_prenorm_residual", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise"),
    *("use_cache", "use_mamba_kernels", "z_loss_coefficient", "dropout", "layerdrop"),
}
_OTHER_WORDS = {"silu": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class Change:
    """One setting of a config that is no longer as it was.

    Attributes:
        how: drop, null or flip.
    """

    key: str
    how: str
    config: dict[str, Any]

    def __str__(self) -> str:
        value = "" if self.how != "flip" else f" to {self.config.get(self.key)!r}"
        return f"{self.how} {self.key}{value}"


def changes(config: dict[str, Any]) -> Iterator[Change]:
    """Every change of a config, also of settings that it leaves out but its class knows."""
    known = settings_of(config["model_type"])
    for key in sorted((known.keys() | config.keys()) - HARMLESS):
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
        yield Change(key, "drop", _with(config, path, None, drop=True))
    yield Change(key, "null", _with(config, path, None))
    given = _others(value) if value is not None else [known.get(key), *_others(known.get(key))]
    for other in given:
        if other is None or isinstance(other, dict):
            continue
        yield Change(key, "flip", _with(config, path, other))


def _with(
    config: dict[str, Any], path: tuple[str, ...], value: Any, drop: bool = False
) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    inside = changed
    for part in path[:-1]:
        inside = inside[part]
    if drop:
        inside.pop(path[-1], None)
    else:
        inside[path[-1]] = value
    return changed


def _others(value: Any) -> list[Any]:
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
    """A model of transformers whose settings change, and whose weights do not."""

    def __init__(self, model: Any, token_ids: list[int]) -> None:
        self._class, self._config_class = type(model), type(model.config)
        self._weights = model.state_dict()
        self._shapes = {name: tensor.shape for name, tensor in self._weights.items()}
        self._tied = model.config.tie_word_embeddings
        self._token_ids = token_ids
        self._known: dict[str, torch.Tensor | None] = {}

    def logits(self, config: dict[str, Any]) -> torch.Tensor | None:
        """Logits (num_tokens, vocab_size); None if it refuses, or the weights do not fit."""
        try:
            made = self._config_class.from_dict(_decoded(copy.deepcopy(config)))
            meaning = json.dumps(made.to_dict(), sort_keys=True, default=str)
        except Exception:  # transformers raises what it likes
            return None
        if meaning not in self._known:
            self._known[meaning] = self._run(made)
        return self._known[meaning]

    def _run(self, config: Any) -> torch.Tensor | None:
        if self._tied and not config.tie_word_embeddings:
            return None  # the head that it asks for was not stored
        config.tie_word_embeddings = self._tied  # a head of its own is not tied, whatever is said
        for attention in ("eager", "sdpa"):  # null scales mean something to the second alone
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
                    found = model(torch.tensor([self._token_ids]), **extra).logits[0]
            except Exception:  # transformers raises what it likes
                continue
            return found if math.isfinite(found.abs().max()) else None
        return None


def _decoded(value: Any) -> Any:
    """Read numbers that JSON lacks, as transformers writes them."""
    if isinstance(value, dict):
        return math.inf if "__float__" in value else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def write(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
