"""Fills what no checkpoint holds, such as rotary frequencies, as transformers does."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn


def fill_buffers(model: Any, device: torch.device) -> None:
    """Give the buffers that are not saved their values on a device.

    Raises:
        UnsupportedModelError: one has no value.
    """
    saved = model.state_dict().keys()
    owners: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        own = dict(module.named_buffers(prefix, recurse=False))
        for name in own.keys() - saved:
            empty = torch.empty_like(own[name], device=device)
            _set(module, name, empty.fill_(torch.nan) if empty.is_floating_point() else empty)
            owners.setdefault(prefix, []).append(name)
    with torch.no_grad():
        for prefix, names in owners.items():
            missing = names
            # What encloses a module may fill it, as FalconH1's model does its mixers.
            for place in _from_inside(prefix):
                if missing:
                    _initializer(model, place)(model.get_submodule(place))
                    missing = [name for name in names if not _is_filled(model, prefix, name)]
            if missing:
                raise UnsupportedModelError(
                    f"{min(missing)} is in no checkpoint, and transformers does not compute it"
                )


def _from_inside(place: str) -> Iterator[str]:
    """Yield a module's name, then those of the modules that it is in, up to the model's own."""
    yield from reversed(list(accumulate(place.split("."), "{}.{}".format)) if place else [])
    yield ""


def _is_filled(model: Any, prefix: str, name: str) -> bool:
    owner = model.get_submodule(prefix)
    buffer: Tensor = owner._buffers[name.rpartition(".")[2]]
    return bool(torch.isfinite(buffer).all())


def _initializer(model: Any, place: str) -> Callable[[nn.Module], None]:
    """Return what fills a module: of the innermost model that it is in."""
    parts = map(model.get_submodule, _from_inside(place))
    found: Callable[[nn.Module], None] = next(
        part._init_weights for part in parts if hasattr(part, "_init_weights")
    )
    return found


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    module._buffers[name.rpartition(".")[2]] = tensor
