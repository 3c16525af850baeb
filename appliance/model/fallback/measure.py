"""Learns from a model without weights what each layer asks of attention, and what memory it takes.

Its modules run on the device `meta`: nothing is computed, but every tensor has its size.
"""

from __future__ import annotations

import math
import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from appliance.errors import UnsupportedModelError, one_line
from appliance.model.fallback.decoder import PROBING, SeenPositions, register, running
from appliance.model.fallback.modules import head_logits
from appliance.model.fallback.own_cache import Attributes, begin, tensors_in
from appliance.model.recurrent_spec import OwnCacheSizes, OwnCacheSpec
from appliance.model.spec import AttentionSpec, NormSpec, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from appliance.model.fallback.own_cache import Begun, Held

_ROWS = 5
# Arguments that attention honours, and those that change nothing without training or outputs of
# attention's weights, or that say again what the rows' positions say.
_READ = {"scaling", "sliding_window", "softcap", "s_aux"}
_HARMLESS = {
    "dropout", "position_ids", "cache_position", "use_cache", "position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "logits_to_keep", "is_causal", "num_items_in_batch", "layer_idx",
}  # fmt: skip
_FEW, _SOME = 8, 32
# Beyond the usual windows, where the time suffices: classes that go row by row take longer.
_LONGEST = 8192
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class OwnWay:
    """Findings of a run without weights.

    Attributes:
        spec: sizes.
        inside: names of modules and of their attributes that hold a part of the state.
        called: names of the modules that are called, not only read.
        hidden_size: of what the head reads.
    """

    spec: OwnCacheSpec
    inside: tuple[tuple[str, str], ...]
    called: frozenset[str]
    hidden_size: int


