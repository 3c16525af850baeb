"""Runs tasks of lm-evaluation-harness (`lm_eval`) against a running endpoint.

The harness is a separate program; nothing of it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from appliance.errors import ConfigError, EngineUnavailableError, QuantizeError
from appliance.quant.quality.card import TaskScore
from appliance.quant.run.tokenizer_files import write_tokenizer_files
from appliance.runtime import child_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

CONCURRENT = 8  # requests in flight
_INSTALL = "pip install 'appliance[lm-eval]', or put lm_eval on the PATH"


def run_tasks(
    url: str,
    tasks: str,
    tokenizer: Path,
    *,
    api_key: str | None = None,
    include: Path | None = None,
    limit: int | None = None,
    command: Sequence[str] | None = None,
) -> tuple[TaskScore, ...]:
    """Run tasks against this server, or any that scores prompts the same way.

    Args:
        url: of the server, such as http://127.0.0.1:8080.
        tasks: names, separated by commas.
        tokenizer: the model's folder or GGUF file; prompts are sent as tokens.
        command: starts the harness; None looks for it.

    Raises:
        ConfigError: the harness is not installed.
        EngineUnavailableError: no server answers there.
        QuantizeError: the harness failed; the message has its last line.
    """
    command = command or _command()
    root = url.rstrip("/").removesuffix("/v1")
    model = _served_model(root, api_key)
    with tempfile.TemporaryDirectory(prefix="appliance-lm-eval-") as folder:
        files, out = Path(folder) / "tokenizer", Path(folder) / "out"
        files.mkdir()
        write_tokenizer_files(tokenizer, files)
        arguments = {
            "model": model,
            "base_url": f"{root}/v1/completions",
            "tokenizer": files,
            "num_concurrent": CONCURRENT,
            "tokenized_requests": True,
        }
        said = ",".join(f"{name}={value}" for name, value in arguments.items())
        options = ["--model", "local-completions", "--model_args", said, "--tasks", tasks]
        options += ["--output_path", str(out)]
        options += [] if include is None else ["--include_path", str(include)]
        options += [] if limit is None else ["--limit", str(limit)]
        environment = child_environment(OPENAI_API_KEY=api_key or "none")
        done = subprocess.run(
            [*command, *options], env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise QuantizeError(f"lm_eval ended with {done.returncode}; its output is above")
        found = sorted(out.rglob("results_*.json"))
        if not found:
            raise QuantizeError(f"lm_eval wrote no results for {tasks!r}; see its output above")
        return scores_of(json.loads(found[-1].read_text()))


def scores_of(results: dict[str, Any]) -> tuple[TaskScore, ...]:
    """Collect all scores from a results file of the harness."""
    scores = []
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, variant = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{variant}")
            name = metric if variant == "none" else f"{metric} ({variant})"
            count = results.get("n-samples", {}).get(task, {}).get("effective", 0)
            known = isinstance(error, int | float)
            scores.append(TaskScore(task, name, float(value), error if known else None, count))
    return tuple(scores)


def _command() -> list[str]:
    if importlib.util.find_spec("lm_eval") is not None:
        return [sys.executable, "-P", "-m", "lm_eval"]
    if (program := shutil.which("lm_eval")) is not None:
        return [program]
    raise ConfigError(f"lm-eval is not installed: {_INSTALL}")


def _served_model(root: str, api_key: str | None) -> str:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = httpx.get(f"{root}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EngineUnavailableError(
            f"no OpenAI-compatible server answers at {root} ({error}); start one with:"
            " appliance serve MODEL"
        ) from error
