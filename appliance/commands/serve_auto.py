"""Chooses settings that fit the machine, as `appliance fit` ranks them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from appliance.config import EngineConfig
from appliance.config.setting import fields_of
from appliance.errors import EngineError, MemoryPlanError
from appliance.runtime import child_environment


def with_best_fit(engine: EngineConfig, model: Path) -> tuple[EngineConfig, str]:
    """Return settings with the top-ranked KV precision and context, and the reason.

    Keeps the user's settings, `--weight-bits` included. Plans in a separate process, because the
    plan loads PyTorch, which a server never does.

    Raises:
        MemoryPlanError: nothing fits; the message names the closest setting that does.
    """
    ranked = [
        one
        for one in _ranked(engine, model)
        if one["weight_bits"] == engine.weight_bits
        and one["weights"] not in ("int8", "int4")  # `quantize` would have to make them first
        and engine.kv_cache_dtype in ("auto", one["kv_cache_dtype"])
    ]
    best = next((one for one in ranked if one["fits"]), None)
    if best is None:
        raise MemoryPlanError(ranked[0]["refusal"] if ranked else "nothing fits; see appliance fit")
    chosen = msgspec.structs.replace(
        engine, kv_cache_dtype=best["kv_cache_dtype"], max_model_len=best["context_length"]
    )
    total, budget = (best["bytes"][name] / 2**30 for name in ("total", "budget"))
    why = (
        f"KV cache {best['kv_format']}, context {best['context_length']:,}: {total:.2f} of"
        f" {budget:.2f} GiB"
    )
    if best["refusal"]:
        why += f"; with a longer context {best['refusal']}"
    return chosen, why


def _ranked(engine: EngineConfig, model: Path) -> list[dict[str, Any]]:
    fields = fields_of(type(engine))
    values = ((fields[name], getattr(engine, name)) for name in fields)
    variables = {
        field.variable: field.as_text(value)
        for field, value in values
        if value not in (None, "", field.default)
    }
    context = [] if engine.max_model_len is None else ["--context", str(engine.max_model_len)]
    words = ["fit", str(model), "--json", "--no-speed", *context]
    finished = subprocess.run(
        [sys.executable, "-P", "-m", "appliance", *words],
        env=child_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines()
        raise EngineError(lines[-1].removeprefix("error: ") if lines else "appliance fit failed")
    found: list[dict[str, Any]] = json.loads(finished.stdout)["candidates"]
    return found