def measured(model: Any, body: nn.Module, context: int, reason: str, *, has_limit: bool) -> OwnWay:
    """Run a model whose parameters are on the device `meta`, and measure its caches.

    Args:
        body: its part up to the head.
        context: most tokens of a sequence.

    Raises:
        UnsupportedModelError: it keeps no cache, or cannot run so.
    """
    names = {module: name for name, module in model.named_modules()}
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(names[module]))
        for module in names
    ]
    try:
        with torch.inference_mode(), _all_chosen():
            begun, hidden = _with_attributes(begin(model, body), names)
            head_logits(model, torch.empty((1, 1, hidden), device="meta"))
            few = min(_FEW, context // 8)
            longest = _longest(begun, context, few)
            wide, passes = _measured(begun, longest, (1, few))
            with _in_16_bits(model):
                narrow, _ = _measured(begun, longest, ())
            spec = OwnCacheSpec(wide, narrow, _plane(passes), reason, has_limit)
            head = model.get_output_embeddings()
            if head is not None:
                called.add(names[head])
    except UnsupportedModelError:
        raise
    except Exception as error:  # its modules raise what they like
        raise UnsupportedModelError(
            f"its cache cannot be measured, for a run without weights failed in its modules"
            f" ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    inside = tuple((names[module], name) for module, name in begun.inside.places)
    return OwnWay(spec, inside, frozenset(called), hidden)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Findings of a run without weights.

    Attributes:
        attention: of each module that attends, by its name, in the order of the calls.
        hidden_size: of what the head reads.
        vocab_size: logits of a row.
        called: names of the modules that are called, not only read.
    """

    attention: dict[str, AttentionSpec]
    hidden_size: int
    vocab_size: int
    called: frozenset[str]


@dataclass
class _Recorder:
    """An `AttentionStep` that writes down what it is asked for."""

    names: dict[nn.Module, str]
    found: dict[str, AttentionSpec] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        settings: dict[str, Any],
    ) -> Tensor:
        name = self.names[module]
        if name in self.found:
            raise UnsupportedModelError(f"{name} attends more than once in a step")
        self.found[name] = _spec_of(name, module, query, key, value, mask, settings)
        attended = query[..., : value.shape[3]]
        return attended.transpose(1, 2).contiguous()


def probe(model: Any, body: Any) -> ProbeResult:
    """Run a model whose parameters are on the device `meta`.

    Args:
        body: its part up to the head.

    Raises:
        UnsupportedModelError: it asks for something that the engine's attention cannot do.
    """
    register()
    names = {module: name for name, module in model.named_modules()}
    recorder, called = _Recorder(names), set[str]()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(names[module]))
        for module in names
    ]
    before = model.config._attn_implementation
    rows = torch.zeros((1, _ROWS), dtype=torch.int64, device="meta")
    try:
        model.config._attn_implementation = PROBING
        with torch.inference_mode(), running(recorder):
            output = body(
                input_ids=rows,
                position_ids=rows,
                attention_mask=torch.ones_like(rows),
                use_cache=False,
            )
            logits = head_logits(model, output.last_hidden_state)
    except UnsupportedModelError:
        raise
    except Exception as error:  # its modules raise what they like
        if SeenPositions.__name__ in str(error):
            raise UnsupportedModelError(
                "its layers compute with attention masks themselves, as those with a bias of"
                " positions (ALiBi) or an index of them do, which is not honoured"
            ) from error
        if isinstance(error, NotImplementedError):
            raise UnsupportedModelError(
                "its modules choose what to compute by the numbers before it, as experts outside of"
                " transformers' experts interface do, so what they ask for cannot be known"
            ) from error
        raise UnsupportedModelError(
            "a run without weights failed in its modules"
            f" ({type(error).__name__}: {one_line(error)})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        model.config._attn_implementation = before
    head = model.get_output_embeddings()
    return ProbeResult(recorder.found, head.in_features, int(logits.shape[-1]), frozenset(called))


def _spec_of(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    settings: dict[str, Any],
) -> AttentionSpec:
    """Describe one layer's attention, or refuse it by the name of the argument."""
    unknown = {key for key, given in settings.items() if given is not None} - _READ - _HARMLESS
    if unknown:
        raise UnsupportedModelError(f"{name} attends with {min(unknown)}, which is not honoured")
    if not isinstance(mask, SeenPositions):
        raise UnsupportedModelError(
            f"{name} attends with an attention_mask of its own ({type(mask).__name__}), such as a "
            "bias of positions, which is not honoured"
        )
    if settings.get("is_causal") is False or key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"{name} attends in both directions or to another sequence (is_causal, cross attention)"
        )
    heads, width = value.shape[1], value.shape[3]
    # Narrower values are padded.
    if key.shape[1] != heads or key.shape[3] != query.shape[3] or width > key.shape[3]:
        raise UnsupportedModelError(
            f"{name} has keys of {key.shape[1]} heads of {key.shape[3]} elements, and values of "
            f"{heads} heads of {width}: its v_head_dim must be at most its head_dim"
        )
    sinks = settings.get("s_aux")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise UnsupportedModelError(f"{name} has sinks (s_aux) of shape {tuple(sinks.shape)}")
    head_dim = int(query.shape[3])
    return AttentionSpec(
        num_heads=int(query.shape[1]),
        num_kv_heads=int(key.shape[1]),
        head_dim=head_dim,
        scale=_number(name, "scaling", settings.get("scaling"), head_dim**-0.5),
        rope=RopeSpec(theta=10000.0, rotary_dim=head_dim),  # not read: heads come rotated
        window=_window(name, mask, settings.get("sliding_window")),
        softcap=_number(name, "softcap", settings.get("softcap"), None),
        qkv_bias=any(getattr(part, "bias", None) is not None for part in module.children()),
        qk_norm=_head_norm(module),
        sinks=sinks is not None,
    )


def _number(name: str, setting: str, value: Any, default: Any) -> Any:
    """Return a positive number that a module gives, or the default in place of None."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedModelError(
            f"{name} attends with {setting} = {value!r}, but only a positive number is honoured"
        )
    return float(value)


def _window(name: str, mask: SeenPositions, given: object) -> int | None:
    """Return the mask's window; where the module names one as well, they must agree."""
    if mask.window is not None and given is not None and given != mask.window:
        raise UnsupportedModelError(
            f"{name} attends with sliding_window = {given!r}, and its mask shows {mask.window}"
        )
    return mask.window


def _head_norm(module: nn.Module) -> NormSpec | None:
    """Say whether heads are normed, by the names of classes."""
    has_norm = any("Norm" in type(part).__name__ for part in module.children())
    return NormSpec(eps=1e-6) if has_norm else None


def _all_chosen() -> AbstractContextManager[None]:
    """Let what chooses by numbers choose all: without numbers, that is the most it can be."""
    from torch.fx.experimental import _config

    settings: Any = _config
    patched: AbstractContextManager[None] = settings.patch(meta_nonzero_assume_all_nonzero=True)
    return patched


def _with_attributes(begun: Begun, names: dict[nn.Module, str]) -> tuple[Begun, int]:
    """Find the attributes of modules that hold a tensor after a run and held another before."""
    before = {module: _attributes(module) for module in names}
    output, _ = begun.read(_ids(_FEW), None)
    found, first = [], []
    for module, held in before.items():
        for name, value in _attributes(module).items():
            if isinstance(value, torch.Tensor) and held.get(name) is not value:
                found.append((module, name))
                first.append(held.get(name))
    inside = Attributes(tuple(found), tuple(first))
    inside.put(inside.first)
    return replace(begun, inside=inside), int(output.shape[-1])


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and (value is None or isinstance(value, torch.Tensor))
    }


