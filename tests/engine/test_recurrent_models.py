"""Models with recurrent layers in the whole engine, and all that happens to their states."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engine.late_device import LateDevice
from support.models.recurrent_models import RECURRENT
from support.models.sure_models import write_sure_model

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.cuda_graphs import StepSize
from appliance.errors import MemoryPlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from appliance.engine.run.device import Device

TOKENS = 30
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
PROMPTS = [
    torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (40, 61, 75, 133)
]


def _write(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model_type, settings = RECURRENT[name]
    folder = tmp_path_factory.mktemp(name)
    return write_sure_model(model_type, folder, **SIZES | settings), folder


@pytest.fixture(scope="module", params=["lfm2", "lfm3", "qwen3_5", "nemotron_h"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A transformers model, and the folder that it was written to."""
    return _write(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return _by_transformers(model[0], PROMPTS)


def _by_transformers(made: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        found = made.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
        answers.append(found[0, len(prompt) :].tolist())
    assert len({token for answer in answers for token in answer}) > 10
    return answers


@contextmanager
def running(folder: Path, device: Device | None = None, **options: Any) -> Iterator[LLMEngine]:
    usual: dict[str, Any] = {
        "threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "dtype": "float32",
        "kv_cache_dtype": "fp32",
        "max_model_len": 256,
    }
    config = EngineConfig(**{"model": str(folder), **usual, **options})
    engine = load_llm_engine(config, (), None, lambda stage, done, total: None, device)
    try:
        yield engine
    finally:
        engine.close()


def run(
    engine: LLMEngine, prompts: Sequence[list[int]], n: int = 1, tokens: int = TOKENS
) -> list[list[int]]:
    """Greedy answers; those of one prompt run one after another."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, n=n)
    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    answers: list[list[int]] = [[] for _ in range(n * len(prompts))]
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None
            answers[n * int(delta.request_id) + delta.index].extend(delta.token_ids)
    return answers


def block_bytes(folder: Path) -> int:
    with running(folder) as engine:
        return engine.info.kv_bytes // engine.info.num_blocks


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_greedy_answers_equal_transformers_fresh_and_from_checkpoints(
    model: Any, expected: list[list[int]], kernels: str
) -> None:
    with running(model[1], kernels=kernels) as engine:
        assert run(engine, PROMPTS) == expected
        before = engine.stats()
        assert before.state_saves_total > 0
        longer = [*PROMPTS[2], *expected[2], 5, 6, 7]
        (first,) = run(engine, [longer])
        after = engine.stats()
        assert after.prefix_hits_total - before.prefix_hits_total == 96
        assert run(engine, PROMPTS[2:]) == expected[2:]
        assert after.state_slots == 8
        assert engine.stats().state_restores_total >= 3
    with running(model[1], kernels=kernels, prefix_caching=False) as engine:
        assert run(engine, [longer]) == [first]
        assert engine.stats().state_checkpoints == 0


def test_each_turn_of_a_conversation_recomputes_what_is_new(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with running(model[1], max_model_len=512, max_num_seqs=1) as engine:
        # The last token of an answer is never run, and checkpoints lie at ends of blocks.
        most = 20 + 1 + 2 * engine.info.block_size
        history: list[int] = []
        for turn in range(18):
            history += torch.randint(3, 97, (20,), generator=generator).tolist()
            before = engine.stats().prefix_hits_total
            (answer,) = run(engine, [history], tokens=5)
            recomputed = len(history) - (engine.stats().prefix_hits_total - before)
            assert recomputed <= most, f"turn {turn}"
            history += answer
        assert len(history) > 7 * most


@pytest.mark.parametrize("name", ["qwen3_next", "granite4", "bamba"])
def test_families_of_the_same_mixers_go_on_from_checkpoints_and_after_preemption(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The tests around this one cover their mixers in full."""
    made, folder = _write(name, tmp_path_factory)
    expected = _by_transformers(made, PROMPTS)
    with running(folder) as roomy:
        size = roomy.info.kv_bytes // roomy.info.num_blocks
        assert run(roomy, PROMPTS) == expected
        assert run(roomy, PROMPTS[2:3]) == expected[2:3]
        stats = roomy.stats()
        assert stats.prefix_hits_total > 0
        assert stats.state_restores_total > 0
    with running(folder, kv_cache_memory=16 * size) as small:
        assert run(small, PROMPTS) == expected
        assert small.stats().preemptions_total > 0


def test_siblings_each_go_on_from_the_prompts_checkpoint(
    model: Any, expected: list[list[int]]
) -> None:
    with running(model[1]) as engine:
        answers = run(engine, PROMPTS, n=4)
        assert answers == [answer for answer in expected for _ in range(4)]
        assert engine.stats().state_restores_total >= 12


@pytest.mark.parametrize("host_memory", [0, 1 << 24], ids=["computed again", "swapped"])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequences_answer_as_if_they_were_not(
    model: Any, expected: list[list[int]], host_memory: int, caching: bool
) -> None:
    with running(
        model[1],
        kv_cache_memory=16 * block_bytes(model[1]),
        kv_host_memory=host_memory,
        prefix_caching=caching,
    ) as engine:
        assert run(engine, PROMPTS) == expected
        stats = engine.stats()
        assert stats.preemptions_total > 0
        assert (stats.swaps_total > 0) == (host_memory > 0)
        assert stats.kv_host_blocks == 0


def test_a_runner_that_looks_ahead_answers_the_same(model: Any, expected: list[list[int]]) -> None:
    device = LateDevice()
    small = 16 * block_bytes(model[1])
    with running(model[1], device, kernels="torch", kv_cache_memory=small) as engine:
        assert run(engine, PROMPTS) == expected
        assert engine.stats().preemptions_total > 0
        for _ in range(2):
            assert run(engine, PROMPTS[1:2]) == expected[1:2]
        assert engine.stats().state_restores_total > 0
        # Decode steps are graphs, except with experts, which run in turn on a CPU.
        assert bool(device.captures) == (not engine.info.num_experts)


class Pinning(LateDevice):
    """Notes the threads that pin memory."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.threads.append(threading.current_thread())
        return super().pinned(num_bytes)


def test_no_step_pins_memory(model: Any, expected: list[list[int]]) -> None:
    """States go to host memory and return, in rows that a thread has pinned."""
    device = Pinning()
    small = 16 * block_bytes(model[1])
    with running(
        model[1], device, kernels="torch", kv_cache_memory=small, kv_host_memory=1 << 24
    ) as engine:
        loaded = len([each for each in device.threads if each is threading.current_thread()])
        assert run(engine, PROMPTS) == expected
        assert engine.stats().swaps_total > 0
    steps = [each for each in device.threads if each is threading.current_thread()]
    assert len(steps) == loaded
    assert {each.name for each in device.threads} > {threading.current_thread().name}


def test_prompts_beside_answers_replay_a_graph_too(
    model: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is one launch; on a CPU not with experts, which run in turn there."""
    with running(model[1], LateDevice(), kernels="torch", max_num_batched_tokens=32) as engine:
        graphs: Any = engine.runner.graphs  # type: ignore[attr-defined]
        assert (graphs is None) == bool(engine.info.num_experts)
        if graphs is None:
            return
        replayed, real = list[StepSize](), graphs.run

        def noted(size: StepSize, function: Callable[[], None]) -> None:
            replayed.append(size)
            real(size, function)

        monkeypatch.setattr(graphs, "run", noted)
        assert run(engine, PROMPTS) == expected
        assert len(replayed) == engine.stats().steps_total
        assert StepSize(7, 32) in replayed
        assert {*replayed} <= {*graphs.captured}


def test_the_next_engine_goes_on_from_the_disk(model: Any, tmp_path: Path) -> None:
    prompt = torch.randint(3, 97, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    options: dict[str, Any] = {"kv_disk": str(tmp_path), "max_model_len": 512}
    with running(model[1], **options) as first:
        (right,) = run(first, [prompt])
        assert run(first, [prompt]) == [right]
    written = len(list(tmp_path.rglob("*.kv")))
    assert written == 399 // 16 + 1, "the blocks, and the state behind them"
    with running(model[1], **options) as second:
        assert run(second, [prompt]) == [right]
        stats = second.stats()
        assert stats.prefix_hits_disk_total == 399 // 16 * 16
        assert stats.kv_disk_read_total == written
        assert run(second, [prompt]) == [right], "and from the checkpoint that was read"
        assert second.stats().state_restores_total == 1


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_states_of_16_bits_take_half_of_every_place_and_are_kept_apart(
    model: Any, expected: list[list[int]], kernels: str, tmp_path: Path
) -> None:
    """In slots, checkpoints, host memory and on the disk; the models are sure of their tokens."""
    long = torch.randint(3, 97, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    options: dict[str, Any] = {"kernels": kernels, "kv_disk": str(tmp_path), "max_model_len": 512}
    with running(model[1], **options) as wide:
        for _ in range(2):
            run(wide, [long])
        bytes_of_one, in_float32 = wide.stats().state_bytes, wide.info
    written = len(list(tmp_path.rglob("*.kv")))
    assert written > 0
    options["mamba_cache_dtype"] = "fp16"
    with running(model[1], **options) as narrow:
        assert narrow.stats().state_bytes == pytest.approx(bytes_of_one / 2, abs=64 * 16)
        slots = narrow.info.max_num_seqs + narrow.info.num_checkpoints
        assert narrow.info.state_bytes == slots * narrow.stats().state_bytes
        assert (in_float32.state_format, narrow.info.state_format) == ("fp32", "fp16")
        assert narrow.info.fingerprint != in_float32.fingerprint
        answers = run(narrow, PROMPTS)
        assert run(narrow, PROMPTS[2:]) == answers[2:]
        assert narrow.stats().state_restores_total > 0
        (of_long,) = run(narrow, [long])
        assert narrow.stats().kv_disk_read_total == 0, "files of the other type are not read"
        assert run(narrow, [long]) == [of_long]
    agreeing = [
        one == other
        for mine, theirs in zip(answers, expected, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    ]
    assert sum(agreeing) > 0.95 * len(agreeing)
    assert len(list(tmp_path.rglob("*.kv"))) == 2 * written
    with running(model[1], **options) as again:
        assert run(again, [long]) == [of_long]
        assert again.stats().kv_disk_read_total == written
    small: dict[str, Any] = {
        "kernels": kernels,
        "mamba_cache_dtype": "fp16",
        "kv_cache_memory": 16 * block_bytes(model[1]),
        "kv_host_memory": 1 << 24,
    }
    with running(model[1], **small) as swapping:
        assert run(swapping, PROMPTS) == answers
        assert swapping.stats().swaps_total > 0


def test_beams_in_a_small_cache_are_the_same(model: Any) -> None:
    sampling = SamplingParams(
        n=2, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=41, ignore_eos=True
    )

    def search(engine: LLMEngine) -> list[list[int]]:
        request = Request(
            request_id="b", prompt_token_ids=tuple(PROMPTS[0]), sampling=sampling, priority=1
        )
        engine.submit(request)
        answers: list[list[int]] = [[], []]
        steps = 0
        while engine.has_work:
            for delta in engine.step().deltas:
                if delta.request_id == "b":
                    answers[delta.index].extend(delta.token_ids)
            steps += 1
            if steps == 10:
                plain = SamplingParams(temperature=0.0, max_tokens=145, ignore_eos=True)
                other = Request(
                    request_id="o", prompt_token_ids=tuple(PROMPTS[3][:110]), sampling=plain
                )
                engine.submit(other)
        return answers

    with running(model[1]) as roomy:
        right = search(roomy)
        assert roomy.stats().preemptions_total == 0
    for caching in (True, False):
        with running(
            model[1],
            kv_cache_memory=16 * block_bytes(model[1]),
            kv_host_memory=0,
            prefix_caching=caching,
        ) as small:
            assert search(small) == right


def test_states_that_do_not_fit_are_refused_before_the_weights_are_read(model: Any) -> None:
    refused = pytest.raises(MemoryPlanError, match="of recurrent states for 8 sequences")
    with refused, running(model[1], state_checkpoint_memory=1 << 50):
        pass
