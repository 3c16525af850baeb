"""lm-eval: log-likelihoods of a small set of questions, with the server's own tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fetched import python_clients
from waiting import LIMIT

pytestmark = pytest.mark.model

TASKS = Path(__file__).parent / "lm_eval_tasks"


def evaluate(base_url: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the task; return its results and what was asked."""
    finished = subprocess.run(
        [
            *(python_clients() / "python", "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", "model=small", f"base_url={base_url}/completions"),
            *("tokenizer_backend=remote", "num_concurrent=2", "max_retries=1"),
            *("--tasks", "appliance_facts", "--include_path", str(TASKS), "--batch_size", "3"),
            *("--output_path", str(folder), "--log_samples"),
        ],
        cwd=TASKS,  # where the task finds its questions
        env={**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    (results,) = folder.glob("**/results_*.json")
    (samples,) = folder.glob("**/samples_*.jsonl")
    lines = samples.read_text().splitlines()
    return json.loads(results.read_text()), [json.loads(line) for line in lines]


def likelihood(client: httpx.Client, context: str, continuation: str) -> float:
    """The same by the other field that tells it, from the texts."""
    before = client.post("/tokenize", json={"prompt": context}).json()["count"]
    body = {"prompt": context + continuation, "prompt_logprobs": 0, "max_tokens": 0}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    places = choice["prompt_logprobs"][before:]
    return sum(float(one["logprob"]) for place in places for one in place.values())


def test_questions_are_answered_by_their_likelihoods(base_url: str, tmp_path: Path) -> None:
    results, samples = evaluate(base_url, tmp_path)
    assert results["results"]["appliance_facts"]["acc,none"] >= 0.9
    assert len(samples) == 10
    with httpx.Client(base_url=base_url.removesuffix("/v1"), timeout=LIMIT) as client:
        for sample in samples[:3]:
            asked = [one["arg_1"] for one in sample["arguments"].values()]
            contexts = [one["arg_0"] for one in sample["arguments"].values()]
            told = [float(one[0][0]) for one in sample["resps"]]
            for context, text, found in zip(contexts, asked, told, strict=True):
                assert found == pytest.approx(likelihood(client, context, text), abs=1e-3)