@contextmanager
def _in_16_bits(model: nn.Module) -> Iterator[None]:
    """Let modules compute in bfloat16, as their weights are; float16 takes the same."""
    wide = [(one, one.data) for one in model.parameters() if one.is_floating_point()]
    with torch.inference_mode(False):  # whose tensors no parameter of another mode takes
        for one, data in wide:
            one.data = data.to(torch.bfloat16)
    try:
        yield
    finally:
        for one, data in wide:
            one.data = data


def _longest(begun: Begun, context: int, few: int) -> int:
    """Return the tokens of the longest cache that is measured."""
    some = min(_SOME, context // 4)
    affordable = _affordable(begun, (few, some, min(8 * some, context)))
    longest = min(max(affordable, 3 * some), context) - few  # which the last pass reaches
    # One token before a power of two, where most of them wait for others to be compressed with.
    return int((1 << (longest + 1).bit_length() - 1) - 1)


def _measured(
    begun: Begun, longest: int, rows_of_passes: tuple[int, ...]
) -> tuple[OwnCacheSizes, list[tuple[int, int, int]]]:
    """Measure a cache by two lengths, and the passes after each: rows, context, bytes."""
    sizes, passes, before = {}, [], 0
    held: Held | None = None
    for length in (longest // 2, longest):
        _, held = begun.read(_ids(length - before - 1), held)
        before = length
        _, held = begun.read(_ids(1), held)
        sizes[length] = _bytes_of(held)
        for rows in rows_of_passes:
            passes.append((rows, length + rows, _peak(begun, held, rows)))
    if not max(sizes.values()):
        raise UnsupportedModelError("it keeps no cache of what it has read (use_cache)")
    (shorter, less), (longer, more) = sorted(sizes.items())
    token = max((more - less) / (longer - shorter), 0.0)
    fixed = math.ceil(max(size - token * length for length, size in sizes.items()))
    return OwnCacheSizes(max(fixed, 1), max(math.ceil(token), 1)), passes


def _affordable(begun: Begun, counts: tuple[int, ...]) -> int:
    """Return the rows for which the time suffices: all, but of modules that go row by row.

    A longer pass must take clearly longer, as a busy machine does not run two passes alike.
    """
    few, *longer = counts
    base = _seconds(begun, few)
    for rows in longer:
        more = _seconds(begun, rows) - base
        if more > base / 2:
            return min(int(_SECONDS * (rows - few) / more), _LONGEST)
    return _LONGEST


def _seconds(begun: Begun, rows: int) -> float:
    before = time.thread_time()
    begun.read(_ids(rows), None)
    return time.thread_time() - before


def _bytes_of(held: Held) -> int:
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for _, _, tensor in tensors_in([held.cache, list(held.inside)])
    }
    return sum(storages.values())


def _peak(begun: Begun, held: Held, rows: int) -> int:
    """Return the most bytes that a pass takes at once, its cache as it was left out."""
    own = begun.copied(held)
    seen = _LiveBytes()
    with seen:
        begun.read(_ids(rows), own)
    return seen.most


def _plane(passes: list[tuple[int, int, int]]) -> tuple[float, float, float, float]:
    """Fit peak = always + row * rows + token * context + pair * rows * context, through each."""
    rows = torch.tensor(
        [[1.0, count, context, count * context] for count, context, _ in passes],
        dtype=torch.float64,
        device="cpu",
    )
    peaks = torch.tensor([[float(peak)] for *_, peak in passes], dtype=torch.float64, device="cpu")
    fit = torch.linalg.lstsq(rows, peaks).solution.flatten().clamp(min=0.0)
    # What the fit leaves out, and coefficients that were cut off at 0, is taken always.
    over = float((peaks.flatten() - rows @ fit).max())
    always, row, token, pair = fit.tolist()
    return always + max(over, 0.0), row, token, pair


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on, as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._live: dict[int, int] = {}
        self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = size = storage.nbytes()
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._end, key)

    def _end(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)


def _ids(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device="meta")
