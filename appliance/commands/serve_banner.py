"""The lines that a person reads once the server is ready, and the last one when it stopped."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.model_files.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults
from appliance.runtime import resident_bytes
from appliance.wording import as_size, counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from appliance.commands.quality import Quality
    from appliance.config import EngineConfig
    from appliance.engine.nouns.messages import EngineInfo

_NAME = "appliance"
_COPIED = ("endpoint", "network", "page", "dashboard", "try it")
_INDENT = 13  # of texts behind their labels
STOPPED = "stopped; "  # prefix of the last line


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
    columns: int = 0,
) -> str:
    """Format the facts for the user once the server is ready; shows keys by name only.

    Args:
        url: for this machine.
        network: for other machines.
        started_in: the stages of the start.
        columns: of the terminal, within which lines that nobody copies are broken; 0 for none.
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
    return "\n".join(_row(label, text, columns) for label, text in rows)


def _row(label: str, text: str, columns: int) -> str:
    line = f"  {label:<10} {text}"
    if label in _COPIED or columns <= 2 * _INDENT:
        return line
    return textwrap.fill(
        line,
        columns,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
            f" {counted(info.num_checkpoints, 'checkpoint')}, {each:,.1f} MiB each in"
            f" {info.state_format}",
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
    parts |= {"drafts": info.draft_bytes, "pictures": info.picture_bytes}
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
        # Beside a GPU it is taken at the start, see `PinnedMemory`; else as blocks leave.
        how = "pinned from the start on," if info.kv_host_is_pinned else "up to"
        rows.append(("swap", f"{how} {size} that have to make room, beside all that"))
    return rows


def parting(num_requests: int, config: EngineConfig) -> str:
    served = f"{num_requests:,} request{'' if num_requests == 1 else 's'} served"
    return f"{STOPPED}{served}; {_kept(config)}"


def _kept(config: EngineConfig) -> str:
    from appliance.config import kv_dir
    from appliance.engine.tiers.stored_models import stored_models

    nothing = "nothing is kept on disk"
    if config.kv_disk in ("auto", "off"):
        return nothing
    root = Path(config.kv_disk).expanduser()
    num_bytes = sum(model.num_bytes for model in stored_models(root))
    if not num_bytes:
        return nothing
    option = "" if root == kv_dir() else f" --kv-disk {shlex.quote(str(root))}"
    return (
        f"{as_size(num_bytes)} of prompts and answers are kept in {root} for the next start"
        f" ({own_command()} cache ls{option})"
    )


class ExampleRequest(Enum):
    """A first request by kind of model: the path, and the body without the model's name."""

    CHAT = (
        "v1/chat/completions",
        {
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        },
    )
    CONTINUE = ("v1/completions", {"max_tokens": 60, "prompt": "Once upon a time"})
    EMBED = ("v1/embeddings", {"input": ["Bread is made of flour."]})
    RANK = ("v1/rerank", {"query": "What is bread?", "documents": ["A food.", "A bird."]})


def own_command() -> str:
    """Return this program's command, valid in any folder.

    Uses the bare name only if it is on every terminal's PATH: a virtual environment is not active
    in the next terminal.
    """
    script = Path(sys.argv[0])
    if script.name != _NAME:
        return f"{shlex.quote(sys.executable)} -m {_NAME}"
    script = script.absolute()
    found = shutil.which(_NAME)
    if found is not None and script.exists() and script.samefile(found):
        in_environment = sys.prefix != sys.base_prefix
        if not (in_environment and Path(found).is_relative_to(sys.prefix)):
            return _NAME
    return shlex.quote(str(script))


def try_it(
    url: str, name: str, sampling: SamplingDefaults, *, use: ExampleRequest, keyed: bool
) -> str:
    """Format a curl request that the model can answer.

    Args:
        use: the kind of model.
        keyed: the server needs a key; takes it from the environment.
    """
    body: dict[str, Any] = {"model": name}
    path, asked = use.value
    if "max_tokens" in asked and "temperature" not in sampling.values:
        body["temperature"] = 0.7
    body |= asked
    words = [
        "curl", shlex.quote(f"{url}/{path}"),
        *(["-H", '"Authorization: Bearer $APPLIANCE_API_KEY"'] if keyed else []),
        "-H", "'Content-Type: application/json'",
        "-d", shlex.quote(json.dumps(body, ensure_ascii=False)),
    ]  # fmt: skip
    return " ".join(words)
