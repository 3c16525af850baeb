"""Tries one header in two ways, and judges the outcome."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors.torch import save_file
from support.models.real_headers.caches import kept, kept_in_all
from support.models.real_headers.header import INDEX, Header
from support.models.real_headers.quantized import UnknownFormError, quantization_of
from support.models.real_headers.refusals import OTHER_TOTALS
from support.models.real_headers.sizes import CONTEXT, FIRST_SPECIAL, scaled_down, text_section
from support.models.real_headers.theirs import (
    NoClassError,
    TooLargeError,
    hub_tensors,
    num_of_text,
    part_of,
    placed,
    reference_logits,
    with_content,
    with_sizes,
    with_towers,
    without_content,
)
from support.models.teacher_forcing import logits_of

from appliance.config import EngineConfig
from appliance.engine.load.memory_request import request_memory, with_other_cache
from appliance.engine.memory.plan import plan_memory
from appliance.errors import ApplianceError
from appliance.fit.candidates import candidates
from appliance.fit.place import ModelPlace
from appliance.kernels.backend import REFERENCE
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.operations import TorchOperations
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Set
    from pathlib import Path

    from torch import Tensor

    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource

Entries = dict[str, tuple[str, tuple[int, ...]]]  # type and shape by name
_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8",
    torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
_SIZES = {name: torch.empty(0, dtype=dtype).element_size() for dtype, name in _NAMES.items()}
_ENOUGH = 1 << 43  # bytes of an imagined machine that holds any model
LOGITS, SIZES = 1e-4, 0.02  # largest relative differences
_LONG, _MOST_SPARE = 4096, 1.5  # tokens of a class with its own cache; its planned size
_TOKENS = 45


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        state: "ok", "refused", "wrong" or "untried".
        reason: a refusal's text; else what is wrong or left out.
        served: what executes the model, if all is right.
    """

    state: str
    reason: str = ""
    served: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


def try_small(header: Header, folder: Path) -> Outcome:
    """Scale a model down, and compare its logits with transformers'."""
    made = _with_quantization(header, folder)
    if isinstance(made, Outcome):
        return made
    tokens = torch.randint(3, FIRST_SPECIAL, (_TOKENS,), generator=torch.Generator().manual_seed(2))
    token_ids: list[int] = tokens.tolist()
    theirs = reference_logits(folder / "dense", token_ids)
    if theirs.std() < 0.01 or not theirs.isfinite().all():
        return Outcome("untried", f"a model that says nothing (std {theirs.std():.2g})")
    try:
        source = open_model(folder / "stored")
        context = _context_of(source)
        chunks = [_TOKENS - 4, 1, 1, 1, 1]
        ours = logits_of(_loaded(source, context), token_ids, chunks=chunks)
    except ApplianceError as error:
        return Outcome("refused", str(error))
    difference = float((ours - theirs).norm() / theirs.norm())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    if not difference < LOGITS or same < 1:
        return Outcome("wrong", f"logits differ by {difference:.2g}, {same:.0%} of the tokens same")
    longest = _their_context(folder / "dense")
    if longest and source.spec.context_length not in (CONTEXT, longest):
        return Outcome("wrong", f"a context of {source.spec.context_length} tokens")
    return Outcome("ok", f"{difference:.1e}", _served(source))


def _loaded(source: ModelSource, context: int | None) -> Executor[Any]:
    """Load on the reference kernels, or by transformers' modules if we have no such family."""
    device = torch.device("cpu")
    if source.fallback is None:
        return load_decoder(source, REFERENCE, device, torch.float32, context_length=context)
    operations = TorchOperations(REFERENCE, device, torch.float32)
    return load_fallback(source, operations, torch.float32)


def _their_context(folder: Path) -> int:
    import transformers

    text = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    return int(getattr(text, "max_position_embeddings", 0) or 0)


def _context_of(source: ModelSource) -> int | None:
    """Return the context with which context-dependent angles equal transformers'."""
    rope = source.config.get("rope_scaling") or source.config.get("rope_parameters") or {}
    original = rope.get("original_max_position_embeddings") or source.config.get(
        "original_max_position_embeddings"
    )
    return original if isinstance(original, int) and original >= _TOKENS else None


