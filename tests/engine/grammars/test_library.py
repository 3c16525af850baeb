"""Both ways to call llguidance: they agree, and reading a vocabulary blocks no other thread."""

from __future__ import annotations

import threading
import time
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from numpy.typing import NDArray
from support.engine.grammar_words import EOS, FIRST_BYTE, SIZE, words

from appliance.engine.grammars import c_library, library
from appliance.engine.grammars.c_library import CLibrary, MismatchError
from appliance.engine.grammars.library import (
    GrammarLibrary,
    GrammarState,
    PythonLibrary,
    WordList,
    special,
)
from appliance.engine.grammars.merge_order import MergeOrder
from appliance.grammar import Grammar
from appliance.grammar.source import source_of

SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+')
GRAMMARS = [
    Grammar.json_schema({"type": "object", "properties": {"name": {"type": "string"}}}),
    Grammar.json_schema({"type": "array", "items": {"enum": ["a", "bc"]}}),
    Grammar.regex("[a-c]{2,5}(x|yes)"),
    Grammar.lark("start: <call> /[0-9]+/"),
    Grammar.choice(["station_identifier", "station_name"]),
]


def word_list(ends: tuple[int, ...] = (EOS, 1)) -> WordList:
    vocabulary = words()
    tokens = [
        special(token) if token_id in vocabulary.special else token
        for token_id, token in enumerate(vocabulary.tokens)
    ]
    return WordList(tokens, [*ends], MergeOrder(vocabulary), SLICES)


def mask_of(one: GrammarLibrary, state: GrammarState) -> NDArray[np.int32]:
    found = np.zeros((1, SIZE // 32), dtype=np.int32)
    one.fill([(state, 0)], found)
    return found


def allowed(mask: NDArray[np.int32]) -> list[int]:
    found: list[int] = np.flatnonzero(
        np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
    ).tolist()
    return found


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("forces", [False, True])
def test_both_ways_are_the_same_token_by_token(grammar: Grammar, forces: bool) -> None:
    libraries: list[GrammarLibrary] = [CLibrary(), PythonLibrary()]
    source = source_of(grammar, forces=forces)
    firsts = [one.read(word_list()).compile(source) for one in libraries]
    for seed in range(3):
        random, states = np.random.default_rng(seed), [first.deep_copy() for first in firsts]
        for _ in range(30):
            masks = [mask_of(one, state) for one, state in zip(libraries, states, strict=True)]
            assert (masks[0] == masks[1]).all()
            seen = [
                (
                    state.is_error(), state.get_error(), state.is_accepting(),
                    state.is_stopped(), state.compute_ff_tokens(),
                    state.validate_tokens([FIRST_BYTE, FIRST_BYTE]),
                )
                for state in states
            ]  # fmt: skip
            assert seen[0] == seen[1]
            token_id = int(random.choice(allowed(masks[0])))
            assert [state.consume_token(token_id) for state in states] == [True, True]
            if token_id in (EOS, 1):
                break
            if random.random() < 0.3:
                assert [state.rollback(1) for state in states] == [True, True]


def test_both_ways_name_the_same_errors() -> None:
    for source in ("start: x", "start: /(/", 'start: %json {"type": "strin"}'):
        states = [one.read(word_list()).compile(source) for one in (CLibrary(), PythonLibrary())]
        assert [state.is_error() for state in states] == [True, True]
        assert states[0].get_error() == states[1].get_error() != ""
    states = [one.read(word_list()).compile('start: "ab"') for one in (CLibrary(), PythonLibrary())]
    assert [state.consume_tokens([FIRST_BYTE]) for state in states] == [False, False]
    assert states[0].get_error() == states[1].get_error() != ""
    assert not mask_of(CLibrary(), states[0]).any(), "a state in error has no mask"


@pytest.mark.parametrize("one", [CLibrary(), PythonLibrary()], ids=["c", "python"])
def test_several_masks_are_those_of_each_alone(one: GrammarLibrary) -> None:
    vocabulary = one.read(word_list())
    states = [vocabulary.compile(source_of(grammar)) for grammar in 3 * GRAMMARS]
    found = np.zeros((20, SIZE // 32), dtype=np.int32)
    rows = list(range(3, 3 + len(states)))
    one.fill(list(zip(states, rows, strict=True)), found)
    expected = [mask_of(one, state.deep_copy()) for state in states]
    assert (found[rows] == np.concatenate(expected)).all()
    assert not np.delete(found, rows, axis=0).any(), "other rows are left as they are"


def test_what_is_made_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, calls = CLibrary(), dict[str, int]()

    def counted(name: str) -> Any:
        real = getattr(one.functions, name)

        def call(*arguments: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return real(*arguments)

        return call

    for name in ("new_tokenizer_v2", "free_tokenizer", "new_matcher", "clone_matcher"):
        monkeypatch.setattr(one.functions, f"llg_{name}", counted(f"llg_{name}"))
    monkeypatch.setattr(one.functions, "llg_free_matcher", counted("llg_free_matcher"))
    state = one.read(word_list()).compile('start: "ab"')
    copies = [state.deep_copy() for _ in range(3)]
    del state, copies
    assert calls == {
        "llg_new_tokenizer_v2": 1,
        "llg_new_matcher": 1,
        "llg_clone_matcher": 3,
        "llg_free_matcher": 4,
        "llg_free_tokenizer": 1,
    }


def test_other_threads_run_while_a_vocabulary_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = product(*4 * [b"abcdefghijklmnopqrstuvwxyz"])
    tokens = [special(b"end"), *map(bytes, islice(letters, 32 * 2000 - 1))]
    one, begun, ended = CLibrary(), threading.Event(), threading.Event()
    real = getattr(one.functions, "llg_new_tokenizer_v2")  # noqa: B009

    def read(*arguments: Any) -> Any:
        begun.set()
        found = real(*arguments)
        ended.set()
        return found

    monkeypatch.setattr(one.functions, "llg_new_tokenizer_v2", read)
    thread = threading.Thread(target=one.read, args=(WordList(tokens, [0], list, SLICES),))
    thread.start()
    assert begun.wait(300)
    turns = 0
    while not ended.is_set():
        time.sleep(0.001)  # releases the GIL, and needs it again
        turns += 1
    thread.join()
    assert turns > 5, "with the GIL held there would be two"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("VERSION", b"llguidance@9.", "not of version 1"),
        ("FUNCTIONS", {"llg_gone": (None, ())}, "no C functions"),
        ("LLParserLimits", lambda: LLParserLimits(step_max_items=7), "not laid out"),
    ],
)
def test_another_version_is_called_by_its_classes_and_said_so(
    name: str,
    value: Any,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(c_library, name, value)
    assert isinstance(library.open_library.__wrapped__(), PythonLibrary)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert why in record.getMessage()


def test_the_installed_version_is_called_by_its_functions() -> None:
    assert isinstance(library.open_library.__wrapped__(), CLibrary)
    with pytest.raises(MismatchError, match="no C functions"):
        CLibrary("/nowhere.so")


def test_a_vocabulary_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="out of range"):
        CLibrary().read(word_list(ends=(SIZE,)))
