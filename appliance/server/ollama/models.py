"""Describes the served models as Ollama does."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from appliance.engine.process.supervisor import EngineState
from appliance.engine.run.adapters.adapter_names import LATEST
from appliance.server.ollama.answers import Details, RunningModel, Shown, Tag
from appliance.server.ollama.lines import written
from appliance.tokenizer.fim import find_form

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.server.models.model_state import ModelState

_NEVER = "9999-12-31T23:59:59Z"  # the model stays loaded


def tag(state: ModelState) -> Tag:
    info, name = state.engine.info, _name(state)
    return Tag(
        name=name,
        model=name,
        modified_at=_loaded_at(state),
        size=0 if info is None else info.weight_bytes,
        digest=_digest(name if info is None else info.fingerprint),
        details=Details() if info is None else _details(state, info),
    )


def is_resident(state: ModelState) -> bool:
    """Return True if the model is loaded and awake."""
    return state.is_loaded and state.engine.state is not EngineState.ASLEEP


def running(state: ModelState) -> RunningModel:
    info, _ = state.serving()
    name, size = _name(state), info.weight_bytes + info.kv_bytes + info.workspace_bytes
    return RunningModel(
        name=name,
        model=name,
        size=size,
        digest=_digest(info.fingerprint),
        details=_details(state, info),
        expires_at=_NEVER,
        size_vram=0 if info.device.lower().startswith("cpu") else size,
        context_length=info.context_length,
    )


def shown(state: ModelState) -> Shown:
    info, tokenizer = state.serving()
    capabilities = ["completion"]
    if tokenizer.chat_template is not None:
        capabilities.append("tools")
        if thinks(state):
            capabilities.append("thinking")
    if state.pictures is not None:
        capabilities.append("vision")
    if find_form(tokenizer) is not None:
        capabilities.append("insert")
    if tokenizer.retrieval.embedding.source:
        capabilities.append("embedding")
    values = state.sampling.values
    return Shown(
        parameters="\n".join(f"{name} {value}" for name, value in values.items()),
        template="" if tokenizer.chat_template is None else tokenizer.chat_template.source,
        details=_details(state, info),
        model_info={
            "general.architecture": info.architecture,
            "general.basename": state.model_id,  # the name that Copilot shows
            **({"general.parameter_count": info.num_parameters} if info.num_parameters else {}),
            f"{info.architecture}.context_length": info.context_length,
            f"{info.architecture}.vocab_size": info.vocab_size,
        },
        capabilities=capabilities,
        modified_at=_loaded_at(state),
    )


def thinks(state: ModelState) -> bool:
    """Return True if the model is known to write thoughts."""
    _, tokenizer = state.serving()
    return tokenizer.dialect.budget_marks is not None


def _name(state: ModelState) -> str:
    return state.model_id if ":" in state.model_id else state.model_id + LATEST


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _loaded_at(state: ModelState) -> str:
    return written(datetime.fromtimestamp(state.server.started, UTC))


def _details(state: ModelState, info: EngineInfo) -> Details:
    return Details(
        format="gguf" if state.is_gguf else "safetensors",
        family=info.architecture,
        families=[info.architecture],
        parameter_size=in_short(info.num_parameters) if info.num_parameters else "",
        quantization_level=info.weight_format,
    )


def in_short(count: int) -> str:
    """Write a number of parameters as Ollama does, e.g. 134.52M or 7.6B."""
    for unit, size, places in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if count >= size:
            return f"{count / size:.{places if count % size else 0}f}{unit}"
    return str(count)