def _with_quantization(header: Header, folder: Path) -> Outcome | None:
    """Write a small model twice: dense, and in its maker's form; or return why not."""
    try:
        form = quantization_of(header)
        unit = 16 if form is None else 32
        whole = with_towers(header.config, folder / "dense")
        config = scaled_down(whole, unit)
        part, prefix = part_of(config)
        try:
            tensors = hub_tensors(with_content(part, folder / "dense"))
        except TooLargeError:  # the class's defaults for missing sizes
            config = scaled_down(with_sizes(whole, folder / "dense"), unit)
            part, prefix = part_of(config)
            tensors = hub_tensors(with_content(part, folder / "dense"))
    except NoClassError as error:
        return _refused_unseen(header, folder, f"transformers has no class for {error}")
    except UnknownFormError as error:
        return _refused_unseen(header, folder, f"no description here of {error}")
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous().clone()
        parts, dense[name] = (
            ({name: tensor}, tensor) if form is None else form.tensors(name, tensor)
        )
        stored |= {placed(prefix, key): value for key, value in parts.items()}
        dense[name] = dense[name].contiguous().clone()
    save_file(dense, folder / "dense" / "model.safetensors", {"format": "pt"})
    _write_settings(header, config, folder / "stored")
    own = {name: part.contiguous().clone() for name, part in stored.items()}
    save_file(own, folder / "stored" / "model.safetensors", {"format": "pt"})
    return None


def _refused_unseen(header: Header, folder: Path, why: str) -> Outcome:
    """Open a folder whose tensor names nobody here knows: its settings must be refused."""
    _write_settings(header, header.config, folder / "stored")
    _write_sparse(folder / "stored" / "model.safetensors", {"model.norm.weight": ("BF16", (8,))})
    try:
        open_model(folder / "stored")
    except ApplianceError as error:
        return Outcome("refused", str(error))
    return Outcome("wrong", f"opened, although {why}")


