"""lm-eval: log-likelihoods of a small set of questions, with the server's own tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runs.fetched import python_clients
from support.runs.waiting import LIMIT

pytestmark = pytest.mark.model

HERE = Path(__file__).parent
TASKS = HERE / "lm_eval_tasks"


def evaluate(base_url: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the task; return its results and the requests."""
    finished = subprocess.run(
        [python_clients() / "python", HERE / "programs" / "lm_eval_facts.py", base_url, TASKS],
        cwd=TASKS,  # where the task looks for its questions
        env={**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    return told["results"], told["samples"]


def likelihood(client: httpx.Client, context: str, continuation: str) -> float:
    """The likelihood of a continuation from its text, by the other field that reports it."""
    before = client.post("/tokenize", json={"prompt": context}).json()["count"]
    body = {"prompt": context + continuation, "prompt_logprobs": 0, "max_tokens": 0}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    places = choice["prompt_logprobs"][before:]
    return sum(float(one["logprob"]) for place in places for one in place.values())


def test_questions_are_answered_by_their_likelihoods(base_url: str, tmp_path: Path) -> None:
    results, samples = evaluate(base_url, tmp_path)
    assert results["acc,none"] >= 0.9
    assert len(samples) == 10
    with httpx.Client(base_url=base_url.removesuffix("/v1"), timeout=LIMIT) as client:
        for sample in samples[:3]:
            for (context, text), told in zip(sample["arguments"], sample["resps"], strict=True):
                expected = likelihood(client, context, text)
                assert float(told[0][0]) == pytest.approx(expected, abs=1e-3)
