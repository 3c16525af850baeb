"""Measure the divergence of recurrent states that are kept in 16 bits from float32 ones.

    scripts/benchmark cpu_states                 # 4,096 tokens, one after another
    scripts/benchmark cpu_states --tokens 16384

Random models of four families, whose heads forget after 1 to 10,000 tokens, read tokens that they
have drawn themselves, a step for each as in answers, so that a state is rounded after each.
Weights, cache and arithmetic are float32's on both sides. The last quarter is given apart: errors
that add up would be larger there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from support.models.causal_models import random_model
from support.models.recurrent_models import RECURRENT
from support.models.teacher_forcing import BLOCK_SIZE, one_sequence

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cache.state_format import StateFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.model.native_loader import load_native
from appliance.model.source import open_model
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

FAMILIES = ("qwen3_5", "nemotron_h", "granite4-dense", "lfm2")
SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1 << 15,
}
LOGITS_STD = 3.0  # about a trained model's


def write_model(family: str, folder: Path) -> None:
    """Write a random model whose states last."""
    torch.manual_seed(0)
    model_type, settings = RECURRENT[family]
    if "mamba_n_heads" in settings:
        settings |= {"mamba_n_heads": settings["mamba_expand"] * SIZES["hidden_size"] // 32}
    model = random_model(model_type, **SIZES | settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(math.log(1e-4), 0.0)
            elif parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)


def logits_of_steps(
    decoder: Any, tokens: list[int] | None, count: int, scale: float, seed: int = 1
) -> tuple[torch.Tensor, list[int]]:
    """Return logits (count, vocab_size) after each token, and the tokens, drawn unless given."""
    generator = torch.Generator().manual_seed(seed)
    table = tuple(range(-(-count // BLOCK_SIZE)))
    cache = decoder.allocate_cache(
        KVFormat.FP32, num_blocks=len(table), block_size=BLOCK_SIZE, num_states=1
    )
    read, found = [1] if tokens is None else tokens, []
    for place in range(count):
        batch = one_sequence(table, place, place + 1, torch.device("cpu"), state_slot=0)
        ids = torch.tensor([read[place]])
        logits = decoder.forward(ids, torch.tensor([place]), batch, cache)[0] * scale
        found.append(logits)
        if tokens is None:
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            read.append(int(drawn))
    return torch.stack(found), read


def closeness(exact: torch.Tensor, kept: torch.Tensor) -> dict[str, float]:
    """Compare logits (count, vocab_size); KL(exact || kept) in nats."""
    expected, found = exact.double().log_softmax(-1), kept.double().log_softmax(-1)
    klds = (expected.exp() * (expected - found)).sum(-1)
    last = klds[-len(klds) // 4 :]
    same = (exact.argmax(-1) == kept.argmax(-1)).double().mean()
    return {
        "kld_mean": float(f"{float(klds.mean()):.3g}"),
        "kld_mean_last_quarter": float(f"{float(last.mean()):.3g}"),
        "kld_max": float(f"{float(klds.max()):.3g}"),
        "same_top_1_percent": round(100 * float(same), 2),
    }


def measure(family: str, count: int) -> dict[str, Any]:
    """Compare both formats of 16 bits on one family."""
    with TemporaryDirectory() as name:
        write_model(family, Path(name))
        source, engine = open_model(Path(name)), NativeEngine(load_library(), 1)

        def load(kept: StateFormat) -> Any:
            spec = replace(source.spec, state_format=kept)
            return load_native(replace(source, spec=spec), engine, torch.float32)

        wide = load(StateFormat.FP32)
        scale = LOGITS_STD / float(logits_of_steps(wide, None, 32, 1.0)[0].std())
        exact, tokens = logits_of_steps(wide, None, count, scale)
        found: dict[str, Any] = {"state_bytes_fp32": source.spec.state_bytes}
        for kept in (StateFormat.FP16, StateFormat.BF16):
            logits, _ = logits_of_steps(load(kept), tokens, count, scale)
            found[kept.value] = closeness(exact, logits)
        return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    result = {
        "benchmark": "cpu_states",
        "conditions": conditions(),
        "tokens": options.tokens,
        "families": {family: measure(family, options.tokens) for family in FAMILIES},
    }
    write_result(options.out, result)
