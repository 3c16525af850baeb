"""The sampling parameters of a request, validated on construction.

msgspec structs, because they cross the process boundary. Imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from appliance.errors import RequestError
from appliance.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


MAX_N = 8
MAX_BEST_OF = 16
MAX_LENGTH_PENALTY = 10.0
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
GREEDY = 1e-5  # lower temperatures are greedy
FORCE = 1e6  # added to a logit: leaves other tokens no probability
MAX_LOGIT_BIAS = 300


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters, validated on construction.

    Args:
        n: answers per prompt; they share the prompt's blocks.
        best_of: number of answers to run; returns the `n` with the highest log probability per
            token, best first. With beam search, the beam width. None means `n`.
        use_beam_search: search for the likeliest answers, best first, instead of sampling. Excludes
            `temperature` and other parameters of random choice.
        length_penalty: of beam search; divides a finished answer's log probability by its length to
            this power for comparison, so a higher one favours longer answers.
        early_stopping: of beam search; True stops at as many finished answers as beams, False when
            the best beam is no better than the worst of these for its length, "never" when it
            cannot become better. As transformers defines them.
        max_tokens: maximum length; None uses the context. 0 ends the request with its prompt, which
            must then be scored or pooled.
        min_tokens: bans end-of-sequence and stop tokens before this many.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set whose probabilities sum to this.
        min_p: drop tokens less likely than this share of the likeliest.
        seed: the same seed and prompt give the same tokens. With the CPU library this holds in any
            batch; the sums of torch and of GPUs depend in their last bits on the number of rows,
            and so, rarely, does a token.
        repetition_penalty: divides (or multiplies, if negative) logits of tokens seen in prompt or
            answer.
        presence_penalty: subtracted from logits of tokens seen in the answer.
        frequency_penalty: likewise, times the count.
        penalty_window: count only so many last tokens for the penalties, those of the prompt like
            those of the answer, as llama.cpp does; None counts as above. Such a request is not
            speculated on.
        logit_bias: token id to a value added to its logit, -100 to 100.
        logprobs: alternatives per token; 0 reports the chosen one only, None nothing.
        prompt_logprobs: likewise for each prompt token after the first, or behind the last picture.
        stop: strings that end the answer; excluded from it.
        stop_token_ids: token ids that end the answer.
        ignore_eos: continue past the end-of-sequence token.
        thought_budget: limits the thinking at the start of the answer.
        grammar: the answer matches it and ends with it. Log probabilities are the model's own,
            without the grammar.

    Raises:
        RequestError: a value is out of range; `param` names the field.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int | None = None
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    thought_budget: ThoughtBudget | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._check_range("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            self._check_range("best_of", self.best_of, 1, MAX_BEST_OF)
            if self.best_of < self.n:
                raise RequestError(
                    f"best_of is {self.best_of} and n is {self.n}; best_of must be at least n",
                    param="best_of",
                )
        self._check_beam_search()
        self._check_grammar()
        if self.max_tokens is not None:
            self._check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        most = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        self._check_range("min_tokens", self.min_tokens, 0, most)
        self._check_range("temperature", self.temperature, 0.0, 2.0)
        self._check_range("top_k", self.top_k, 0, 2**31 - 1)
        self._check_range("top_p", self.top_p, 0.0, 1.0)
        self._check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self._check_range("seed", self.seed, -(2**63), 2**63 - 1)
        self._check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        self._check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.penalty_window is not None:
            self._check_range("penalty_window", self.penalty_window, 1, 2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                self._check_range(name, count, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries;"
                f" at most {MAX_LOGIT_BIAS} are accepted",
                param="logit_bias",
            )
        for token_id, bias in self.logit_bias.items():
            self._check_range("logit_bias", token_id, 0, 2**31 - 1)
            self._check_range("logit_bias", bias, -100.0, 100.0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are accepted",
                param="stop",
            )
        for string in self.stop:
            if not 1 <= len(string) <= MAX_STOP_LENGTH:
                raise RequestError(
                    f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop"
                )

    def _check_beam_search(self) -> None:
        self._check_range(
            "length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        if not self.use_beam_search:
            for name, value in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != value:
                    raise RequestError(
                        f"{name} belongs to beam search; set use_beam_search too", param=name
                    )
            return
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(
                'early_stopping must be true, false or "never"', param="early_stopping"
            )
        if self.num_sequences < 2:
            raise RequestError(
                "beam search needs at least 2 beams; best_of says how many (or n, without it)",
                param="best_of",
            )
        if self.prompt_logprobs is not None:
            raise RequestError(
                "beam search does not go with scores of the prompt; leave use_beam_search out",
                param="use_beam_search",
            )
        # 1 is the default, so the client may not have set it.
        for name, neutral in (
            ("temperature", (0.0, 1.0)),
            ("top_k", (0,)),
            ("top_p", (1.0,)),
            ("min_p", (0.0,)),
            ("repetition_penalty", (1.0,)),
            ("presence_penalty", (0.0,)),
            ("frequency_penalty", (0.0,)),
        ):
            if getattr(self, name) not in neutral:
                raise RequestError(
                    f"{name} does not go with beam search, which takes the likeliest answers as"
                    f" they are; leave {name} out",
                    param=name,
                )

    def _check_grammar(self) -> None:
        if self.thought_budget is not None and self.use_beam_search:
            raise RequestError(
                "beam search does not go with a budget for thoughts; leave use_beam_search out",
                param="use_beam_search",
            )
        if self.grammar is not None and self.use_beam_search:
            raise RequestError(
                "beam search does not go with a grammar; leave use_beam_search out",
                param="use_beam_search",
            )

    @staticmethod
    def _check_range(name: str, value: float, low: float, high: float) -> None:
        if not (math.isfinite(value) and low <= value <= high):
            raise RequestError(f"{name} must be between {low} and {high}, got {value}", param=name)

    def bias_at(self, num_output_tokens: int, output: Sequence[int] = ()) -> dict[int, float]:
        """Return the values added to the logits of the token after `num_output_tokens`.

        A thought budget needs `output`, the known tokens of the answer.
        """
        if self.thought_budget is not None:
            token_id = self.thought_budget.forces(output, num_output_tokens)
            if token_id is not None:
                return {token_id: FORCE}
        return self.logit_bias

    def num_candidates(self, eos_token_ids: Collection[int]) -> int:
        """Return the number of continuations to rank per beam.

        At most one continuation per beam survives, plus tokens that end the answer. Any token may
        complete a stop string, so it keeps some to spare.
        """
        return 2 * self.num_sequences + len({*eos_token_ids, *self.stop_token_ids})

    @property
    def num_sequences(self) -> int:
        """Sequences to run per prompt; for beam search, its width."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_choices(self) -> int:
        """Choices that the engine reports; best_of picks from these."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def takes_best(self) -> bool:
        """True if it samples more answers than the client gets."""
        return self.num_choices > self.n

    @property
    def has_penalties(self) -> bool:
        """True if tokens of the prompt or answer change the logits."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )

    @property
    def adjusts_logits(self) -> bool:
        """True if single logits change, at least in some steps."""
        return bool(self.logit_bias or self.min_tokens or self.thought_budget)


class ThoughtBudget(msgspec.Struct, frozen=True, array_like=True):
    """Limits an answer's thinking; forces the closing mark after that.

    Args:
        tokens: number of the answer's first tokens.
        opening: ids that begin a thought; empty if the prompt has begun it.
        closing: ids that end it.
    """

    tokens: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]

    def forces(self, output: Sequence[int], num_output_tokens: int) -> int | None:
        """Return the forced next token, or None.

        Ignores the budget's last token, which a device may not have returned yet. So a thought that
        ends just in time has its mark twice.

        Args:
            output: the answer's known tokens.
            num_output_tokens: their number, unknown ones included.
        """
        place = num_output_tokens - self.tokens
        if not 0 <= place < len(self.closing):
            return None
        seen = tuple(output[: max(0, self.tokens - 1)])
        if _find(seen, self.closing) or not _find(seen, self.opening):
            return None
        return self.closing[place]


def _find(tokens: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Return True if some tokens contain others consecutively."""
    starts = range(len(tokens) - len(part) + 1)
    return not part or any(tokens[start : start + len(part)] == part for start in starts)
