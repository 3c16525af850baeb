"""The decoder's steps: cuts, blocks and other sequences in the step change no result."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.teacher_forcing import BLOCK_SIZE, logits_of, one_sequence

from appliance.kernels.backend import CPU, REFERENCE
from appliance.kernels.cache.decoder_cache import KVCache
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.operations import Backend
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.decoder import Decoder

    Part = tuple[list[int], tuple[int, ...], int, int]  # tokens, block table, first, end

CPU_DEVICE = torch.device("cpu")
WINDOWED = {"head_dim": 12, "sliding_window": 7, "num_hidden_layers": 7}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma3": {"model_type": "gemma3_text", **WINDOWED},
}
SCATTERED = (5, 2, 7)  # blocks of 45 tokens
CUTS = [[45], [16, 16, 13], [7, 1, 9, 20, 1, 1, 6], [1] * 45]

pytestmark = pytest.mark.usefixtures("unlike_products")
both_backends = pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=["reference", "cpu"])


@pytest.fixture(scope="module", params=MODELS)
def folder(
    request: pytest.FixtureRequest,
    make_model: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(**MODELS[request.param]).save_pretrained(folder)
    return folder


def load(folder: Path, backend: Backend, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(open_model(folder), backend, CPU_DEVICE, dtype)


@both_backends
def test_chunked_prefill_and_decode_equal_whole_prefill(
    folder: Path, backend: Backend, token_ids: list[int]
) -> None:
    decoder = load(folder, backend)
    whole = logits_of(decoder, token_ids)
    for chunks in CUTS:
        cut = logits_of(decoder, token_ids, chunks=chunks, block_table=SCATTERED)
        torch.testing.assert_close(cut, whole, atol=1e-4, rtol=0)


@both_backends
def test_an_int8_cache_costs_little_however_a_prompt_is_cut(
    folder: Path, backend: Backend, token_ids: list[int]
) -> None:
    decoder = load(folder, backend)
    exact = logits_of(decoder, token_ids)
    whole = logits_of(decoder, token_ids, format=KVFormat.INT8)
    log_exact, log_whole = exact.log_softmax(-1), whole.log_softmax(-1)
    divergence = (log_exact.exp() * (log_exact - log_whole)).sum(-1).mean().item()
    assert 1e-7 < divergence < 5e-3
    for chunks in CUTS:
        cut = logits_of(
            decoder, token_ids, chunks=chunks, format=KVFormat.INT8, block_table=SCATTERED
        )
        # A different last bit of a key can change its code, for a few elements in a thousand.
        assert (cut - whole).norm() < 0.25 * (whole - exact).norm()


@both_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_stay_near_float32(
    folder: Path, backend: Backend, dtype: torch.dtype, token_ids: list[int]
) -> None:
    exact = logits_of(load(folder, REFERENCE), token_ids)
    narrow = logits_of(load(folder, backend, dtype), token_ids)
    assert narrow.dtype == torch.float32
    error = (narrow - exact).norm() / exact.norm()
    assert error < (0.1 if dtype is torch.bfloat16 else 0.01)


def side_by_side(spans: list[tuple[tuple[int, ...], int, int]]) -> RaggedBatch:
    """A step of several sequences, each with a block table and the positions to run."""
    steps = [one_sequence(table, start, end, CPU_DEVICE) for table, start, end in spans]
    lens = tuple(step.host_query_lens[0] for step in steps)
    width = max(step.block_tables.shape[1] for step in steps)
    tables = [
        torch.nn.functional.pad(s.block_tables, (0, width - s.block_tables.shape[1])) for s in steps
    ]
    return RaggedBatch(
        query_start=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
        context_lens=torch.cat([step.context_lens for step in steps]),
        block_tables=torch.cat(tables),
        slot_mapping=torch.cat([step.slot_mapping for step in steps]),
        num_decodes=sum(1 for _ in itertools.takewhile(lambda length: length == 1, lens)),
        host_query_lens=lens,
        host_context_lens=tuple(step.host_context_lens[0] for step in steps),
    )


def run(
    decoder: Decoder,
    cache: KVCache,
    parts: list[Part],
    rows: list[int] | None = None,
) -> torch.Tensor:
    """Run one step over parts of sequences."""
    ids = [token for tokens, _, start, end in parts for token in tokens[start:end]]
    positions = [p for _, _, start, end in parts for p in range(start, end)]
    return decoder.forward(
        torch.tensor(ids),
        torch.tensor(positions),
        side_by_side([(table, start, end) for _, table, start, end in parts]),
        cache,
        None if rows is None else torch.tensor(rows, dtype=torch.int64),
    )


@both_backends
def test_sequences_in_one_step_do_not_touch_each_other(
    folder: Path, backend: Backend, token_ids: list[int]
) -> None:
    decoder = load(folder, backend)
    first, second, third = token_ids, token_ids[::-1], token_ids[5:38]
    alone = [logits_of(decoder, tokens) for tokens in (first, second, third)]
    cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=12, block_size=BLOCK_SIZE)
    tables = [(9, 0, 4), (2, 11, 3), (7, 1, 8)]
    run(decoder, cache, [(first, tables[0], 0, 30), (second, tables[1], 0, 17)])
    step: list[Part] = [
        (first, tables[0], 30, 31),
        (second, tables[1], 17, 18),
        (third, tables[2], 0, 33),
    ]
    together = run(decoder, cache, step)
    expected = torch.cat([alone[0][30:31], alone[1][17:18], alone[2]])
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=0)


@both_backends
def test_only_the_rows_asked_for_get_logits(
    folder: Path, backend: Backend, token_ids: list[int]
) -> None:
    decoder = load(folder, backend)
    everything = logits_of(decoder, token_ids)
    cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=3, block_size=BLOCK_SIZE)
    table = (0, 1, 2)
    none = run(decoder, cache, [(token_ids, table, 0, 20)], rows=[])
    assert none.shape == (0, 97)
    some = run(decoder, cache, [(token_ids, table, 20, 45)], rows=[24, 0, 7])
    torch.testing.assert_close(some, everything[[44, 20, 27]], atol=1e-4, rtol=0)


def test_loading_reports_progress_and_lets_go_of_what_it_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(folder)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = source.weights.load

    def watched(name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(name)
        assert isinstance(tensor, torch.Tensor)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(source.weights, "load", watched, raising=False)
    seen: list[tuple[str, int, int]] = []
    # Weights are stored in float32, so that laying each out in bfloat16 makes a copy.
    load_decoder(source, CPU, CPU_DEVICE, torch.bfloat16, lambda *args: seen.append(args))
    total = len(source.spec.layers) + 1
    assert seen == [("weights", done, total) for done in range(total + 1)]
    per_layer = len([slot for slot in source.slots() if slot.layer == 0])
    assert len(alive) >= len(source.slots())
    assert most <= per_layer


def test_the_account_of_weights(folder: Path) -> None:
    for backend, dtype, name in ((REFERENCE, torch.float32, "fp32"), (CPU, torch.bfloat16, "bf16")):
        source = open_model(folder)
        decoder = load_decoder(source, backend, CPU_DEVICE, dtype)
        assert decoder.weight_format == name
        count = sum(torch.Size(slot.shape).numel() for slot in source.slots())
        norms = sum(slot.shape[0] for slot in source.slots() if slot.role is Role.NORM)
        # A tied head counts once.
        assert decoder.weight_bytes == count * dtype.itemsize + norms * (4 - dtype.itemsize)
