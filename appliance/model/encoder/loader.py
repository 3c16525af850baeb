"""Reads an encoder's weights for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.kernels import arrays
from appliance.kernels.weights.weight import dense
from appliance.model.encoder.encoder import (
    BiasedLinear,
    EncoderExperts,
    EncoderHead,
    EncoderLayer,
    LayerNorm,
    TextEncoder,
)

if TYPE_CHECKING:
    from appliance.model.encoder.source import EncoderSource
    from appliance.model.encoder.spec import EncoderExpertsSpec


def load_encoder(
    source: EncoderSource,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[str, int, int], None],
    on_layer: Callable[[], None] = lambda: None,
) -> TextEncoder:
    """Read the weights.

    Args:
        dtype: of weights and activations.
        on_progress: called with stage, done, total.
        on_layer: called after each layer of a step.

    Raises:
        CheckpointError: a file changed since it was opened.
    """
    spec, names, prefix = source.spec, source.names, source.prefix

    def tensor(name: str) -> Tensor:
        found = dense(source.load(name), "float32")
        return arrays.in_torch(found).to(device, dtype)  # type: ignore[no-any-return]

    def linear(*parts: str, bias: bool) -> BiasedLinear:
        rows = [tensor(f"{part}.weight") for part in parts]
        biases = [tensor(f"{part}.bias") for part in parts] if bias else []
        return BiasedLinear(torch.cat(rows), torch.cat(biases) if bias else None)

    def norm(name: str) -> LayerNorm:
        bias = tensor(f"{name}.bias") if spec.norm_bias else None
        return LayerNorm(tensor(f"{name}.weight"), bias, spec.norm_eps)

    def experts(own: str, settings: EncoderExpertsSpec) -> EncoderExperts:
        shape = (settings.count, spec.intermediate_size, spec.hidden_size)
        up, down = tensor(own + names.expert_up), tensor(own + names.expert_down)
        return EncoderExperts(
            settings.chosen,
            router=tensor(f"{own}{names.router}.weight"),
            up=up.view(shape),
            down=down.mT if names.experts_apart else down.view(shape),
            bias=tensor(own + names.expert_bias) if settings.bias else None,
        )

    layers = []
    for index, layer in enumerate(spec.layers):
        on_progress("weights", index, len(spec.layers))
        own = f"{prefix}{names.layer.format(index)}."
        layers.append(
            EncoderLayer(
                layer,
                qkv=linear(*(own + name for name in names.qkv), bias=spec.attention_bias),
                attention_out=linear(own + names.attention_out, bias=spec.attention_bias),
                attention_norm=norm(own + names.attention_norm) if layer.attention_norm else None,
                mlp=experts(own, spec.experts)
                if layer.routed and spec.experts is not None
                else (
                    linear(*(own + name for name in names.up), bias=spec.up_bias),
                    linear(own + names.down, bias=spec.down_bias),
                ),
                mlp_norm=norm(own + names.mlp_norm),
            )
        )
    on_progress("weights", len(spec.layers), len(spec.layers))
    head = None
    if spec.ranking is not None:
        head = EncoderHead(
            dense=linear(names.dense.format(prefix), bias=spec.ranking.bias),
            norm=norm(names.head_norm) if spec.ranking.normed else None,
            classifier=linear(names.classifier, bias=True),
        )
    return TextEncoder(
        spec,
        tokens=tensor(f"{prefix}{names.tokens}.weight"),
        positions=tensor(f"{prefix}{names.positions}.weight") if spec.positions else None,
        token_types=tensor(f"{prefix}{names.token_types}.weight") if spec.token_types else None,
        distances=tensor(f"{prefix}{names.distances}.weight") if spec.distance_buckets else None,
        embedding_norm=norm(prefix + names.embedding_norm),
        layers=tuple(layers),
        final_norm=None if spec.norms_follow else norm(prefix + names.final_norm),
        head=head,
        on_layer=on_layer,
    )
