"""Proposes the tokens that followed the last ones earlier: in the sequence, or in earlier answers.

Prompt lookup and suffix decoding (arXiv 2411.04975) with one place per window of tokens. Only
requests with the same cache salt share earlier answers. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

from appliance.engine.speculation.proposal import Proposal
from appliance.engine.speculation.token_index import (
    BYTES_PER_TOKEN,
    MAX_MATCH,
    SEPARATOR,
    TokenIndex,
    ends_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.sequence import Sequence

MAX_BYTES = 64 * 2**20
READ_PER_STEP = 1024  # tokens of a sequence: a long prompt takes several steps
CORPUS_TOKENS = MAX_BYTES // BYTES_PER_TOKEN // 4  # of all earlier answers
HISTORY_TOKENS = MAX_BYTES // BYTES_PER_TOKEN - CORPUS_TOKENS  # of all running sequences
SALT_TOKENS = CORPUS_TOKENS // 4  # of one cache salt


class Corpus:
    """Recent answers of recent cache salts.

    Args:
        salt_tokens: maximum per salt.
        all_tokens: maximum of all salts.
    """

    def __init__(self, salt_tokens: int = SALT_TOKENS, all_tokens: int = CORPUS_TOKENS) -> None:
        self._salt_tokens = salt_tokens
        self._all_tokens = all_tokens
        # The older half and the newer: a full newer half becomes the older.
        self._halves: OrderedDict[str, tuple[TokenIndex, TokenIndex]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, chain.from_iterable(self._halves.values())))

    def add(self, salt: str, token_ids: Ordered[int]) -> None:
        """Keep an answer's tokens, or the last ones of a long answer."""
        half = self._salt_tokens // 2
        old, new = self._halves.pop(salt, (TokenIndex(), TokenIndex()))
        kept = [*token_ids[-(half - 1) :], SEPARATOR]
        if len(new) + len(kept) > half:
            old, new = new, TokenIndex()
        new.extend(kept)
        self._halves[salt] = old, new
        while len(self._halves) > 1 and self.num_tokens > self._all_tokens:
            self._halves.popitem(last=False)

    def find(
        self, salt: str, text: Ordered[int], ends: tuple[int, ...], most: int
    ) -> tuple[int, tuple[int, ...]]:
        """See `TokenIndex.find`; prefers the newer of two equal matches."""
        old, new = self._halves.get(salt, (None, None))
        if old is None or new is None:
            return 0, ()
        found = new.find(text, ends, most)
        other = old.find(text, ends, most)
        return other if other[0] > found[0] else found


class SuffixProposer:
    """Looks each answer's last tokens up in its own text, then in earlier answers.

    Args:
        history_tokens: maximum read of all running sequences together.
    """

    def __init__(
        self, corpus: Corpus | None = None, *, history_tokens: int = HISTORY_TOKENS
    ) -> None:
        self._corpus = corpus or Corpus()
        self._histories: dict[Sequence, TokenIndex] = {}
        self._room = history_tokens

    def propose(self, answers: Ordered[tuple[Sequence, int]]) -> dict[Sequence, Proposal]:
        """See `Proposer`; the support of a proposal is the length of its match."""
        found: dict[Sequence, Proposal] = {}
        for sequence, most in answers:
            text, history = sequence.token_ids, self._read(sequence)
            ends = history.ends if len(history) == len(text) else ends_of(text)
            length, tokens = history.find(text, ends, most)
            if length < MAX_MATCH:
                other = self._corpus.find(sequence.request.cache_salt, text, ends, most)
                if other[0] > length:
                    length, tokens = other
            if tokens:
                found[sequence] = Proposal(tokens, "suffix", length)
        return found

    def end(self, sequence: Sequence) -> None:
        """Keep an answer for later ones."""
        history = self._histories.pop(sequence, None)
        if history is not None:
            self._room += len(history)
        if sequence.num_output_tokens > 1 and not sequence.request.sampling.use_beam_search:
            answer = sequence.token_ids[sequence.num_prompt_tokens :]
            self._corpus.add(sequence.request.cache_salt, answer)

    def _read(self, sequence: Sequence) -> TokenIndex:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = TokenIndex()
        begin = len(history)
        added = sequence.token_ids[begin : begin + min(READ_PER_STEP, self._room)]
        if added:
            history.extend(added)
            self._room -= len(added)
        return history
