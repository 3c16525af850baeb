"""Modules that stand in transformers' models in place of torch's linears, embeddings and dropout.

They are called thousands of times a second and have no hooks: `__call__` goes past torch's, which
looks for some. Buffers that no checkpoint holds, such as rotary frequencies, are filled as
transformers does.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from appliance.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from appliance.kernels.operations import Linear


class WeightType(NamedTuple):
    """Type and device of a weight that is laid out; whoever wants its numbers fails at once."""

    dtype: torch.dtype
    device: torch.device


class LaidOutLinear(nn.Module):
    """A linear in the engine's layout."""

    def __init__(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.linear = linear
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = WeightType(dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (..., in_features) to (..., out_features)."""
        rows = self.linear(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)


class LaidOutEmbedding(nn.Module):
    """An embedding in the engine's layout, whose rows may be multiplied by a number."""

    def __init__(
        self, look_up: Callable[[Tensor], Tensor], scale: Tensor | float, weight: WeightType
    ) -> None:
        super().__init__()
        self.look_up = look_up
        self.scale = scale
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        """Map ids of any shape to their rows."""
        rows = self.look_up(ids.reshape(-1))
        if not isinstance(self.scale, float):
            rows = rows * self.scale.to(rows.dtype)
        return rows.view(*ids.shape, rows.shape[-1])


class NoDropout(nn.Module):
    """Stands where training would leave out elements."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


class _Output:
    """An output of any class of transformers', of which only hidden states are there."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class IdentityModel(nn.Module):
    """Stands where a model's layers were: its output is what it is given.

    Args:
        layers: gives it what a class's head asks of them, such as Falcon H1's `lm_head_multiplier`.
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self._asked = (layers,)  # no module of its own

    def __getattr__(self, name: str) -> Any:
        asked = self.__dict__.get("_asked", ())
        return getattr(asked[0], name) if asked else super().__getattr__(name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        """Return hidden states as the layers would."""
        return _Output(inputs_embeds)


def put_identity(model: Any) -> Any:
    """Put one in the place of a model's layers, which are returned."""
    name = model.base_model_prefix
    body = getattr(model, name)
    setattr(model, name, IdentityModel(body))
    return body


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Run what comes after the layers on hidden states (1, num_rows, hidden_size)."""
    body = put_identity(model)
    try:
        logits: Tensor = model(inputs_embeds=hidden, use_cache=False).logits
    finally:
        setattr(model, model.base_model_prefix, body)
    return logits


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
