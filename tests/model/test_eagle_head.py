"""EAGLE-3 heads: their results, the streams that they read, and heads that do not fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.causal_models import random_model
from support.models.eagle_heads import (
    CONFIG,
    HIDDEN,
    SAID,
    TARGETS,
    VOCABULARY,
    PlainEagle,
    random_tensors,
    target_sizes,
    write_with_eagle,
)

from appliance.errors import ApplianceError, CheckpointError, ConfigError, UnsupportedModelError
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.draft_head import HeadSource, open_eagle
from appliance.model.native_loader import load_linear, load_native
from appliance.model.source import open_model
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.native import NativeDecoder

BLOCK = 16
LAYERS = 6


def write_target(folder: Path, model_type: str = "llama", **settings: Any) -> Any:
    torch.manual_seed(1)
    model = random_model(model_type, **target_sizes(LAYERS) | settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.float()


def write_head(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def batch_of(counts: list[int], contexts: list[int], blocks: list[list[int]]) -> RaggedBatch:
    return RaggedBatch.of(counts, contexts, blocks, block_size=BLOCK, device=torch.device("cpu"))


def prefixed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}


FORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "grouped": {"key_heads": 2},
    "biases": {"has_bias": True},
    "own embedding": {"has_embedding": True},
    "normed stream": {"config": {"norm_before_residual": True}},
}


def loaded(head: HeadSource, target: NativeDecoder) -> tuple[NativeDecoder, Any]:
    dtype, engine = torch.float32, target.engine
    decoder = load_native(
        head.source, engine, dtype, target=target, shared=head.shared, join=head.join
    )
    return decoder, load_linear(head.source, head.fuse, engine, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_its_numbers_are_those_of_the_definition(form: str, tmp_path: Path) -> None:
    options = FORMS[form]
    model = write_target(tmp_path / "model")
    heads = options.get("key_heads", 4)
    tensors = random_tensors(
        heads,
        has_bias=options.get("has_bias", False),
        has_embedding=options.get("has_embedding", False),
    )
    config = CONFIG | {"num_key_value_heads": heads} | options.get("config", {})
    path = write_head(tmp_path / "head", tensors, config)
    source = open_model(tmp_path / "model")
    target = load_native(source, NativeEngine(load_library(), 1), torch.float32)
    head = open_eagle(path, source)
    assert head.reads == (2, 3, 3)
    decoder, fuse = loaded(head, target)
    cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=4, block_size=BLOCK)
    plain = PlainEagle(
        path, model.get_input_embeddings().weight.detach(), is_normed=form == "normed stream"
    )
    count, drafts = 21, 3
    token_ids = torch.randint(VOCABULARY, (count + drafts,))
    streams = torch.randn(count, 3 * HIDDEN)
    table = [[2, 0]]

    def step(start: int, end: int, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch_of([end - start], [end], table)
        rows = torch.arange(end - start)
        ids, places = token_ids[start:end], torch.arange(start, end)
        return decoder.draft(ids, places, batch, cache, given, rows)

    found, hidden = step(0, count, fuse(streams))
    stream, hiddens = [found], [hidden]
    for place in range(count, count + drafts):
        found, hidden = step(place, place + 1, found[-1:])
        stream.append(found)
        hiddens.append(hidden)
    hidden = torch.cat(hiddens)
    own = torch.cat(stream)[count - 1 : -1]
    expected = plain(token_ids, streams, own)
    numbers = torch.cat(stream), hidden, decoder.logits(hidden)
    for got, wanted in zip(numbers, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert decoder.logits(hidden).shape == (count + drafts, SAID)


@pytest.mark.parametrize("target", TARGETS)
def test_the_streams_are_those_between_layers(target: str, tmp_path: Path) -> None:
    """Several sequences run in pieces, with any rows for the head."""
    model_type, settings = TARGETS[target]
    model = write_with_layers(tmp_path, model_type, settings)
    source = open_model(tmp_path)
    decoder = load_native(source, NativeEngine(load_library(), 1), torch.float32)
    layers = tuple(range(len(source.spec.layers)))
    token_ids = torch.randint(VOCABULARY, (2, 23))
    with torch.no_grad():
        expected = model(token_ids, output_hidden_states=True).hidden_states
    wanted = torch.stack(expected[: len(layers)], dim=2).flatten(2)  # (2, 23, layers * hidden)
    formats = KVFormat.BF16 if source.spec.latent_layers else KVFormat.FP32
    has_states = source.spec.state_bytes > 0

    def cache() -> Any:
        return decoder.allocate_cache(
            formats, num_blocks=4, block_size=BLOCK, num_states=2 if has_states else 0
        )

    recorded, plain = cache(), cache()
    for start, end in ((0, 18), (18, 23)):
        ids = token_ids[:, start:end].flatten()
        places = torch.arange(start, end).repeat(2)
        batch = RaggedBatch.of(
            [end - start] * 2,
            [end] * 2,
            [[0, 1], [3, 2]],
            block_size=BLOCK,
            device=torch.device("cpu"),
            state_slots=[0, 1] if has_states else None,
        )
        rows = torch.tensor([end - start - 1, 2 * (end - start) - 1])
        hidden, streams = decoder.recorded(ids, places, batch, recorded, rows, layers)
        assert torch.equal(hidden, decoder.hidden(ids, places, batch, plain, rows))
        found = streams.unflatten(0, (2, -1))
        tolerance = 2e-2 if formats is KVFormat.BF16 else 1e-4
        here = wanted[:, start:end]
        torch.testing.assert_close(
            found, here, rtol=tolerance, atol=tolerance * float(here.abs().max())
        )


def write_with_layers(folder: Path, model_type: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(2)
    model = random_model(model_type, **target_sizes(3) | settings)
    model.save_pretrained(folder)
    return model.float()


def test_the_layers_that_it_reads(tmp_path: Path) -> None:
    """It reads before the layers of a top-level list, and after those of a list in a section."""
    write_target(tmp_path / "model", num_hidden_layers=10)
    source = open_model(tmp_path / "model")
    tensors = random_tensors(4, has_bias=False, has_embedding=False)
    listed = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}

    def reads(config: dict[str, Any]) -> tuple[int, ...]:
        return open_eagle(write_head(tmp_path / "head", tensors, CONFIG | config), source).reads

    assert reads({}) == (2, 5, 7)
    assert reads(listed) == (1, 4, 6)
    assert reads({"eagle_config": listed}) == (2, 5, 7)
    assert reads({"eagle_config": {"use_aux_hidden_state": True}}) == (2, 5, 7)


def test_both_layouts_are_read(tmp_path: Path) -> None:
    write_target(tmp_path / "model")
    source = open_model(tmp_path / "model")
    tensors = random_tensors(4, has_bias=False, has_embedding=True)
    layer = {key: value for key, value in CONFIG.items() if key != "draft_vocab_size"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": SAID,
        "norm_before_residual": True,
        "transformer_layer_config": layer,
    }
    head = open_eagle(write_head(tmp_path / "new", prefixed(tensors), config), source)
    assert head.join.stream_is_normed
    old = open_eagle(write_head(tmp_path / "old", tensors), source)
    assert not old.join.stream_is_normed
    assert head.shared == old.shared == ()
    assert head.source.spec == old.source.spec
    assert [slot.shape for slot in head.slots()] == [slot.shape for slot in old.slots()]


def test_a_head_that_says_every_token_needs_no_names(tmp_path: Path) -> None:
    write_target(tmp_path / "model")
    source = open_model(tmp_path / "model")
    tensors = random_tensors(4, has_bias=False, has_embedding=False)
    del tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN)
    config = {key: value for key, value in CONFIG.items() if key != "draft_vocab_size"}
    head = open_eagle(write_head(tmp_path / "head", tensors, config), source)
    assert head.names is None
    assert head.shared == (Role.EMBEDDING,)


@pytest.mark.parametrize(
    ("config", "change", "error", "says"),
    [
        ({"hidden_size": 32}, {}, ConfigError, "hidden_size is 32 there, and has to be 64, the mo"),
        ({"target_hidden_size": 128}, {}, ConfigError, "target_hidden_size is 128 there"),
        ({"architectures": ["EagleForX"]}, {}, ConfigError, r"architectures is \['EagleForX'\] th"),
        ({"speculators_model_type": "x", "transformer_layer_config": {}}, {}, ConfigError, "_type"),
        ({"num_hidden_layers": 2}, {}, UnsupportedModelError, "num_hidden_layers"),
        ({"draft_vocab_size": 600}, {}, UnsupportedModelError, "draft_vocab_size"),
        ({"hidden_act": "relu"}, {}, ApplianceError, "hidden_act"),
        ({}, {"t2d": torch.ones(SAID).bool()}, ConfigError, r"t2d is 'a shape of \(480,\)' there"),
        ({}, {"d2t": torch.ones(SAID).long() * 500}, ConfigError, "d2t is 'other numbers' there"),
        ({}, {"d2t": torch.ones(9).long()}, ConfigError, "d2t is 'other numbers' there"),
        ({}, {"d2t": None}, ConfigError, "d2t is 'no tensor' there, and has to be 480 numbers"),
        ({}, {"fc.weight": torch.ones(64, 128)}, ConfigError, "fc.weight is 'a shape of"),
        ({}, {"fc.weight": None}, CheckpointError, "tensor fc.weight is missing"),
        ({}, {"norm.weight": None}, CheckpointError, "tensor norm.weight is missing"),
        (
            {},
            {"midlayer.self_attn.q_proj.weight": torch.ones(64, 64)},
            CheckpointError,
            r"q_proj.weight has shape \(64, 64\), but the model's settings ask for \(64, 128\)",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, {}, ConfigError, "of the model, which h"),
        (
            {},
            {"midlayer.self_attn.q_norm.weight": torch.ones(16)},
            ConfigError,
            r"midlayer.self_attn.q_norm.weight is 'a tensor' there, and has to be absent",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            {},
            ConfigError,
            "state is False there",
        ),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, {}, ConfigError, "layer_ids is '2' there"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}},
            {},
            ConfigError,
            r"layer_ids is \[1, 2, 5\] there, and has to be layers of the model, which has 6",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    config: dict[str, Any],
    change: dict[str, torch.Tensor | None],
    error: type[ApplianceError],
    says: str,
    tmp_path: Path,
) -> None:
    write_target(tmp_path / "model")
    tensors = random_tensors(4, has_bias=False, has_embedding=False)
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    path = write_head(tmp_path / "head", tensors, CONFIG | config)
    with pytest.raises(error, match=says):
        open_eagle(path, open_model(tmp_path / "model"))


def test_a_file_is_no_head(tmp_path: Path) -> None:
    write_target(tmp_path / "model")
    path = tmp_path / "head.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"eagle=head\.gguf: PATH is 'a file' there, and has to be"
    ):
        open_eagle(path, open_model(tmp_path / "model"))


def test_a_head_beside_its_model_is_whole(tmp_path: Path) -> None:
    path = write_with_eagle("llama", tmp_path)
    head = open_eagle(path, open_model(tmp_path))
    names = {slot.name for slot in head.slots()} | {"d2t", "t2d"}
    assert names == set(load_file(path / "model.safetensors"))
