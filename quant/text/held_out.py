"""Cuts evaluation windows from text that calibration never saw, of one kind or of several."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.errors import ChatTemplateError, ConfigError, QuantizeError
from appliance.quant.text import samples
from appliance.quant.text.documents import default_documents, documents_at

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.quant.text.documents import Message
    from appliance.tokenizer import Tokenizer

DEFAULT_SOURCE = "Python's help topics, those that calibration leaves out"
# Kinds of packaged passages, by their words on a card; then those in the model's own template.
PASSAGES = {"prose": "prose", "code": "code", "other languages": "languages"}
CHATS, CALLS = "chat", "tool calls"
KIND_WINDOWS = 32  # at most
SEPARATOR = "\n\n"  # between documents, as in WikiText


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """A request for evaluation text.

    Attributes:
        path: a text file or folder; None takes the help topics that calibration leaves.
        num_tokens: most tokens of all windows together; None takes the whole text.
        stride: distance between windows, equal to the scored tokens of each; None is the window, so
            that windows do not overlap and begin without context.

    Raises:
        ConfigError: a number is out of range.
    """

    path: Path | None = None
    num_tokens: int | None = 4096
    window: int = 512
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.window < 16:
            raise ConfigError(f"a window of {self.window} tokens is too short; use 16 or more")
        if self.stride is not None and not 1 <= self.stride <= self.window:
            raise ConfigError(f"the stride must be between 1 and the window, {self.window} tokens")
        if self.num_tokens is not None and self.num_tokens < self.window:
            raise ConfigError(
                f"{self.num_tokens} tokens do not fill a window of {self.window}; read more,"
                " or in smaller windows"
            )

    def windows_of(self, tokenizer: Tokenizer) -> Windows:
        """Tokenize the text and cut it into windows.

        Documents are joined and cut regardless of their ends; each window begins with BOS if the
        model wants it. From a longer text, windows are taken at even distances.

        Raises:
            QuantizeError: the text cannot be read, or is too short for one window.
        """
        documents = default_documents(held_out=True) if self.path is None else read(self.path)
        text = SEPARATOR.join(text for _, text in documents)
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        prefix = tokenizer.encode("", add_special_tokens=True)
        body = self.window - len(prefix)
        stride = min(self.stride or body, body)
        starts = range(0, len(ids) - body + 1, stride)
        if not starts:
            raise QuantizeError(
                f"the text has {len(ids):,} tokens, which do not fill a window of {self.window};"
                " give more text or a shorter --window"
            )
        count = len(starts)
        if self.num_tokens is not None:
            count = min(count, max(1, self.num_tokens // (stride + len(prefix))))
        chosen = [starts[i * len(starts) // count] for i in range(count)]
        tokens = torch.tensor([prefix + ids[start : start + body] for start in chosen])
        source = DEFAULT_SOURCE if self.path is None else self.path.name
        return Windows(tokens, stride if stride < body else self.window, source)


@dataclass(frozen=True, slots=True)
class Windows:
    """Sequences of equal length.

    Attributes:
        tokens: (num_windows, window) int64.
        stride: number of a window's last tokens that are scored.
        kinds: of each window, if there are several; `spans` then holds its first token to predict
            and its end, behind which it is filled up.
    """

    tokens: Tensor
    stride: int
    source: str
    kinds: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def fingerprint(self) -> str:
        """Changes with every token, as `Calibration.fingerprint` does."""
        return hashlib.blake2b(self.tokens.numpy().tobytes(), digest_size=8).hexdigest()

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def scored(self, index: int) -> slice:
        """Return a window's positions whose next token is scored.

        With a stride, tokens that an earlier window scored are only context; the first window
        scores all.
        """
        if self.spans:
            start, end = self.spans[index]
            return slice(start - 1, end - 1)
        first = 0 if index == 0 else self.length - self.stride - 1
        return slice(max(0, first), self.length - 1)


def windows_of_kinds(tokenizer: Tokenizer, most_tokens: int) -> Windows:
    """Make a window of each packaged passage: prose, code, other languages, chats and tool calls.

    Of a chat its last answer is scored, of a tool call the call; both need a chat template.

    Args:
        most_tokens: of a window; longer passages are cut, and left out if nothing of what is
            scored remains.

    Returns:
        No windows if the vocabulary has none of the passages.
    """
    found = [
        (words, tokenizer.encode(text, add_special_tokens=True, allow_special=False), 1)
        for words, kind in PASSAGES.items()
        for text in samples.passages(kind)
    ]
    if tokenizer.chat_template is not None:
        tokenizer.isolate_template()
        with contextlib.suppress(ChatTemplateError):
            found += [(CHATS, *_answer_of(tokenizer, chat)) for chat in samples.chats()]
        with contextlib.suppress(ChatTemplateError):
            for task in samples.tool_tasks():
                ids = task.called(tokenizer)
                found.append((CALLS, ids, _common(task.prompt(tokenizer), ids)))
    cut = [(kind, ids[:most_tokens], start) for kind, ids, start in found]
    kept = [(kind, ids, start) for kind, ids, start in cut if start < len(ids)]
    length = max((len(ids) for _, ids, _ in kept), default=0)
    rows = [ids + ids[:1] * (length - len(ids)) for _, ids, _ in kept]
    tokens = torch.tensor(rows, dtype=torch.int64).view(len(rows), length)
    return Windows(
        tokens,
        length,
        "packaged passages",
        tuple(kind for kind, _, _ in kept),
        tuple((start, len(ids)) for _, ids, start in kept),
    )


def _answer_of(tokenizer: Tokenizer, chat: list[Message]) -> tuple[list[int], int]:
    """Encode a chat; return its tokens and the place of the last answer."""
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    return ids, _common(tokenizer.encode_chat(chat[:-1]), ids)


def _common(prompt: list[int], ids: list[int]) -> int:
    """Count the tokens at the beginning of both."""
    pairs = enumerate(zip(prompt, ids, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(prompt), len(ids)))


def read(path: Path) -> list[tuple[str, str]]:
    """Read the documents at a path; raise QuantizeError if there is nothing to read."""
    if not path.exists():
        raise QuantizeError(f"there is no text at {path}")
    return [
        (name, text if isinstance(text, str) else SEPARATOR.join(part["content"] for part in text))
        for name, text in documents_at(path)
    ]
