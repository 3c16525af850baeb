"""The lines that a person reads once the server is ready."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from appliance.commands.examples import ExampleRequest, own_command, try_it
from appliance.model_files.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults
from appliance.runtime import resident_bytes
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from appliance.commands.quality import Quality
    from appliance.engine.nouns.messages import EngineInfo


def banner(
    url: str,
    name: str,
    info: EngineInfo,
    quality: Quality | None = None,
    keys: Iterable[str] = (),
    *,
    sampling: SamplingDefaults = NOTHING_RECOMMENDED,
    chats: bool = True,
    others: Sequence[str] = (),
    replicas: int = 1,
    network: str | None = None,
    started_in: str = "",
) -> str:
    """Format the facts for the user once the server is ready; shows keys by name only.

    Args:
        url: for this machine.
        network: for other machines.
        started_in: the stages of the start.
    """
    names = ", ".join(keys)
    rows = [
        ("endpoint", f"{url}/v1"),
        *([("network", f"{network}/v1 from other machines")] if network else []),
        ("model", _model_in_words(name, info)),
        *([("drafts", info.drafts)] if info.drafts else []),
        *([("models", f"{', '.join(others)}: loaded when a request names them")] if others else []),
        *([("replicas", f"{replicas}, each with its own of what follows")] if replicas > 1 else []),
        *_memory_rows(info),
        *_text_rows(info, sampling),
        *([("started in", started_in)] if started_in else []),
        *(("quality", line) for line in (quality.lines if quality is not None else ())),
        *(("note", note) for note in info.notes),
        *([("keys", f"{names}; what is below reads one from APPLIANCE_API_KEY")] if names else []),
        *_page_rows(url, info, chats=chats),
        ("dashboard", f"{own_command()} top --url {shlex.quote(url)}"),
        (
            "try it",
            try_it(url, name, sampling, use=_example_of(info, chats=chats), keyed=bool(names)),
        ),
    ]
    return "\n".join(f"  {label:<10} {text}" for label, text in rows)


def _example_of(info: EngineInfo, *, chats: bool) -> ExampleRequest:
    if not info.num_blocks:
        return ExampleRequest.RANK if info.ranks_pairs else ExampleRequest.EMBED
    return ExampleRequest.CHAT if chats else ExampleRequest.CONTINUE


def _page_rows(url: str, info: EngineInfo, *, chats: bool) -> list[tuple[str, str]]:
    if not info.num_blocks:
        return []
    return [("page", f"{url}/ with {'a chat' if chats else 'a text that the model continues'}")]


def _text_rows(info: EngineInfo, sampling: SamplingDefaults) -> list[tuple[str, str]]:
    if not info.num_blocks:
        kind = "pairs of texts that it ranks" if info.ranks_pairs else "texts that it embeds"
        return [("encoder", f"{kind}, of up to {info.context_length:,} tokens; no KV cache")]
    tokens = info.num_blocks * info.block_size
    blocks = f"{info.kv_format}, {info.num_blocks:,} blocks of {info.block_size}"
    return [
        ("KV cache", f"{blocks} = {tokens:,} tokens; context {info.context_length:,}"),
        *_state_rows(info),
        ("sampling", _sampling_in_words(sampling)),
    ]


def _state_rows(info: EngineInfo) -> list[tuple[str, str]]:
    if not info.state_bytes:
        return []
    each = info.state_bytes / (info.max_num_seqs + info.num_checkpoints) / 2**20
    return [
        (
            "states",
            f"{counted(info.max_num_seqs, 'slot')} for sequences and"
            f" {counted(info.num_checkpoints, 'checkpoint')}, {each:,.1f} MiB each",
        )
    ]


def _model_in_words(name: str, info: EngineInfo) -> str:
    experts = ""
    if info.num_experts:
        experts = f" of {info.num_experts} experts, {info.experts_per_token} for each token"
    return f"{name}, {info.architecture}{experts}; weights {info.weight_format}; on {info.device}"


def _sampling_in_words(sampling: SamplingDefaults) -> str:
    if not sampling:
        return "temperature 1, no token left out; a request may say otherwise"
    return f"{sampling}, from {sampling.source}; a request may say otherwise"


def _memory_rows(info: EngineInfo) -> list[tuple[str, str]]:
    parts = {"weights": info.weight_bytes, "KV cache": info.kv_bytes, "states": info.state_bytes}
    parts |= {"drafts": info.draft_bytes}
    parts |= {"workspace": info.workspace_bytes, "Python and libraries": info.process_bytes}
    mib = 2**20
    listed = " + ".join(f"{name} {size / mib:,.0f}" for name, size in parts.items() if size)
    full = " once the KV cache is full" if info.kv_bytes else ""
    rows = [
        (
            "memory",
            f"{sum(parts.values()) / mib:,.0f} MiB{full}: {listed};"
            f" {info.memory_bytes / mib:,.0f} may be used. This server takes"
            f" {resident_bytes() / mib:,.0f} beside it",
        )
    ]
    if info.kv_host_bytes:
        size = f"{info.kv_host_bytes / mib:,.0f} MiB of host memory for KV blocks"
        rows.append(("swap", f"up to {size} that have to make room, beside all that"))
    return rows
