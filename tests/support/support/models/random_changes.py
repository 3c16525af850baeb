"""Changes settings as damage, tools and people do: odd values in odd places, from a seed."""

from __future__ import annotations

import copy
import json
import math
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from support.models.changed_settings import HARMLESS, OPPOSED, Change, others, with_setting

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from support.models.changed_settings import Oracle

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**32 - 1, 2**40, 10**30, -(2**40),
    0.0, -0.5, 0.25, 1.0, 1.5, 1e-30, 1e30, 1e308, math.nan, math.inf, -math.inf,
    "", "x", "16", "true", "null", "silu", "relu", "yarn", "full_attention", "float16",
    [], [0], [1, 2], [0.5] * 3, ["x"], [None], [[]], {}, {"x": 1}, {"rope_type": "linear"},
)  # fmt: skip
# They describe the file, or are read elsewhere, and do not affect the arithmetic.
_OF_THE_FILE = frozenset({"dtype", "torch_dtype", "transformers_version", "return_dict"})
# Of latent attention, whose heads have a number and widths of their own: makers' code ignores
# these, and transformers fails unless they equal those of the queries.
_OF_LATENTS = frozenset({"head_dim", "num_key_value_heads"})
# Of parts that are left out: heads for multi-token prediction, and the selection of positions.
_OF_PARTS = frozenset({"mtp_hybrid_override_pattern", "index_head_dim", "index_n_heads"})
# Older names, for which transformers checks the type of a setting of training.
_OLDER = frozenset({"mamba_dt_init_floor", "mamba_dt_max", "mamba_dt_min", "mamba_expand"})
# A class checks their type and then computes them from others, or uses them in prompts alone.
_NOT_AS_GIVEN = frozenset({("cohere2", "head_dim"), ("nemotron_h", "time_step_min")})
# Here, as in older versions of the class, their truth value counts; transformers 5 accepts only
# true or false.
_TRUTHS = frozenset({"attn_temperature_tuning"})
# Settings that a refusal may name instead.
_NAMES = OPPOSED | {"architectures": ["architecture"], "model_type": ["describes a"]}


def random_changes(
    config: dict[str, Any], known: set[str], random: random.Random, count: int
) -> Iterator[Change]:
    """Draw changes of one setting, or now and then of two.

    Args:
        known: settings that the config lacks and may get.
    """
    for _ in range(count):
        changed = copy.deepcopy(config)
        key, how = _change(changed, known, random)
        also = (_change(changed, known, random)[0],) if random.random() < 0.2 else ()
        yield Change(key, how, changed, also)


def _change(config: dict[str, Any], known: set[str], random: random.Random) -> tuple[str, str]:
    """Change one setting in place; return its key and the kind of change."""
    section = config
    key = random.choice(sorted(section.keys() | known))
    while isinstance(section.get(key), dict) and section[key] and random.random() < 0.7:
        section = section[key]
        key = random.choice(sorted(section))
    value = section.get(key)
    if value is not None and random.random() < 0.15:
        del section[key]
        return key, "drop"
    section[key] = _other(value, random)
    return key, "set"


def _other(value: Any, random: random.Random) -> Any:
    """Return another value, half of the time one that resembles the old one."""
    near: list[Any] = []
    match value:
        case bool():
            near = [not value, int(value), str(value).lower()]
        case int():
            near = [value + 1, value - 1, 2 * value, -value, float(value), str(value), [value]]
        case float():
            near = [2 * value, -value, value / 3, str(value), [value]]
        case str():
            near = [value + "x", value.upper(), [value], value[:-1]]
        case list() if value:
            other = random.choice(ODD)
            near = [value[:-1], [*value, value[0]], value[::-1], [*value[:-1], other], value[0]]
        case dict():
            near = [list(value), json.dumps(value)]
    return copy.deepcopy(random.choice(near if near and random.random() < 0.5 else ODD))


class Judge:
    """Compares our result of a changed config with that of transformers."""

    def __init__(self, oracle: Oracle, config: dict[str, Any], known: dict[str, Any]) -> None:
        self._oracle, self._config, self._known = oracle, config, known
        self._usual = oracle.logits(config)
        assert self._usual is not None
        self._unread: dict[tuple[str, ...], bool] = {}

    def fault(self, change: Change, ours: torch.Tensor | None, refusal: str) -> str:
        """Describe what is wrong with a result or a refusal; empty if nothing is."""
        keys = (change.key, *change.also)
        if ours is None:
            names = [name for key in keys for name in (key, *_NAMES.get(key, ()), "tensor ")]
            is_named = any(name in refusal for name in names)
            return "" if is_named else f"{change}: refused without its name: {refusal:.300}"
        if {"model_type", "architectures"} & {*keys}:
            return ""  # it would select another class
        theirs = self._oracle.logits(change.config)
        if theirs is None:  # perhaps by its type, or for a setting that nothing reads
            theirs = self._oracle.logits(self._meant(change.config, self._config))
        if theirs is None:
            return f"{change}: accepted, and refused by transformers"
        same = ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=3e-4, rtol=1e-4)
        return "" if same else f"{change}: other logits"

    def _meant(
        self, changed: dict[str, Any], usual: dict[str, Any], sections: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Convert numbers to the class's types, and leave out settings without effect.

        Args:
            sections: names of the sections that hold the two dictionaries.
        """
        found = dict(changed)
        for key in changed.keys() | usual.keys():
            value, old = changed.get(key), usual.get(key)
            if isinstance(value, dict) and isinstance(old, dict):
                found[key] = self._meant(value, old, (*sections, key))
            elif value is None and key not in usual:
                found.pop(key, None)  # as if absent, also where transformers requires a number
            elif key in _TRUTHS:
                found[key] = bool(value)
            elif (value, type(value)) == (old, type(old)):
                continue
            elif self._never_counts(key):
                found.pop(key, None)
                found |= {key: old} if key in usual else {}
            elif (value, type(value)) != (meant := self._in_type(key, value, old), type(meant)):
                found[key] = meant
            elif self._is_unread(*sections, key):
                found.pop(key, None)
                found |= {key: old} if key in usual else {}
        return found

    def _in_type(self, key: str, value: Any, old: Any) -> Any:
        """Return a number in its setting's type, if that can hold it."""
        form = type(self._known.get(key) if old is None else old)
        if type(value) not in (int, float) or form not in (bool, int, float):
            return value
        try:
            return form(value) if form(value) == value else value
        except (OverflowError, ValueError):
            return value

    def _never_counts(self, key: str) -> bool:
        if key in HARMLESS | _OF_THE_FILE | _OF_PARTS | _OLDER:
            return True
        is_of_latents = key in _OF_LATENTS and "kv_lora_rank" in self._config
        return is_of_latents or (self._config["model_type"], key) in _NOT_AS_GIVEN

    def _is_unread(self, *path: str) -> bool:
        """Return True if no other value of the right type changes transformers' result."""
        if path not in self._unread:
            *sections, key = path
            given = reduce(dict[str, Any].__getitem__, sections, self._config).get(key)
            usual = None if sections else self._known.get(key)
            values = others(given) if given is not None else [usual, *others(usual)]
            tried = [self._oracle.logits(with_setting(self._config, path, one)) for one in values]
            taken = [logits for logits in tried if logits is not None]
            assert self._usual is not None
            self._unread[path] = bool(taken) and all(
                torch.equal(logits, self._usual) for logits in taken
            )
        return self._unread[path]
