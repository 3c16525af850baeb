"""Makes the default calibration rows: text of several kinds, mostly written by the model.

A model's own chats, programs, other languages and tool calls, text from random words on, and source
code of Python's standard library, whose licence is free and which is in every installation.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from appliance.errors import ChatTemplateError, QuantizeError
from appliance.quant.text import samples
from appliance.quant.text.answers import sample_rows
from appliance.quant.text.calibration import Calibration, fingerprint, make_calibration
from appliance.quant.text.documents import default_documents, library_sources

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.quant.text.answers import Openings
    from appliance.quant.text.calibration import CalibrationText
    from appliance.tokenizer import Tokenizer

# Kinds of rows, in words of the card, and their shares.
CHATS, PROGRAMS, LANGUAGES = "chats", "programs", "other languages"
CALLS, FREE, LIBRARY = "tool calls", "text from random words on", "library"
SHARES = {FREE: 0.3, CHATS: 0.2, LANGUAGES: 0.15, PROGRAMS: 0.1, CALLS: 0.1, LIBRARY: 0.15}
OPENINGS = {CHATS: "chat", PROGRAMS: "code", LANGUAGES: "languages"}
LIBRARY_SOURCE = "source code of Python's standard library"
TOPICS_SOURCE = "Python's help topics"
OPENINGS_OF_ROW = 6
DRAWS = 256  # most tries for a word; of large vocabularies one in three is one
SHORTEST_WORD = 3  # letters of a row's first token


def default_rows(
    model_path: Path,
    tokenizer: Tokenizer,
    text: CalibrationText,
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> Calibration:
    """Make rows of all kinds, in an order that the seed decides.

    If the model cannot run here, all rows are source code and help topics, and the result's source
    says why.

    Args:
        text: gives number and length of rows, and the seed.
        max_ram: limit in bytes; None takes what is free.

    Raises:
        QuantizeError: the texts are too short for so many tokens.
    """
    row_tokens, seed = text.row_tokens, text.seed
    counts = rows_of_kinds(-(-text.num_tokens // row_tokens))
    library = counts.pop(LIBRARY)
    openings = [
        one for kind, count in counts.items() for one in openings_of(kind, tokenizer, count, seed)
    ]
    rows: list[list[int]] = []
    peak_ram = 0
    documents = library_sources()
    source = f"{LIBRARY_SOURCE} ({library} rows)"
    try:
        written = sample_rows(
            model_path, openings, row_tokens, seed, device=device, max_ram=max_ram
        )
    except QuantizeError as error:
        library += len(openings)
        documents += default_documents(held_out=False)
        source = f"{LIBRARY_SOURCE} and {TOPICS_SOURCE} ({error})"
    else:
        rows, peak_ram = written.rows, written.peak_ram
        said = ", ".join(f"{kind} ({count} rows)" for kind, count in counts.items() if count)
        source = f"the model's own making: {said}" + (f"; and of {source}" if library else "")
    dropped = 0
    if library:
        found = make_calibration(
            documents,
            tokenizer,
            source=source,
            num_tokens=library * row_tokens,
            row_tokens=row_tokens,
            seed=seed,
        )
        rows, dropped = rows + found.rows.tolist(), found.dropped
    random.Random(seed).shuffle(rows)
    chosen = torch.tensor(rows, dtype=torch.int64)
    return Calibration(chosen, source, fingerprint(chosen), dropped, peak_ram)


def rows_of_kinds(count: int) -> dict[str, int]:
    """Divide a number of rows by `SHARES`, by largest remainders."""
    found = {kind: int(share * count) for kind, share in SHARES.items()}
    by_rest = sorted(SHARES, key=lambda kind: found[kind] - SHARES[kind] * count)
    for kind in by_rest[: count - sum(found.values())]:
        found[kind] += 1
    return found


def openings_of(kind: str, tokenizer: Tokenizer, count: int, seed: int) -> list[Openings]:
    """Choose the prompts of rows of a kind; without a chat template they are plain questions."""
    if kind == FREE:
        start = tokenizer.encode("", add_special_tokens=True)
        return [[[*start, word]] for word in first_words(tokenizer, count, seed)]
    encoded: list[list[int]] = []
    if kind == CALLS:
        encoded = _calls(tokenizer)
        kind = kind if encoded else PROGRAMS
    if not encoded:
        encoded = [_asked(tokenizer, question) for question in samples.openings(OPENINGS[kind])]
    random.Random(f"{seed} {kind}").shuffle(encoded)
    turns = [encoded[place % len(encoded)] for place in range(count * OPENINGS_OF_ROW)]
    return [turns[row :: max(1, count)][:OPENINGS_OF_ROW] for row in range(count)]


def first_words(tokenizer: Tokenizer, count: int, seed: int) -> list[int]:
    """Draw random tokens that are words of letters; any tokens of a vocabulary with few words."""
    chosen = random.Random(seed)
    found: list[int] = []
    for _ in range(DRAWS * count):
        if len(found) == count:
            break
        token_id = chosen.randrange(tokenizer.vocab_size)
        word = tokenizer.decode([token_id]).strip()
        if len(word) >= SHORTEST_WORD and word.isascii() and word.isalpha():
            found.append(token_id)
    return found + [chosen.randrange(tokenizer.vocab_size) for _ in range(count - len(found))]


def _asked(tokenizer: Tokenizer, question: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{question}\n\n", add_special_tokens=True, allow_special=False)
    tokenizer.isolate_template()
    return tokenizer.encode_chat([{"role": "user", "content": question}])


def _calls(tokenizer: Tokenizer) -> list[list[int]]:
    """Encode questions with tools, and the calls before their answers; none if it cannot be."""
    if tokenizer.chat_template is None:
        return []
    tokenizer.isolate_template()
    try:
        tasks = samples.tool_openings()
        return [ids for task in tasks for ids in (task.prompt(tokenizer), task.answered(tokenizer))]
    except ChatTemplateError:
        return []
