"""GGUF files with random changes of settings: every door reads them or says why not."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gguf.gguf_fallbacks import MODELS, write_file
from support.gguf.gguf_files import with_metadata
from support.gguf.gguf_models import write_gguf, write_gguf_adapter
from support.models.causal_models import random_model

from appliance.errors import ApplianceError
from appliance.gguf import read_header
from appliance.model.adapters.gguf_adapter import read_gguf
from appliance.model.adapters.targets import adapter_targets
from appliance.model.encoder.source import open_checked
from appliance.model.source import open_model
from appliance.tokenizer import Tokenizer

TEXT = "the cat, 12 "
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TOKENS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127))]
SENTENCEPIECE = {
    "model": "llama",
    "tokens": TOKENS,
    "scores": [-float(index) for index in range(97)],
    "token_type": [2, 3, 3, *[1] * 94],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
    "add_space_prefix": True,
}
BYTE_LEVEL = {
    "model": "gpt2",
    "pre": "qwen2",
    "tokens": TOKENS,
    "token_type": [3, 3, 3, *[1] * 94],
    "merges": ["t h", "th e"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "add_bos_token": False,
}
EXTRA = {"chat_template": "{{ messages[0].content }}"}
# Keys that files may have besides those of the bases.
MORE = (
    "general.alignment", "general.type", "general.file_type", "split.count", "split.no",
    "split.tensors.count", "adapter.lora.alpha", "general.sampling.temp", "xielu.eps",
    "tokenizer.chat_templates", "tokenizer.chat_template.tool_use", "general.base_model.0.name",
    *(f"tokenizer.ggml.{name}" for name in ("pre", "eot_token_id", "precompiled_charsmap")),
    *(f"tokenizer.ggml.{name}" for name in ("add_eos_token", "eog_token_ids", "suppress_tokens")),
    *(f"llama.{key}" for key in ("rope.scaling.type", "rope.scaling.factor", "expert_count")),
    *(f"llama.{key}" for key in ("pooling_type", "vision.block_count", "a_key_of_tomorrow")),
)  # fmt: skip
BASES = ("sentencepiece", "byte-level", "gemma3n", "apertus", "adapter", "bert")


def made(name: str, folder: Path) -> Path:
    torch.manual_seed(1)
    path, model = folder / f"{name}.gguf", None
    if name in MODELS:
        kind, own = MODELS[name]
        small = SIZES | {"num_hidden_layers": 3} | own
        return write_file(path, name, random_model(kind, **small).float())
    model = random_model("llama", **SIZES)
    if name == "adapter":
        source = open_model(write_gguf(folder / "model.gguf", model, "llama", {}))
        assert source.family.gguf is not None
        first = next(iter(adapter_targets(source.spec, source.family.gguf.names)))
        factors = {f"{first}.weight.lora_a": (4, 64), f"{first}.weight.lora_b": (64, 4)}
        tensors = {key: torch.ones(shape) for key, shape in factors.items()}
        return write_gguf_adapter(path, tensors, alpha=8.0)
    base = write_gguf(folder / "base.gguf", model, "llama", {})
    entries = read_header(base).metadata
    if name == "bert":
        entries = entries | {"general.architecture": "bert", "bert.block_count": 2}
    tokens = SENTENCEPIECE if name == "sentencepiece" else BYTE_LEVEL
    entries |= {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    entries |= {f"tokenizer.{key}": value for key, value in EXTRA.items()}
    return with_metadata(base, path, entries.items())


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: made(name, folder) for name in BASES}


def text(content: bytes) -> bytes:
    return struct.pack("<IQ", gguf.GGUFValueType.STRING, len(content)) + content


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, count) + content


ODD: list[Any] = [
    0, 1, 2, 3, 7, -1, 2**31, 2**32 - 1, 2**63 - 1, True, False, 0.0, 0.5, -1.5, 1e30,
    float("nan"), float("inf"), "", "none", "llama", "x" * 5000, "\x00", "{{ 1 / 0 }}", "{% for",
    [], [0], [1, 2], [0.5] * 97, ["a"], ["a", "a"], [-1] * 97, [2**32 - 1] * 3, ["\ud7ff"] * 97,
    text(b"\xff\xfe"),
    array(9, 2, struct.pack("<IQI", 4, 1, 5) * 2),  # arrays of arrays
    array(4, 2**40),
    array(8, 2**31, struct.pack("<Q", 2**50)),
    struct.pack("<I", 77),  # an unknown type
]  # fmt: skip


@st.composite
def edits(draw: st.DrawFn, known: list[str]) -> dict[str, Any]:
    """New values by key; None removes a key, a function changes its value."""
    found: dict[str, Any] = {}
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(known) | st.sampled_from(MORE))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            found[key] = None
        elif kind == 1:
            position, value = draw(st.integers(0, 96)), draw(st.sampled_from(ODD))
            found[key] = lambda old, p=position, v=value: changed(old, p, v)
        else:
            found[key] = draw(st.sampled_from(ODD))
    return found


def changed(old: Any, position: int, value: Any) -> Any:
    """A list with another element, or without its end; another value of the same kind."""
    if isinstance(old, list) and old:
        position %= len(old)
        if type(value) is type(old[0]):
            return [*old[:position], value, *old[position + 1 :]]
        return old[:position]
    if isinstance(old, str):
        return old[: position % (len(old) + 1)] + "\u00e9\n"
    return value


def door(path: Path, base: str) -> None:
    """The first step of each command with a file."""
    if base == "adapter":
        model = open_model(path.parent / "model.gguf")
        assert model.family.gguf is not None
        read_gguf(path, model, adapter_targets(model.spec, model.family.names))
        return
    open_checked(path)
    if base in ("sentencepiece", "byte-level"):
        tokenizer = Tokenizer.from_path(path)
        tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=True))


EXAMPLES = int(os.environ.pop("APPLIANCE_TEST_CHANGES", "20"))


@pytest.mark.parametrize("base", BASES)
@settings(
    max_examples=EXAMPLES,
    deadline=5000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_file_with_changed_settings_is_read_or_refused_in_one_line(
    base: str, bases: dict[str, Path], data: st.DataObject
) -> None:
    metadata = read_header(bases[base]).metadata
    entries = dict(metadata)
    for key, value in data.draw(edits(sorted(metadata))).items():
        made_of = value(entries.get(key)) if callable(value) else value
        entries[key] = made_of
    path = bases[base].parent / "changed.gguf"
    try:
        with_metadata(bases[base], path, [(k, v) for k, v in entries.items() if v is not None])
    except (TypeError, struct.error, OverflowError, UnicodeEncodeError):
        return  # no file can store it
    try:
        door(path, base)
    except ApplianceError as error:
        said = str(error)
        assert "\n" not in said
        assert len(said) < 1500
