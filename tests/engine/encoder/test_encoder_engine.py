"""The engine of an encoder: whole texts, a bounded step, fair order, and refusals with reasons."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.encoder_models import make

from appliance.config import EngineConfig
from appliance.engine.encoder import encoder_execution as execution
from appliance.engine.encoder.encoder_engine import EncoderEngine
from appliance.engine.load.load_engine import load_engine
from appliance.engine.memory.admission import Admission
from appliance.engine.nouns.request import AdapterRef, FinishReason, Pooling, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import ConfigError, MemoryPlanError, RequestError
from appliance.model.encoder.source import EncoderSource

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.nouns.messages import SequenceDelta

READ = SamplingParams(max_tokens=0, temperature=0.0)


def load(path: Path, **options: Any) -> EncoderEngine:
    given = {"threads": 1, "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64}
    engine = load_engine(
        EngineConfig(model=str(path), **{**given, **options}),
        eos_token_ids=(),
        metadata=None,
        on_progress=lambda stage, done, total: None,
    )
    assert isinstance(engine, EncoderEngine)
    return engine


def request(
    name: str, length: int, pooling: Pooling | None = Pooling.MEAN, **fields: Any
) -> Request:
    tokens = tuple(2 + (7 * i + length) % 90 for i in range(length))
    sampling = READ if pooling is not None else SamplingParams(max_tokens=1)
    return Request(
        request_id=name, prompt_token_ids=tokens, sampling=sampling, pooling=pooling, **fields
    )


def run(engine: EncoderEngine) -> dict[str, SequenceDelta]:
    found: dict[str, SequenceDelta] = {}
    while engine.has_work:
        found |= {delta.request_id: delta for delta in engine.step().deltas}
    return found


def vector(delta: SequenceDelta) -> torch.Tensor:
    assert delta.error is None, delta.error
    assert delta.finish_reason is FinishReason.LENGTH
    assert delta.pooled is not None
    return torch.tensor(array("f", delta.pooled))


def test_vectors_are_those_of_transformers_however_texts_are_grouped(tmp_path: Path) -> None:
    oracle = make("bert", tmp_path, ranks=False).oracle
    for max_num_seqs in (1, 8):
        engine = load(tmp_path, max_num_seqs=max_num_seqs, max_model_len=200)
        asked = [
            request(f"{pooling.value}{length}", length, pooling)
            for length in (150, 3, 40, 3)
            for pooling in Pooling
        ]
        for one in asked:
            engine.submit(one)
        found = run(engine)
        for one in asked:
            with torch.inference_mode():
                ids = torch.tensor([one.prompt_token_ids])
                states = oracle(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
            wanted = {
                Pooling.MEAN: states.mean(0), Pooling.CLS: states[0], Pooling.LAST: states[-1]
            }[one.pooling or Pooling.MEAN]  # fmt: skip
            torch.testing.assert_close(vector(found[one.request_id]), wanted, rtol=1e-4, atol=2e-5)


def test_a_pair_is_judged_with_its_second_text_marked(tmp_path: Path) -> None:
    oracle = make("bert", tmp_path, ranks=True).oracle
    engine = load(tmp_path)
    assert engine.info.ranks_pairs
    asked = request("pair", 30, Pooling.CLS, second_text=11)
    engine.submit(asked)
    (found,) = vector(run(engine)["pair"])
    ids = torch.tensor([asked.prompt_token_ids])
    types = torch.tensor([[0] * 11 + [1] * 19])
    with torch.inference_mode():
        wanted = oracle(ids, attention_mask=torch.ones_like(ids), token_type_ids=types).logits[0, 0]
        unmarked = oracle(ids, attention_mask=torch.ones_like(ids)).logits[0, 0]
    assert float(found) == pytest.approx(float(wanted), abs=1e-4)
    assert float(found) != pytest.approx(float(unmarked), abs=1e-3)


def test_a_step_holds_so_many_tokens_and_at_least_one_text(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    engine = load(tmp_path, max_model_len=100)
    for number, length in enumerate((60, 60, 90, 10, 100)):
        engine.submit(request(str(number), length))
    run(engine)
    steps = engine.take_steps()
    assert [step.prefill_tokens for step in steps] == [60, 60, 100, 100]
    assert [step.sequences for step in steps] == [1, 1, 2, 1]
    assert engine.take_steps() == ()
    assert engine.stats().prompt_tokens_total == 320


def test_a_client_with_many_texts_does_not_keep_another_waiting(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    engine = load(tmp_path, max_num_seqs=2)
    for number in range(4):
        engine.submit(request(f"many{number}", 5, owner="many"))
    engine.submit(request("one", 5, owner="one"))
    engine.submit(request("urgent", 5, owner="many", priority=-1))
    assert set(engine.step().started) == {"urgent", "many0"}
    assert set(engine.step().started) == {"many1", "one"}


def test_deadlines_and_aborts_reach_texts_that_wait(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    now = 0.0
    engine = load(tmp_path)
    engine.clock = lambda: now
    engine.submit(request("late", 5, max_queue_seconds=1.0))
    engine.submit(request("gone", 5))
    engine.submit(request("stays", 5, timeout=9.0))
    assert [view.request_id for view in engine.sequences()] == ["late", "gone", "stays"]
    assert engine.abort("gone")
    assert not engine.abort("gone")
    now = 2.0
    found = run(engine)
    assert set(found) == {"late", "stays"}
    assert found["late"].expired
    assert found["late"].error is not None
    assert vector(found["stays"]).shape == (64,)
    stats = engine.stats()
    assert (stats.aborted_total, stats.expired_total, stats.waiting) == (1, 1, 0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request("x", 5, None), "is an encoder"),
        (request("x", 101), "100"),
        (request("x", 5, second_text=2), "no head"),
        (request("x", 5, adapter=AdapterRef("a", "b", "c")), "no adapters"),
        (
            Request(request_id="x", prompt_token_ids=(97,), sampling=READ, pooling=Pooling.MEAN),
            "97",
        ),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(tmp_path: Path, asked: Request, words: str) -> None:
    make("bert", tmp_path, ranks=False)
    engine = load(tmp_path, max_model_len=100)
    with pytest.raises(RequestError, match=words):
        engine.submit(asked)
    assert not engine.has_work


def test_states_that_are_not_finite_end_only_their_text(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][5] = 3e38  # whose mean is infinite
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    engine = load(tmp_path)
    engine.submit(
        Request(request_id="x", prompt_token_ids=(5,), sampling=READ, pooling=Pooling.CLS)
    )
    engine.submit(
        Request(request_id="y", prompt_token_ids=(6,), sampling=READ, pooling=Pooling.CLS)
    )
    found = run(engine)
    assert "not finite" in str(found["x"].error)
    assert vector(found["y"]).shape == (64,)
    assert engine.stats().nan_logits_total == 1


def test_what_does_not_fit_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("bert", tmp_path, ranks=False)
    monkeypatch.setattr(execution, "memory_budget", lambda device, share: 1000)
    monkeypatch.setattr(EncoderSource, "load", lambda *given: pytest.fail("weights were read"))
    with pytest.raises(MemoryPlanError, match="--max-num-batched-tokens"):
        load(tmp_path)


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"gpu_split": "2:1"}])
def test_an_encoder_is_not_divided(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="only reads texts"):
        load(make("bert", tmp_path, ranks=False).path, **options)


def test_the_library_runs_it_and_torch_where_asked_for(tmp_path: Path) -> None:
    folder = make("bert", tmp_path, ranks=False).path
    stored = load_file(folder / "model.safetensors").items()
    read = [weight for name, weight in stored if "pooler" not in name]  # of tasks BERT learned
    asked = request("one", 40)
    vectors = []
    for options, backend, format in (
        ({}, "cpu library (", "fp32"),
        ({"weight_bits": 8}, "cpu library (", "8 bits (a scale per row)"),
        ({"kernels": "torch"}, "torch in fp32", "fp32"),
    ):
        engine = load(folder, **options)
        assert engine.info.backend.startswith(backend)
        assert engine.info.weight_format == format
        assert engine.info.num_parameters == sum(map(torch.numel, read))
        assert any("torch runs the encoder" in note for note in engine.info.notes) == (
            "kernels" in options
        )
        engine.submit(asked)
        vectors.append(vector(run(engine)["one"]))
    library, rounded, by_torch = vectors
    torch.testing.assert_close(library, by_torch, rtol=1e-4, atol=2e-5)
    assert 1e-4 < float((rounded - library).abs().max()) < 0.2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weight_bits": 8}, "--weight-bits 8 cannot"),
        ({"cpu_isa": "avx2"}, "--cpu-isa avx2 cannot"),
    ],
)
def test_what_only_the_library_can_do_is_refused_with_torch(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(make("bert", tmp_path, ranks=False).path, kernels="torch", **options)


def test_others_are_asked_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("bert", tmp_path, ranks=False).path
    free = [1000]
    monkeypatch.setattr(execution, "memory_budget", lambda device, share: free[0])

    def ask(needed: int, had: int) -> None:
        free[0] = had + needed

    engine = load_engine(
        EngineConfig(model=str(folder), threads=1, device="cpu", max_num_batched_tokens=64),
        eos_token_ids=(),
        metadata=None,
        on_progress=lambda stage, done, total: None,
        admission=Admission(2**34, True, ask),
    )
    assert engine.info.memory_bytes >= free[0]
