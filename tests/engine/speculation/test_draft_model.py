"""A smaller model drafts: answers stay the same, and its cache holds what it should hold."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from support.engine.draft_answers import SIZES, load, requests_of, run
from support.engine.drafting import draft_always
from support.models.sure_models import write_sure_model

from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.draft_executor import DraftExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Ordered
    from pathlib import Path

    from appliance.engine.engine import LLMEngine
    from appliance.engine.speculation.draft_model import DraftRows


class Watched:
    """Records which token each place of a draft model's cache was filled with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[str] = Counter()
        self._places: dict[tuple[int, int], tuple[int, ...]] = {}
        run, copy = DraftExecutor.run, DraftExecutor.copy

        def watched_run(model: Any, rows: Ordered[DraftRows]) -> Any:
            for one in rows:
                self._check(one, model.cache.block_size)
            return run(model, rows)

        def watched_copy(model: Any, pairs: Ordered[tuple[int, int]]) -> None:
            for source, to in pairs:
                self.seen["copied blocks"] += 1
                for offset in range(model.cache.block_size):
                    self._places[to, offset] = self._places[source, offset]
            copy(model, pairs)

        monkeypatch.setattr(DraftExecutor, "run", watched_run)
        monkeypatch.setattr(DraftExecutor, "copy", watched_copy)

    def _check(self, rows: DraftRows, size: int) -> None:
        """Check that all tokens before the rows lie where the rows will read them."""
        known, end = rows.sequence.token_ids, len(rows.sequence.token_ids)
        for position in range(min(rows.start, end)):
            held = self._places[rows.blocks[position // size], position % size]
            assert held == (position, known[position]), "another token is read"
        for position, token_id in enumerate(rows.token_ids, rows.start):
            place = rows.blocks[position // size], position % size
            self._places[place] = (position, token_id)
        self.seen["rows"] += len(rows.token_ids)
        if rows.start == 0:
            self.seen["from the start"] += 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watch = Watched(monkeypatch)
    yield watch
    assert watch.seen["rows"]


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the served one's vocabulary and other answers."""
    folder = tmp_path_factory.mktemp("another")
    write_sure_model("llama", folder, **{**SIZES, "vocab_size": 512, "num_hidden_layers": 1})
    return folder


def drafting(folder: Path, draft: Path | str, **options: Any) -> LLMEngine:
    engine = load(folder, speculate=f"draft={draft}", **options)
    draft_always(engine)
    return engine


def without_beams() -> list[Request]:
    return [one for one in requests_of(512) if one.request_id != "beams"]


@pytest.mark.parametrize(
    ("draft", "kv"),
    [
        *(("itself", kv) for kv in ("int8", "bf16", "int4-sealed")),
        ("another", "bf16"),
        ("self", "int8"),
    ],
)
def test_answers_are_the_same(
    tiny_llama: Path, another: Path, watched: Watched, draft: str, kv: str
) -> None:
    expected, pieces = run(load(tiny_llama, kv_cache_dtype=kv), without_beams())
    name = {"itself": tiny_llama, "another": another}.get(draft, draft)
    engine = drafting(tiny_llama, name, kv_cache_dtype=kv)
    found, fewer = run(engine, without_beams())
    assert found == expected
    stats = engine.stats()
    assert stats.draft_tokens_total > stats.accepted_tokens_total
    assert watched.seen["copied blocks"]
    if draft != "another":
        assert stats.accepted_tokens_total > 100
        assert fewer < pieces


@pytest.mark.parametrize("host", [0, 2**20])
def test_answers_are_the_same_where_they_have_to_make_room(
    tiny_llama: Path, watched: Watched, host: int
) -> None:
    options: dict[str, Any] = {"max_num_seqs": 3, "kv_host_memory": host}
    expected, _ = run(load(tiny_llama), without_beams())
    engine = drafting(tiny_llama, tiny_llama, kv_cache_memory=52000, **options)
    found, _ = run(engine, without_beams())
    assert found == expected
    assert engine.stats().preemptions_total > 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
def test_the_same_model_says_the_same(
    tiny_llama: Path, watched: Watched, sampling: dict[str, Any]
) -> None:
    """Each draft is accepted, since draft and target draw with the same random number."""
    engine = drafting(tiny_llama, tiny_llama, kv_cache_dtype="int8")
    params = SamplingParams(max_tokens=100, ignore_eos=True, **sampling)
    engine.submit(Request(request_id="a", prompt_token_ids=(5, 9, 31, 7), sampling=params))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.accepted_tokens_total == stats.draft_tokens_total > 80
    assert stats.steps_total < 20
    # Accepted tokens are not read again; some drafts are made and then not verified.
    assert watched.seen["rows"] < 208


def test_a_prompt_in_the_cache_is_not_read_again(tiny_llama: Path, watched: Watched) -> None:
    """Drafts share blocks as the sequences do, under their ids."""
    engine = drafting(tiny_llama, tiny_llama)
    rows = []
    for name in ("a", "b"):
        before = watched.seen["rows"]
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
        engine.submit(Request(request_id=name, prompt_token_ids=(7,) * 96, sampling=params))
        while engine.has_work:
            engine.step()
        rows.append(watched.seen["rows"] - before)
    assert rows[0] >= 96
    assert rows[1] < 48
    assert watched.seen["from the start"] == 1


def test_long_prompts_are_read_in_several_steps(
    tiny_llama: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.engine.speculation.draft_model.READ_ROWS", 40)
    expected, _ = run(load(tiny_llama), without_beams())
    engine = drafting(tiny_llama, tiny_llama)
    found, _ = run(engine, without_beams())
    assert found == expected
    assert engine.stats().accepted_tokens_total > 100


def test_a_draft_model_guesses_behind_a_token_that_it_does_not_have(
    tiny_llama: Path, tmp_path: Path
) -> None:
    write_sure_model("llama", tmp_path, **{**SIZES, "vocab_size": 500})
    asked = [
        Request(
            request_id="r",
            prompt_token_ids=(3, 510, 5),
            sampling=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        )
    ]
    assert run(drafting(tiny_llama, tmp_path), asked)[0] == run(load(tiny_llama), asked)[0]
