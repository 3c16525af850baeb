"""Reads PEFT's `adapter_config.json`; refuses changes of more than linears' weights.

Format: huggingface/peft, `LoraConfig`; patterns match as in its `tuners_utils`.

An expression of a few characters can take hours on a short name. `re`, by which PEFT reads them,
cannot be stopped; `regex` reads the same language and can, after some seconds.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from appliance.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import regex

SECONDS = 5.0  # of a processor, for all expressions and names of an adapter
MAX_CHARACTERS = 65_536  # of an expression; those that list every linear have some thousands
_SHOWN = 100
CONFIG_NAME = "adapter_config.json"
_MERGE = "merge it into the model with PEFT's merge_and_unload and serve the result"
# Fields that ask for other arithmetic or change other weights, with the fix.
_REFUSED = {
    "use_dora": f"DoRA norms the changed weights, which packed ones cannot be: {_MERGE}",
    "modules_to_save": f"it replaces whole modules: {_MERGE}",
    "trainable_token_indices": f"it replaces rows of the embedding: {_MERGE}",
    "alora_invocation_tokens": "an activated adapter begins inside a prompt, which is not"
    " supported: train a plain LoRA",
    "target_parameters": f"it changes parameters that are no linear of their own: {_MERGE}",
    "layer_replication": f"it runs layers several times: {_MERGE}",
    "fan_in_fan_out": "it was trained on transposed weights, which no model served here has",
    "lora_bias": f"its factors have biases: {_MERGE}",
    "use_qalora": "QALoRA pools its inputs, which is not supported: train a plain LoRA",
    "use_bdlora": "block-diagonal factors are not supported: train a plain LoRA",
    "velora_config": "VeLoRA is not supported: train a plain LoRA",
    "monteclora_config": "MonteCLoRA is not supported: train a plain LoRA",
    "arrow_config": "a router between adapters is not supported: load the adapters one by one",
    "kasa_config": "KaSA is not supported: train a plain LoRA",
}
# Initializations that also change the base model's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_KNOWN = frozenset(
    {
        "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern",
        "alpha_pattern", "layers_to_transform", "layers_pattern", "bias", "peft_type",
        "base_model_name_or_path", "init_lora_weights", "task_type", "auto_mapping",
        "revision", "inference_mode", "peft_version", "lora_dropout", "megatron_config",
        "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "qalora_group_size", "runtime_config", "ensure_weight_tying",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings that an adapter was trained with.

    Attributes:
        base: name of the base model; empty if unknown.
        targets: names of linears or their endings, or one regular expression.
        excluded: the same, of excluded linears.
        layers: layer numbers; None means all.
        layers_pattern: names before such a number; empty means any.
        patterns: matches with the expressions among all these.
    """

    base: str
    rank: int
    alpha: float
    use_rslora: bool
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    patterns: NamePatterns

    def wants(self, module: str) -> bool:
        """Return True if the settings name this linear."""
        if self._matches(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return self.targets == "all-linear" or self._matches(self.targets, module)
        if module in self.targets:
            return True
        return self._matches(self.targets, module) and self._in_layers(module)

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(self._pattern_of(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the scale of a linear's change."""
        alpha = self.alpha_pattern.get(self._pattern_of(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _matches(self, wanted: tuple[str, ...] | str, module: str) -> bool:
        if isinstance(wanted, str):
            return self.patterns.match(wanted, module, whole=True) is not None
        return module in wanted or any(module.endswith(f".{ending}") for ending in wanted)

    def _in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        before = [rf"(?:^|.*?\.)(?:{pattern})" for pattern in self.layers_pattern]
        for pattern in before or [r".*?\.[^.]*"]:
            if found := self.patterns.match(rf"{pattern}\.(?P<layer>\d+)\.", module):
                return int(found["layer"]) in self.layers
        return False

    def _pattern_of(self, patterns: Mapping[str, object], module: str) -> str:
        """Return the first pattern that the end of a name matches."""
        matches = self.patterns.match
        return next((key for key in patterns if matches(rf"(.*\.)?({key})$", module)), module)


def read_settings(path: Path, text: bytes) -> LoraSettings:
    """Read and check the settings of an adapter.

    Raises:
        AdapterError: a field is wrong or asks for something unsupported; names the field and the
            fix.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is no JSON: {error}; download the adapter again") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path} is no JSON object; download the adapter again")
    return _Fields(path, config).settings()


class _Fields:
    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path = path
        self._config = config

    def settings(self) -> LoraSettings:
        self._refuse()
        targets = self._names("target_modules")
        if not targets:
            raise self._wrong("target_modules", "it names the linears that the adapter changes")
        settings = LoraSettings(
            base=str(self._config.get("base_model_name_or_path") or ""),
            rank=self._integer("r", self._config.get("r")),
            alpha=self._number("lora_alpha", self._config.get("lora_alpha"), 0),
            use_rslora=bool(self._config.get("use_rslora")),
            targets=targets,
            excluded=self._names("exclude_modules"),
            rank_pattern={
                key: self._integer(f"rank_pattern[{key!r}]", value)
                for key, value in self._pattern("rank_pattern", 1)
            },
            alpha_pattern=dict(self._pattern("alpha_pattern", 0)),
            layers=self._layers(),
            layers_pattern=self._list("layers_pattern"),
            patterns=NamePatterns(self._path),
        )
        lists = (settings.rank_pattern, settings.alpha_pattern, settings.layers_pattern)
        names = (one for one in (settings.targets, settings.excluded) if isinstance(one, str))
        for pattern in chain(names, *lists):
            settings.patterns.compile(pattern)
        return settings

    def _refuse(self) -> None:
        kind = self._config.get("peft_type")
        if kind != "LORA":
            raise self._wrong("peft_type", "only LORA adapters are supported")
        for field, fix in _REFUSED.items():
            if self._config.get(field):
                raise self._wrong(field, fix)
        if self._config.get("bias", "none") != "none":
            raise self._wrong("bias", f"it changes biases: {_MERGE}")
        start = self._config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise self._wrong(
                "init_lora_weights",
                "training began by changing the model's own weights: save the adapter with"
                " save_pretrained(path_initial_model_for_weight_conversion=...), which makes a"
                " plain one of it",
            )
        for field, value in self._config.items():
            if field not in _KNOWN and field not in _REFUSED and value:
                raise self._wrong(
                    field, "no code here knows what it asks for: update appliance, or " + _MERGE
                )

    def _number(self, field: str, value: object, low: int) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(float(value)) or float(value) < low:  # type: ignore[arg-type]
            raise self._wrong(field, f"it must be a number of at least {low}")
        assert isinstance(value, int | float)
        return value

    def _integer(self, field: str, value: object) -> int:
        number = self._number(field, value, 1)
        if number != int(number):
            raise self._wrong(field, "it must be a whole number")
        return int(number)

    def _layers(self) -> tuple[int, ...] | None:
        field = "layers_to_transform"
        value = self._config.get(field)
        numbers = value if isinstance(value, list) else [value]
        if value in (None, []):
            return None
        if not all(type(number) is int for number in numbers):
            raise self._wrong(field, "it must be a number or a list of them")
        return tuple(numbers)

    def _names(self, field: str) -> tuple[str, ...] | str:
        value = self._config.get(field)
        return value if isinstance(value, str) else self._list(field)

    def _list(self, field: str) -> tuple[str, ...]:
        value = self._config.get(field) or []
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self._wrong(field, "it must be a list of names")
        return tuple(items)

    def _pattern(self, field: str, low: int) -> list[tuple[str, float]]:
        value = self._config.get(field) or {}
        if not isinstance(value, dict):
            raise self._wrong(field, "it must map names to numbers")
        return [
            (key, self._number(f"{field}[{key!r}]", number, low)) for key, number in value.items()
        ]

    def _wrong(self, field: str, fix: str) -> AdapterError:
        shown = repr(self._config.get(field.partition("[")[0]))[:200]
        return AdapterError(f"{self._path}: {field} is {shown}; {fix}")


class NamePatterns:
    """Expressions of one adapter.

    Args:
        path: where they stand, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = SECONDS
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def match(self, pattern: str, name: str, *, whole: bool = False) -> regex.Match[str] | None:
        """Match a name from its beginning.

        Args:
            whole: the match must reach the end.

        Raises:
            AdapterError: the pattern is no regular expression, or takes too long.
        """
        compiled = self.compile(pattern)
        matches = compiled.fullmatch if whole else compiled.match
        begin = time.thread_time()
        try:
            found = matches(name, timeout=self._left)
        except TimeoutError:
            found, self._left = None, 0.0
        self._spend(pattern, begin)
        return found

    def compile(self, pattern: str) -> regex.Pattern[str]:
        """Compile a pattern, or raise AdapterError."""
        import regex

        found = self._compiled.get(pattern)
        if found is not None:
            return found
        if len(pattern) > MAX_CHARACTERS:
            raise self._wrong(pattern, f"it has more than {MAX_CHARACTERS} characters")
        begin = time.thread_time()
        try:
            found = self._compiled[pattern] = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            raise self._wrong(pattern, f"this is no regular expression: {error}") from None
        self._spend(pattern, begin)
        return found

    def _spend(self, pattern: str, begin: float) -> None:
        self._left -= time.thread_time() - begin
        if self._left <= 0:
            why = f"the adapter's patterns take more than {SECONDS:g} s to match"
            raise self._wrong(pattern, why)

    def _wrong(self, pattern: str, why: str) -> AdapterError:
        shown = repr(pattern[:_SHOWN]) + ("..." if len(pattern) > _SHOWN else "")
        return AdapterError(
            f"{self._path} has the pattern {shown}; {why}; name the linears in a list instead"
        )
