"""The documentation's promises about `seed`, for the CPU library and an asynchronous device.

The device's products are exact here, since those of a GPU may be rounded depending on the size of a
step: the drawn numbers depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.late_device import LateDevice
from support.kernels.products import exact_products

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams

Load = Callable[..., LLMEngine]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": -3},
    {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.7, "seed": 2**63 - 1},
]


@pytest.fixture(params=["library", "device"])
def load(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Load]:
    """Loads an engine of each kind."""

    def build(**options: Any) -> LLMEngine:
        late = LateDevice() if request.param == "device" else None
        kernels = "torch" if late else "auto"
        settings = {"threads": 1, "max_num_seqs": 16, "max_num_batched_tokens": 64} | options
        config = EngineConfig(model=str(tiny_llama), kernels=kernels, **settings)
        return load_llm_engine(config, (2,), None, lambda stage, done, total: None, late)

    if request.param == "device":
        with exact_products():
            yield build
    else:
        yield build


def asked(name: str, length: int = 40, **sampling: Any) -> Request:
    tokens = torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(length))
    return Request(
        request_id=name,
        prompt_token_ids=tuple(tokens.tolist()),
        sampling=SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **sampling}),
    )


def run(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        engine.submit(request)
    answers: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return answers


def test_the_same_seed_and_prompt_give_the_same_tokens(load: Load) -> None:
    engine, another = load(), load(prefix_caching=False)
    items = [asked(str(number), **sampling) for number, sampling in enumerate(SAMPLINGS)]
    first: dict[tuple[str, int], list[int]] = {}
    for item in items:
        first |= run(engine, item)
        place = item.request_id, 0
        assert run(engine, item)[place] == first[place], "its prompt is cached"
        assert run(another, item)[place] == first[place], "another start"
    others = [asked(f"other {n}", 9 + 17 * n, temperature=1.5) for n in range(6)]
    crowd = run(engine, *others[:3], *items, *others[3:])
    assert {place: crowd[place] for place in first} == first, "beside others"
    reseeded = [asked(str(n), **one | {"seed": 8}) for n, one in enumerate(SAMPLINGS)]
    found = run(engine, *reseeded)
    assert all(found[place] != first[place] for place in first)


def test_choices_differ_and_the_first_is_what_one_alone_would_be(load: Load) -> None:
    engine = load()
    several = run(engine, asked("n", temperature=1.0, seed=11, n=4))
    assert len({tuple(answer) for answer in several.values()}) == 4
    assert run(engine, asked("one", temperature=1.0, seed=11))["one", 0] == several["n", 0]


def test_without_a_seed_every_request_draws_its_own(load: Load) -> None:
    engine = load()
    answers = run(engine, *(asked(str(number), temperature=1.0) for number in range(4)))
    assert len({tuple(answer) for answer in answers.values()}) == 4


def test_both_kinds_of_engine_draw_the_same_numbers(tiny_llama: Path) -> None:
    """A bias makes tokens nearly equally likely, since no two executors have equal logits."""
    even = dict.fromkeys((50, 51, 52, 53), 100.0)  # their logits differ little compared with it
    sampling: Any = {"temperature": 2.0, "top_k": 4, "logit_bias": even, "seed": 5}
    config: Any = {"model": str(tiny_llama), "threads": 1, "dtype": "float32"}
    answers = []
    for kernels, device in (("auto", None), ("torch", LateDevice())):
        engine = load_llm_engine(
            EngineConfig(kernels=kernels, **config),
            (2,), None, lambda stage, done, total: None, device,
        )  # fmt: skip
        answers.append(run(engine, asked("r", **sampling))["r", 0])
    assert set(answers[0]) <= {50, 51, 52, 53}
    assert len(set(answers[0])) > 1
    assert answers[0] == answers[1]
