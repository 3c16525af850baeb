"""Runs a model without weights once, to learn what each layer asks of attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import UnsupportedModelError, one_line
from appliance.model.fallback.attention import PROBING, SeenPositions, register, running
from appliance.model.fallback.modules import head_logits
from appliance.model.spec import AttentionSpec, NormSpec, RopeSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

_ROWS = 5
# Arguments that attention honours, and those that change nothing without training or outputs of
# attention's weights, or that say again what the rows' positions say.
_READ = {"scaling", "sliding_window", "softcap", "s_aux"}
_HARMLESS = {
    *("dropout", "position_ids", "cache_position", "use_cache", "position_embeddings"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("logits_to_keep", "is_causal", "num_items_in_batch", "layer_idx"),
}


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
