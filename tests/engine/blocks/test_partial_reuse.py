"""Real steps after hits that end inside a block: the same answers as without any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf.gguf_files import first_layers

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams

Answer = list[tuple[int, float]]  # token and its log-probability

FORMATS = ["auto", "fp32", "fp8", "int8", "k8v4", "int4-sealed", "int4-rotated"]


def load(model: Path, **options: Any) -> LLMEngine:
    settings = {"threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 512, **options}
    config = EngineConfig(model=str(model), **settings)
    return load_llm_engine(config, eos_token_ids=(), metadata=None, on_progress=lambda *_: None)


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (length,), generator=generator).tolist()


def ask(
    engine: LLMEngine, prompt: list[int], *, salt: str = "", **sampling: Any
) -> tuple[Answer, int]:
    """The answer, and how many tokens of the prompt came from the cache."""
    settings = {"temperature": 0.0, "max_tokens": 12, "logprobs": 0, **sampling}
    engine.submit(
        Request(
            request_id="r",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**settings),
            cache_salt=salt,
        )
    )
    answer: Answer = []
    cached = 0
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None
            assert delta.logprobs is not None
            pairs = zip(delta.token_ids, delta.logprobs, strict=True)
            answer += [(token, report.chosen.logprob) for token, report in pairs]
            cached = delta.num_cached_tokens
    return answer, cached


def check_same(warm: Answer, cold: Answer, tolerance: float) -> None:
    assert [token for token, _ in warm] == [token for token, _ in cold]
    for (_, one), (_, other) in zip(warm, cold, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("kv", FORMATS)
def test_a_hit_inside_a_block_changes_nothing_in_any_format(
    tiny_llama: Path, kv: str, kernels: str
) -> None:
    options = {"kv_cache_dtype": kv, "kernels": kernels, "dtype": "float32"}
    warm = load(tiny_llama, **options)
    cold = load(tiny_llama, prefix_caching=False, **options)
    sealed = warm.info.kv_format in ("k8v4", "int4-sealed")
    size = warm.info.block_size
    first = tokens(2 * size + 9, seed=1)  # ends inside a block
    answer, _ = ask(warm, first, max_tokens=5)
    so_far = first + [token for token, _ in answer]
    longer = so_far + tokens(25, seed=2)
    prompts = [
        # It continues the first sequence, whose last sampled token was never run.
        (longer, len(so_far) - 1, len(so_far) - 1),
        # It shares part of a block with the first sequence, and hits those tokens. In a sealed
        # block no single tokens can be hit.
        (so_far[:-8] + tokens(20, seed=3), len(so_far) - 8, 2 * size),
        # A hit of all but the last token: their block was not full when the first sequence ended.
        (longer, len(longer) - 1, len(longer) - 1),
    ]
    for prompt, expected, expected_sealed in prompts:
        got, cached = ask(warm, prompt)
        check_same(got, ask(cold, prompt)[0], 1e-3)
        assert cached == (expected_sealed if sealed else expected)
    assert warm.stats().blocks_active == 0


@pytest.mark.model
def test_a_hit_is_right_where_some_layers_look_back_a_window_only(
    gemma3_gguf: Path, tmp_path: Path
) -> None:
    """The cache keeps blocks outside of all windows as well: layers with full attention read them.

    The sixth of its layers is the first of these.
    """
    engine = load(first_layers(gemma3_gguf, tmp_path / "first.gguf", "gemma3", 6), threads=2)
    shared = tokens(531, seed=4)  # the window is 512
    ask(engine, [*shared, 5, 5], max_tokens=1)
    prompt = shared + tokens(9, seed=6)
    got, cached = ask(engine, prompt, max_tokens=4)
    assert cached == 531
    cold, cached = ask(engine, prompt, max_tokens=4, salt="another's")
    assert cached == 0
    check_same(got, cold, 0.05)


def test_a_preempted_sequence_is_found_again_up_to_its_last_token(tiny_llama: Path) -> None:
    roomy = load(tiny_llama)
    block_bytes = roomy.info.kv_bytes // roomy.info.num_blocks
    small = load(tiny_llama, kv_cache_memory=16 * block_bytes, max_model_len=256)
    prompts = [tokens(60 + i, seed=i) for i in range(4)]

    def answers(engine: LLMEngine) -> dict[str, list[int]]:
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, max_tokens=60)
            engine.submit(
                Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling)
            )
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for delta in engine.step().deltas:
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
        return found

    tight = answers(small)
    assert small.stats().preemptions_total > 0
    assert tight == answers(roomy)
