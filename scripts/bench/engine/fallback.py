"""Compare a model that transformers' modules execute here with transformers' own `generate`.

    scripts/benchmark fallback                    # --weight-bits 8 beside transformers in bfloat16
    scripts/benchmark fallback --weights dense    # bfloat16 on both sides

The model is random, of Helium's class and the sizes of Pythia 160M (12 layers, 768 wide, 50,304
tokens): no family here is of it.
Eight prompts of 24 to 87 tokens are answered with 64 tokens each: by transformers as one padded
batch, here as eight streams. Both take turns, each in a process with its own limit of how long
OpenMP's threads spin: torch's for them, and ours as our servers have it. `ratio` is our tokens a
second over theirs, by processor seconds, which other work changes least, and by wall clock.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.bench.figures import spread
from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.request import Request
from appliance.engine.sampling_params import SamplingParams
from appliance.runtime import limit_spinning
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.prompts import random_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

STREAMS, TOKENS = 8, 64
_names = count()


def write_model(folder: Path) -> Any:
    """Write the random model with a tokenizer of bytes, and return it."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "helium",
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        intermediate_size=2048,
        vocab_size=50304,
        max_position_embeddings=2048,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    letters = enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in letters}, []))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return model


def answer(engine: LLMEngine, prompts: list[list[int]]) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for prompt in prompts:
        name = f"bench-{next(_names)}"
        engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
    found = 0
    while engine.has_work:
        found += sum(len(delta.token_ids) for delta in engine.step().deltas)
    assert found == STREAMS * TOKENS, found


def generate(model: Any, prompts: list[list[int]]) -> None:
    """Answer as one batch, padded on the left."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    found = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
    )
    assert found.shape == (STREAMS, width + TOKENS), found.shape


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the processor's seconds and the wall clock's."""
    begin, begin_wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - begin, time.perf_counter() - begin_wall


def be_the_peer(
    folder: str, threads: int, prompts: list[list[int]], pipe: Connection[Any, Any]
) -> None:
    """Write the model, then answer and send the seconds of it whenever asked."""
    import torch

    torch.set_num_threads(threads)
    model = write_model(Path(folder))
    while True:
        pipe.send(timed(lambda: generate(model, prompts)))
        if not pipe.recv():
            return


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--weights", choices=("int8", "dense"), default="int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    chance = random.Random(0)
    prompts = [random_tokens(24 + 9 * i, chance) for i in range(STREAMS)]
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        arguments = folder, options.threads, prompts, theirs
        peer = spawn.Process(target=be_the_peer, args=arguments, daemon=True)
        peer.start()
        pipe.recv()  # the model is written, and torch is warm
        limit_spinning()
        import torch

        torch.set_num_threads(options.threads)
        settings = EngineConfig(
            model=folder,
            weight_bits=8 if options.weights == "int8" else None,
            device="cpu",
            threads=options.threads,
            max_num_seqs=STREAMS,
            prefix_caching=False,
            speculate="off",
        )
        engine = LLMEngine.load(
            settings, eos_token_ids=(), metadata=None, on_progress=lambda *_: None
        )
        assert engine.info.backend.startswith("transformers"), "a family here has it by now"
        answer(engine, prompts)
        pairs = []
        for _ in range(options.repeats):
            ours = timed(lambda: answer(engine, prompts))
            pipe.send(True)
            pairs.append((ours, pipe.recv()))
        pipe.send(False)
        peer.join()
    tokens = STREAMS * TOKENS
    result = {
        "benchmark": "fallback",
        "conditions": conditions(),
        "threads": options.threads,
        "backend": engine.info.backend,
        "weights": engine.info.weight_format,
        "tokens_per_processor_second": {
            "ours": spread([tokens / ours[0] for ours, _ in pairs]),
            "transformers": spread([tokens / theirs[0] for _, theirs in pairs]),
        },
        "ratio": {
            "processor": round(statistics.median(b[0] / a[0] for a, b in pairs), 2),
            "wall": round(statistics.median(b[1] / a[1] for a, b in pairs), 2),
        },
    }
    write_result(options.out, result)
