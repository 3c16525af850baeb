"""Maps a checkpoint's tensors to those of transformers' modules, by transformers' own rules.

Makers keep the names of their own code, and often a tensor per expert where a module has one for
all. transformers says for each class how it converts them; what it says is followed here.
`RenamedWeights` presents the tensors so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from appliance.model.fallback.experts import DOWN, GATE, UP, has_experts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from appliance.model.fallback.renamed import Stored


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor that transformers makes of a checkpoint's others.

    Attributes:
        name: in the model, that of the first tensor made with it.
        change: transformers' own rule.
        sources: names in the checkpoint by the rule's patterns.
        part: which of the rule's tensors it is.
        model: for rules that ask for sizes.
    """

    name: str
    change: Any
    sources: Mapping[str, tuple[str, ...]]
    part: int
    model: Any

    def computed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Compute it from tensors by their names in the checkpoint."""
        found: Any = {
            pattern: [tensors[name] for name in names] for pattern, names in self.sources.items()
        }
        for operation in self.change.operations:
            found = operation.convert(
                found,
                source_patterns=self.change.source_patterns,
                target_patterns=self.change.target_patterns,
                full_layer_name=self.name,
                model=self.model,
                config=self.model.config,
                missing_keys=None,
            )
        made = found[self.change.target_patterns[self.part]]
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return its shape, by those in the checkpoint."""
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return tuple(self.computed(empty).shape)

    def names(self) -> list[str]:
        """List the tensors in the checkpoint that it is made of."""
        return [name for names in self.sources.values() for name in names]


def names_in_model(model: Any, stored: Iterable[str]) -> dict[str, Stored]:
    """Return what a checkpoint stores by the names that a model's class has for it now.

    Experts that are stored one by one keep a name each, for their weights may be packed.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    base = f"{model.base_model_prefix}."
    own = set(model.state_dict())
    found: dict[str, Stored] = {}
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(stored, key=_by_numbers):
        place = name
        for renaming in renamings:
            place = renaming.rename_source_key(place)[0]
        for converter in converters:
            made, pattern = converter.rename_source_key(place)
            if pattern is not None:
                group = groups.setdefault(_completed(made, own, base), (converter, {}))
                group[1].setdefault(pattern, []).append(name)
                break
        else:
            completed = _completed(place, own, base)
            # A rule may be meant for another part of the name, which the model has already.
            found[name if completed not in own and name in own else completed] = name
    for place, (converter, sources) in groups.items():
        found |= _made(place, converter, sources, model)
    return found


def _completed(name: str, own: set[str], base: str) -> str:
    """Add or leave out the prefix of a body, where that gives a name of the model."""
    if name not in own and base + name in own:
        return base + name
    shorter = name.removeprefix(base)
    return shorter if name not in own and shorter in own else name


def _by_numbers(name: str) -> list[tuple[bool, int | str]]:
    return [(not part.isdigit(), int(part) if part.isdigit() else part) for part in name.split(".")]


def _made(
    place: str, converter: Any, sources: dict[str, list[str]], model: Any
) -> dict[str, Stored]:
    """Return what a rule makes of a group of tensors, by name."""
    owner, _, side = place.rpartition(".")
    kinds = [type(operation).__name__ for operation in converter.operations]
    if kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) and _is_plain(
        model, owner
    ):
        parts = (GATE, UP) if len(kinds) == 2 else (DOWN if side == DOWN else UP,)
        each = zip(parts, converter.source_patterns, strict=True)
        return {
            f"{owner}.{expert}.{part}.weight": name
            for part, pattern in each
            for expert, name in enumerate(sources.get(pattern, ()))
        }
    fixed = {pattern: tuple(names) for pattern, names in sources.items()}
    targets: list[str] = converter.target_patterns
    return {
        place.replace(targets[0], target, 1): Converted(place, converter, fixed, part, model)
        for part, target in enumerate(targets)
    }


def _is_plain(model: Any, owner: str) -> bool:
    """Return True for experts each of whose matrices may be read alone."""
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return False
    return has_experts(module) and not (module.has_bias or module.is_transposed)


def names_of_text(model: Any, stored: list[str]) -> dict[str, str]:
    """Return the stored names of a text part, by the names of the class that serves it alone.

    Its layers lie under a prefix of their own, beside other parts: that of an embedding under which
    most of the class's tensors are found, or of another tensor if a head is stored alone. What lies
    outside of the layers, as the head, may lie under any part of it. A tensor that has no place
    among the layers is in the result as well.
    """
    base = f"{model.base_model_prefix}."
    own, present = list(model.state_dict()), set(stored)
    inner = [name.removeprefix(base) for name in own if name.startswith(base)]
    first = {name.partition(".")[0] for name in inner}
    names = {id(module): name for name, module in model.named_modules()}
    embedding = f"{names[id(model.get_input_embeddings())].removeprefix(base)}.weight"
    above = ({n.removesuffix(name) for n in stored if n.endswith(name)} for name in inner)
    prefixes = {name.removesuffix(embedding) for name in stored if name.endswith(embedding)}
    prefixes = prefixes or next(filter(None, above), set())
    if not prefixes:
        return {}
    prefix = max(sorted(prefixes), key=lambda each: sum(each + name in present for name in inner))
    found = {
        base + name.removeprefix(prefix): name
        for name in stored
        if name.startswith(prefix) and name.removeprefix(prefix).partition(".")[0] in first
    }
    parents = [prefix[:end] for end in range(len(prefix) + 1) if not end or prefix[end - 1] == "."]
    outer = [name for name in own if not name.startswith(base)]
    places = [(name, above + name) for name in outer for above in parents]
    return found | {name: place for name, place in places if place in present}


def renamed(names: dict[str, Stored], before: Mapping[str, str]) -> dict[str, Stored]:
    """Return what `before` calls by the names on the right of `names`."""

    def of(stored: Stored) -> Stored:
        if isinstance(stored, str):
            return before[stored]
        sources = {
            pattern: tuple(before[name] for name in names)
            for pattern, names in stored.sources.items()
        }
        return replace(stored, sources=sources)

    return {name: of(stored) for name, stored in names.items()}
