"""The CPU library as an executor: it computes what the torch decoder computes.

Its bits depend neither on the cuts of a step nor on what else runs in it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.native_models import LIBRARY, native
from support.models.relatives import RELATIVES
from support.models.teacher_forcing import BLOCK_SIZE, logits_of

from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.loader import load_decoder
from appliance.model.native import why_unsupported
from appliance.model.native_loader import load_native
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.kernels.cpu.structs import Isa
    from appliance.model.native import NativeDecoder

CPU_DEVICE = torch.device("cpu")
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Each case has a feature that no other has: biases, norms of heads, windows, caps, partial
# rotation, odd sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "llama-biases": ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"head_dim": 32, "sliding_window": 7}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.7,
            },
        },
    ),
    "qwen2": ("qwen2", {"head_dim": 16, "hidden_size": 96}),
    "qwen3": ("qwen3", {"head_dim": 48, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "num_hidden_layers": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 512,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 3.0,
            "vocab_size_per_layer_input": 97,
        },
    ),
    "granite": (
        "granite",
        {"hidden_size": 96, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    ),
    "phi3-partial": (
        "phi3",
        {
            "hidden_size": 96,
            "rope_parameters": HALF,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
}
CASES |= {
    case: (RELATIVES[case][0], RELATIVES[case][1] | {"hidden_size": 96})
    for case in ("cohere2", "gemma2", "glm4", "olmo3", "exaone4", "hunyuan", "minimax_m2")
}
FORMATS = [KVFormat.FP32, KVFormat.BF16, KVFormat.INT8, KVFormat.INT4]
CUTS = [[45], [16, 16, 13], [7, 1, 9, 20, 1, 1, 6], [1] * 45]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference(
    case: str,
    isa: Isa,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    model_type, settings = CASES[case]
    folder = save(make_model(model_type, **settings))
    assert why_unsupported(open_model(folder)) is None
    exact = load_decoder(open_model(folder), REFERENCE, CPU_DEVICE, torch.float32)
    expected = logits_of(exact, token_ids)
    spread = float(expected.std())
    assert spread > 0.5  # the logits vary
    found = logits_of(native(folder), token_ids)
    torch.testing.assert_close(found, expected, atol=1e-4 * spread, rtol=0)


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4"])
def folder(
    request: pytest.FixtureRequest,
    make_model: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    model_type, settings = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    make_model(model_type, **settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_no_bit_depends_on_how_a_prompt_is_cut(
    folder: Path, format: KVFormat, isa: Isa, token_ids: list[int]
) -> None:
    decoder = native(folder)
    whole = logits_of(decoder, token_ids, format=format)
    for chunks in CUTS:
        cut = logits_of(decoder, token_ids, chunks=chunks, format=format, block_table=(5, 2, 7))
        assert torch.equal(cut, whole), chunks


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_no_bit_depends_on_the_threads(
    folder: Path, format: KVFormat, token_ids: list[int]
) -> None:
    alone = logits_of(native(folder), token_ids, format=format)
    for threads in (2, 5):
        assert torch.equal(logits_of(native(folder, threads), token_ids, format=format), alone)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_no_bit_depends_on_the_neighbours(
    folder: Path, format: KVFormat, token_ids: list[int]
) -> None:
    decoder = native(folder, threads=2)
    sequences = [token_ids[i : i + 13 + 2 * i] for i in range(8)]  # of 13 to 27 tokens
    alone = [logits_of(decoder, tokens, format=format) for tokens in sequences]
    cache = decoder.allocate_cache(format, num_blocks=20, block_size=BLOCK_SIZE)
    tables = [(2 * i + 1, 2 * i) for i in range(8)]
    # Each step has one more token of each, and the last one two whole prompts as well.
    joining, early = sequences[6:], sequences[:6]
    for length in range(1, 14):
        starts = [
            (tokens, table, length - 1, length)
            for tokens, table in zip(early, tables[:6], strict=True)
        ]
        if length == 13:
            starts += [(t, table, 0, len(t)) for t, table in zip(joining, tables[6:], strict=True)]
        logits = run(decoder, cache, starts)
        row = 0
        for number, (_, _, start, end) in enumerate(starts):
            expected = alone[number][start:end]
            assert torch.equal(logits[row : row + end - start], expected), (length, number)
            row += end - start


def run(decoder: NativeDecoder, cache: Any, spans: list[Any], rows: Any = None) -> torch.Tensor:
    """Run a step over spans of sequences: their tokens, block table, first position and end."""
    return decoder.forward(
        torch.tensor([token for tokens, _, start, end in spans for token in tokens[start:end]]),
        torch.tensor([p for _, _, start, end in spans for p in range(start, end)]),
        RaggedBatch.of(
            [end - start for _, _, start, end in spans],
            [end for _, _, _, end in spans],
            [table for _, table, _, _ in spans],
            block_size=BLOCK_SIZE,
            device=CPU_DEVICE,
        ),
        cache,
        rows,
    )


def test_only_the_rows_asked_for_get_logits(folder: Path, token_ids: list[int]) -> None:
    decoder = native(folder)
    everything = logits_of(decoder, token_ids)
    cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=3, block_size=BLOCK_SIZE)
    table = (0, 1, 2)
    none = run(decoder, cache, [(token_ids, table, 0, 20)], torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 97)
    some = run(decoder, cache, [(token_ids, table, 20, 45)], torch.tensor([24, 0, 7]))
    assert torch.equal(some, everything[[44, 20, 27]])


def test_copied_blocks_hold_the_same(folder: Path, token_ids: list[int]) -> None:
    decoder = native(folder)
    expected = logits_of(decoder, token_ids, format=KVFormat.INT8)
    cache = decoder.allocate_cache(KVFormat.INT8, num_blocks=8, block_size=BLOCK_SIZE)
    run(decoder, cache, [(token_ids, (0, 1), 0, 20)])
    cache.copy_blocks([0, 1], [6, 3])
    run(decoder, cache, [(token_ids[::-1], (0, 1), 0, 20)])  # the sources change afterwards
    assert torch.equal(run(decoder, cache, [(token_ids, (6, 3, 4), 20, 45)]), expected[20:])


def test_a_step_beyond_the_workspace_is_an_error_and_the_next_one_works(
    folder: Path, token_ids: list[int]
) -> None:
    decoder = native(folder)
    enough = logits_of(decoder, token_ids[:2])
    limit = decoder.engine.workspace_bytes
    limited = load_native(open_model(folder), NativeEngine(LIBRARY, 1, limit), torch.float32)
    with pytest.raises(MemoryError, match="max_num_batched_tokens"):
        logits_of(limited, token_ids)
    assert torch.equal(logits_of(limited, token_ids[:2]), enough)


@pytest.mark.parametrize("field", ["token_ids", "slot_mapping", "block_tables", "rows"])
def test_a_batch_that_points_outside_is_refused(
    folder: Path, token_ids: list[int], field: str
) -> None:
    decoder = native(folder)
    cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=2, block_size=BLOCK_SIZE)
    tokens = [*token_ids[:5], 97 if field == "token_ids" else 3]
    table = (0,)
    rows = torch.tensor([6 if field == "rows" else 5])
    if field == "block_tables":
        table = (2,)
    if field == "slot_mapping":
        table = (-1,)
    with pytest.raises(AssertionError, match="BAD_ARGUMENT"):
        run(decoder, cache, [(tokens, table, 0, 6)], rows)


def test_weights_of_every_kind_are_counted(folder: Path) -> None:
    decoder = native(folder)
    assert decoder.weight_format == "fp32"
    source = open_model(folder)
    elements = sum(torch.Size(slot.shape).numel() for slot in source.slots())
    assert elements * 4 <= decoder.weight_bytes <= elements * 4 * 1.4  # tiles filled to 16 rows
    assert ctypes.sizeof(decoder.model) > 0


def test_heads_of_an_odd_width_are_left_to_torch(
    make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    reason = why_unsupported(open_model(save(make_model("qwen3", head_dim=12))))
    assert reason is not None
    assert "heads of 12 elements" in reason


@pytest.mark.parametrize("rotary_dim", [-2, 15, 18, 32, 2**30])
def test_a_rope_that_is_wider_than_a_head_is_refused(
    rotary_dim: int, make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    decoder = native(save(make_model("llama", head_dim=16)))
    decoder.model.ropes[0].rotary_dim = rotary_dim
    with pytest.raises(AssertionError, match="BAD_ARGUMENT"):
        logits_of(decoder, [1, 2, 3])


def test_a_step_counts_how_far_it_is_for_whoever_watches(
    make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    decoder = native(save(make_model("llama", head_dim=16)))
    progress = ctypes.c_uint64(7)
    decoder.engine.watch(ctypes.addressof(progress))
    logits_of(decoder, [1, 2, 3])
    assert progress.value >= 7 + len(decoder.spec.layers)
    before = progress.value
    decoder.engine.watch(0)
    logits_of(decoder, [1, 2, 3])
    assert progress.value == before