def _write_settings(header: Header, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in header.beside.items():
        (folder / name).write_text(json.dumps(content))


def try_whole(header: Header, folder: Path) -> Outcome:
    """Open a model of full size without weights, and plan its memory as `fit` and `serve` do."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        form = quantization_of(header)
        part, prefix = part_of(header.config)
        model = without_content(part, folder / "dense")
    except NoClassError as error:
        return _refused_unseen(header, folder, f"transformers has no class for {error}")
    except UnknownFormError as error:
        return _refused_unseen(header, folder, f"no description here of {error}")
    dtype = _dtype_of(header.config)
    entries: Entries = {}
    contents: dict[str, Tensor] = {}  # of tensors that must be read to know a shape
    for name, tensor in hub_tensors(model).items():
        parts = {name: tensor} if form is None else form.tensors(name, tensor)[0]
        for key, value in parts.items():
            kept = dtype if value is tensor else value.dtype
            if not value.is_meta:
                contents[placed(prefix, key)] = value
            entries[placed(prefix, key)] = _NAMES[kept], tuple(value.shape)
    stored = folder / "stored"
    _write_settings(header, header.config, stored)
    wrong = _write_shards(header, stored, entries, contents)
    if wrong:
        return Outcome("wrong", wrong)
    try:
        source = open_model(stored, in_torch=False)
    except ApplianceError as error:
        return Outcome("refused", str(error))
    return judged(header, source, model)


def judged(header: Header, source: ModelSource, model: Any) -> Outcome:
    """Plan a model's memory as `fit` and `serve` do, and compare it with its makers' numbers.

    Args:
        model: transformers', without content.
    """
    try:
        plan = _planned(source)
    except ApplianceError as error:
        return Outcome("refused", str(error))
    for problem in _problems(header, source, plan, model):
        return Outcome("wrong", problem)
    sizes = f"{plan.weight_bytes / 1e9:.2f} GB, {plan.context} tokens of {plan.kv_bytes} bytes"
    return Outcome("ok", sizes, _served(source))


def _served(source: ModelSource) -> str:
    return "natively" if source.fallback is None else "by transformers' modules"


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan of memory.

    Attributes:
        kv_bytes: of a token on a GPU, with keys and values in 16 bits.
        ways: of serving it, by `fit`.
    """

    weight_bytes: int
    context: int
    kv_bytes: int
    ways: int


def _planned(source: ModelSource) -> _Plan:
    """Plan as `serve` does on a machine that holds any model, and as `fit` does."""
    config = EngineConfig(model="", device="cpu")
    _, request = request_memory(config, source)
    plan = plan_memory(replace(request, budget_bytes=_ENOUGH))
    rows = candidates(source, config, ModelPlace("an imagined GPU", 1000.0, _ENOUGH))
    in_16_bits = msgspec.structs.replace(config, kv_cache_dtype="bf16")
    on_gpu = with_other_cache(request, in_16_bits, source, _ENOUGH)
    ways = len([row for row in rows if row.plan])
    return _Plan(plan.weight_bytes, plan.context_length, on_gpu.kv_bytes_per_token, ways)


def _problems(header: Header, source: ModelSource, plan: _Plan, model: Any) -> Iterator[str]:
    """Compare a plan with config.json, the index, and transformers' model and its cache."""
    text = text_section(header.config)
    lengths = ("max_position_embeddings", "seq_length", "n_positions")
    given = next((text[key] for key in lengths if key in text), None)
    if given is not None and "index_topk" in text and source.spec.own_cache is None:
        given = min(given, text["index_topk"])  # an indexer limits contexts
    if given is not None and plan.context != given:
        yield f"a context of {plan.context}, and config.json says {given}"
    if not plan.ways:
        yield "fit finds no way to serve it"
    counted = sum(math.prod(slot.shape) for slot in source.slots())
    theirs = num_of_text(model)
    if abs(counted / theirs - 1) > SIZES:
        yield f"{counted:,} weights, and transformers' class has {theirs:,}"
    if header.quantization is None and abs(plan.weight_bytes / (2 * theirs) - 1) > SIZES:
        yield f"planned {plan.weight_bytes:,} bytes of weights of {2 * theirs:,}"
    total = ((header.index or {}).get("metadata") or {}).get("total_size")
    left = any("text only" in note for note in source.weights.notes())
    is_other = OTHER_TOTALS.get(header.name) == total
    if total and header.quantization is None and not left and not is_other:
        parameters = total / torch.empty(0, dtype=_dtype_of(header.config)).element_size()
        if abs(counted / parameters - 1) > SIZES:
            yield f"{counted:,} weights, and the index says {parameters:,.0f}"
    if (own := source.spec.own_cache) is not None:
        of_all = 4 * kept_in_all(model, _LONG)  # float32, as on a CPU
        planned = own.wide.fixed_bytes + own.wide.token_bytes * _LONG
        if not of_all * (1 - SIZES) <= planned <= _MOST_SPARE * of_all:
            yield f"{planned:,} bytes of {_LONG} tokens' cache of {of_all:,}"
        return
    held = kept(model, header.config)
    if plan.kv_bytes != 2 * held.of_token:
        yield f"{plan.kv_bytes:,} bytes of a token's cache of {2 * held.of_token:,}"
    state = sum(
        math.prod(shape) for mixer in source.spec.recurrent_layers.values() for shape in mixer.state
    )
    if state != held.of_sequence:
        yield f"{state:,} numbers of a sequence's state of {held.of_sequence:,}"


def _dtype_of(config: dict[str, Any]) -> torch.dtype:
    for section in (config, text_section(config)):
        name = section.get("dtype") or section.get("torch_dtype")
        if isinstance(name, str):
            return getattr(torch, name.removeprefix("torch."))  # type: ignore[no-any-return]
    return torch.bfloat16


def _write_shards(
    header: Header, folder: Path, entries: Entries, contents: dict[str, Tensor]
) -> str | None:
    """Write the shards that the index names; return what is wrong with the index."""
    if header.index is None:
        _write_sparse(folder / "model.safetensors", entries, contents)
        return None
    places: dict[str, str] = header.index["weight_map"]
    entries = _as_named(entries, places.keys())
    missing = sorted(entries.keys() - places.keys())
    if missing:
        return f"transformers' class saves {missing[0]} ({len(missing)} so), the index has it not"
    embeddings = [
        name for name in entries if name.endswith(("embed_tokens.weight", "embeddings.weight"))
    ]
    for name in places.keys() - entries.keys():
        is_head = name == "lm_head.weight" and embeddings  # a tied one, stored as well
        entries[name] = entries[embeddings[0]] if is_head else ("F32", (1,))  # or an old buffer
    for shard in sorted(set(places.values())):
        inside = {name: entries[name] for name in entries if places[name] == shard}
        _write_sparse(folder / shard, inside, contents)
    (folder / INDEX).write_text(json.dumps(header.index))
    return None


def _as_named(entries: Entries, names: Set[str]) -> Entries:
    """Give tensors the names of an index where its maker's differ from the class's.

    Those of a text part lie deeper, and experts are stored one by one.
    """
    found: Entries = {}
    deeper = "model.language_model."
    is_deeper = any(name.startswith(deeper) for name in names)
    for name, (dtype, shape) in entries.items():
        is_own = name in names or name.startswith(deeper)
        if is_deeper and name.startswith("model.") and not is_own:
            name = deeper + name.removeprefix("model.")
        base, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        if name in names or f"{base}.0.{parts[0]}.weight" not in names:
            found[name] = dtype, shape
            continue
        count, rows, columns = shape
        for i in range(count):
            for part in parts:
                found[f"{base}.{i}.{part}.weight"] = dtype, (rows // len(parts), columns)
    return found


def _write_sparse(path: Path, entries: Entries, contents: dict[str, Tensor] | None = None) -> None:
    """Write a safetensors file of the right length, with a hole for all but `contents`."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in entries.items():
        start = end
        end += math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for name in (contents or {}).keys() & entries.keys():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write((contents or {})[name].numpy().tobytes())
