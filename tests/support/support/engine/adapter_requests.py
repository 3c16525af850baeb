"""An engine of a tiny AWQ model with slots for adapters, and requests that name some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.engine.late_device import LateDevice
from support.models.checkpoint_forms import SHAPES

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import AdapterRef, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.files import stamp_of

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.nouns.messages import SequenceDelta

ALL = {
    f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in SHAPES.items()
}
PROMPT = tuple(range(3, 43))


def load(model: Path, **options: Any) -> LLMEngine:
    given = {
        "threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "lora_dir": "/adapters",
        "max_loras": 2,
        "kv_cache_dtype": "bf16",
        **options,
    }
    device = LateDevice() if given.pop("late", False) else None
    config = EngineConfig(model=str(model), **given)
    return load_llm_engine(config, (), None, lambda *_: None, device)


def ref(folder: Path) -> AdapterRef:
    return AdapterRef(folder.name, str(folder), stamp_of(folder))


def request(
    name: str, folder: Path | None = None, prompt: tuple[int, ...] = PROMPT, **sampling: Any
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling}),
        adapter=None if folder is None else ref(folder),
    )


def run(engine: LLMEngine, *requests: Request) -> dict[str, list[int]]:
    """Run requests together; return the tokens of each, by id and choice."""
    for one in requests:
        engine.submit(one)
    found: dict[str, list[int]] = {}
    for delta in finish(engine):
        assert delta.error is None, delta.error
        key = delta.request_id + (f"/{delta.index}" if delta.index else "")
        found.setdefault(key, []).extend(delta.token_ids)
    return found


def finish(engine: LLMEngine) -> list[SequenceDelta]:
    deltas: list[SequenceDelta] = []
    while engine.has_work:
        deltas += engine.step().deltas
        engine.check_invariants()
    return deltas
