"""Explains a memory plan that does not fit. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.memory.states import needed_states
from appliance.wording import as_size

if TYPE_CHECKING:
    from appliance.engine.memory.plan import MemoryRequest


def refusal(request: MemoryRequest, context: int, workspace: int, for_kv: int) -> str:
    """Return the numbers of a plan that does not fit, and the nearest settings that would.

    Args:
        context: tokens.
        workspace: bytes.
        for_kv: bytes left for the KV cache; negative if the rest does not fit.
    """
    needed = context * request.kv_bytes_per_token
    host = request.host_share
    swapped = f" and {as_size(host)} for blocks that make room (--kv-host-memory)" if host else ""
    asked = request.kv_cache_memory
    wish = "" if asked is None else f"--kv-cache-memory asks for {as_size(asked)}; "
    itself = f", {as_size(own)} of Python and libraries" if (own := request.process_bytes) else ""
    states = needed_states(request)
    rows = f" for {states.num_slots} sequences (--max-num-seqs)"
    rows += f" and {states.num_checkpoints} checkpoints" if states.num_checkpoints else ""
    recurrent = (
        f", {as_size(states.num_bytes)} of recurrent states{rows}" if states.num_bytes else ""
    )
    slots = request.adapter_bytes
    adapters = f", {as_size(slots)} of adapters (--max-loras, --max-lora-rank)" if slots else ""
    draft = f", {as_size(own)} of what drafts" if (own := request.draft_bytes) else ""
    on_host = len(request.host_experts.layers)
    experts = f" without the experts of {on_host} layers" if on_host else ""
    numbers = (
        f"{wish}one context of {context:,} tokens needs {as_size(needed)} of KV cache"
        f" ({request.kv_format})"
        f" beside {as_size(request.weight_bytes)} of weights{experts}{itself}{recurrent}{adapters}"
        f"{draft} and {as_size(workspace)} of"
        f" workspace{swapped}; {as_size(request.budget_bytes)} may be used"
    )
    usable = for_kv if asked is None else min(for_kv, asked)
    tokens = max(usable, 0) // request.kv_bytes_per_token
    advice = []
    block_bytes = request.kv_bytes_per_token * request.block_size
    wanted = max(asked or 0, -(-context // request.block_size) * block_bytes)
    if host and 0 <= for_kv + host - wanted < host:
        advice.append(f"--kv-host-memory {(for_kv + host - wanted) >> 20}MiB would fit")
    if states.row_bytes and (over := wanted - for_kv) > 0:
        fewer = states.num_slots + over // -states.row_bytes
        if states.num_checkpoints * states.row_bytes >= over:
            size = states.num_checkpoints * states.row_bytes - over
            advice.append(f"--state-checkpoint-memory {size >> 20}MiB would fit")
        elif fewer > 0:
            advice.append(f"--max-num-seqs {fewer} would fit")
    if slots and wanted - for_kv <= slots:
        advice.append("a smaller --max-loras or --max-lora-rank would fit")
    if request.draft_bytes and wanted - for_kv <= request.draft_bytes:
        advice.append("--speculate auto, without what drafts, would fit")
    if asked is not None and needed <= for_kv:
        too_much = asked > for_kv
        size = for_kv // 2**20 if too_much else -(-needed // 2**20)
        advice.append(f"--kv-cache-memory {size}MiB is the {'most' if too_much else 'least'}")
    if 16 <= tokens < context:
        step = 1024 if tokens >= 4096 else request.block_size
        advice.append(f"--max-model-len {tokens // step * step} would fit")
        if request.kv_format != "int8" and 0.53 * needed <= usable:
            advice.append("--kv-cache-dtype int8 would fit")
    if not on_host:
        # Neither of a split's sides is what these bytes are of.
        missing = wanted - for_kv
        bits = (
            count for count, size in request.rounded() if request.weight_bytes - size >= missing
        )
        if (count := next(bits, None)) is not None:
            advice.append(f"--weight-bits {count} would fit")
    if not advice:
        advice.append("quantize the weights to 4 bits (appliance quantize) or take a smaller model")
    return f"this does not fit: {numbers}. Nearest settings: {'; '.join(advice)}"
