"""Text that a model makes up by itself: in its own distribution, of nobody else's licence.

It is sampled in a process of its own, so that the memory which the whole model takes is given back
before a layer is quantized.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import QuantizeError

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer

AT_ONCE = 32  # rows that are sampled together; others change what a processor rounds
SHORTEST_WORD = 3  # letters of a row's first token


def sample_rows(model_path: Path, count: int, row_tokens: int, seed: int) -> list[list[int]]:
    """Let a model write rows of tokens, each from a word of its vocabulary on.

    The same seed gives the same rows on one machine.

    Args:
        model_path: a .gguf file or a model folder; the whole model has to fit into memory.
        count: of rows.
        row_tokens: in each.
        seed: of first words and of sampling.

    Raises:
        QuantizeError: the model cannot run here; the message says why.
    """
    arguments = [str(model_path.resolve()), str(count), str(row_tokens), str(seed)]
    child = subprocess.run(
        [sys.executable, "-m", "appliance.quant.text.self_text", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise QuantizeError(
            f"the model cannot write its own calibration text: {reason}; give a text with"
            " --calibration"
        )
    rows: list[list[int]] = json.loads(child.stdout.splitlines()[-1])
    return rows


def first_words(tokenizer: Tokenizer, count: int, seed: int) -> list[int]:
    """Tokens that are words of letters, drawn at random."""
    chosen = random.Random(seed)
    found: list[int] = []
    while len(found) < count:
        token_id = chosen.randrange(tokenizer.vocab_size)
        word = tokenizer.decode([token_id]).strip()
        if len(word) >= SHORTEST_WORD and word.isascii() and word.isalpha():
            found.append(token_id)
    return found


def _sample(model_path: str, count: int, row_tokens: int, seed: int) -> list[list[int]]:
    from appliance.engine.request import SamplingParams
    from appliance.llm import LLM

    llm = LLM(model_path, max_model_len=row_tokens, max_num_seqs=AT_ONCE)
    start = llm.tokenizer.encode("", add_special_tokens=True)
    prompts = [[*start, word] for word in first_words(llm.tokenizer, count, seed)]
    length = row_tokens - len(start) - 1
    sampling = [
        SamplingParams(max_tokens=length, seed=seed * count + row, ignore_eos=True)
        for row in range(count)
    ]
    answers = llm.generate(prompts, sampling, progress=False)
    return [
        [*prompt, *answer.outputs[0].token_ids]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    sys.stdout.write(json.dumps(_sample(path, *map(int, numbers))) + "\n")
