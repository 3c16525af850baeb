"""Compare our quantized KV caches with llama.cpp's by one estimator, on the same weights.

    scripts/benchmark kv_peers --llama-server PATH --model BF16.gguf --text FILE

Both programs read the same BF16 file. At the same places of the same text each returns the twenty
likeliest next tokens, with an unquantized cache and with quantized ones. The cost of a cache is the
KL divergence from the program's own unquantized cache. Only tokens in both lists count singly; all
others count as one. That can only make a divergence smaller, and does so for both programs alike.
Ours are measured bare, and INT8 and INT4 also with what `appliance quantize --kv-bits` finds for
them. llama-server is started if its path is given, and never built. Rows of an earlier run that
this one does not measure stay in the file; each row names its commit.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from support.models.teacher_forcing import logits_of

from appliance.kernels.backend import select_backend
from appliance.kernels.cache.kv_format import KVFormat
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.kv.calibrate import measure_kv
from appliance.quant.kv.even_keys import with_even_keys
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.quantize.kv_quality import CPU, calibration_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.kernels.cache.kv_format import LayerPrecision
    from appliance.model.source import ModelSource

TOP = 20
OURS = (KVFormat.INT8, KVFormat.FP8, KVFormat.K8V4, KVFormat.INT4_SEALED, KVFormat.INT4)
CALIBRATED = (KVFormat.INT8, KVFormat.INT4_SEALED, KVFormat.INT4)
CALIBRATION_ROWS = 4
THEIRS = ("q8_0", "q4_0")
UNQUANTIZED = "f16"

Top = dict[int, float]  # log probability of each of the likeliest tokens


def divergence(exact: Top, other: Top) -> float:
    """KL divergence of two next-token distributions, tokens outside of both lists as one."""
    shared = exact.keys() & other.keys()
    rest = [max(1e-9, 1 - sum(math.exp(of[token]) for token in shared)) for of in (exact, other)]
    inside = sum(math.exp(exact[token]) * (exact[token] - other[token]) for token in shared)
    return inside + rest[0] * math.log(rest[0] / rest[1])


def compare(exact: list[Top], other: list[Top]) -> dict[str, float]:
    """Return divergences, and how often the likeliest token is the same, in percent."""
    pairs = list(zip(exact, other, strict=True))
    losses = sorted(divergence(*pair) for pair in pairs)
    same = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs)
    return {
        "kld_mean": sum(losses) / len(losses),
        "kld_median": losses[len(losses) // 2],
        "same_top_percent": 100 * same / len(pairs),
    }


class LlamaServer:
    """A llama-server with one kind of cache; ends with the block."""

    def __init__(self, program: Path, model: Path, cache: str, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [
                str(program),
                "-m",
                str(model),
                "--host",
                "127.0.0.1",
                "--port",
                str(self._port),
                "-ctk",
                cache,
                "-ctv",
                cache,
                "-fa",
                "on",
                "-c",
                "2048",
                "-np",
                "1",
                "-t",
                str(threads),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> LlamaServer:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2):
                    return self
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None:
                    break
                time.sleep(0.2)
        self.__exit__()
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def likeliest(self, token_ids: list[int]) -> Top:
        """Return the likeliest tokens after these."""
        body = {
            "prompt": token_ids,
            "n_predict": 1,
            "n_probs": TOP,
            "temperature": 0,
            "cache_prompt": True,
            "post_sampling_probs": False,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
        top = found["completion_probabilities"][0]["top_logprobs"]
        return {entry["id"]: entry["logprob"] for entry in top}


def places(count: int, contexts: list[int]) -> list[range]:
    """Return runs of context lengths."""
    return [range(context, context + count) for context in contexts]


def ours(
    model: Path, texts: list[list[int]], runs: list[range], only: list[str]
) -> dict[str, list[list[Top]]]:
    """Return the likeliest tokens at every place by cache, then run, text after text."""
    source = open_model(model)
    bare = [(form.value, form) for form in OURS if not only or form.value in only]
    found = _likeliest(source, texts, runs, [(KVFormat.FP32.value, KVFormat.FP32), *bare])
    wanted = [form for form in CALIBRATED if not only or f"{form.value}, calibrated" in only]
    if wanted:
        rows = calibration_rows(Tokenizer.from_path(model), CALIBRATION_ROWS)
        with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
            measured = measure_kv(source, rows, Path(folder), CPU)
        evened = with_even_keys(source, [layer.chosen(KVFormat.INT8) for layer in measured])
        chosen = [
            (f"{form.value}, calibrated", [layer.chosen(form).precision() for layer in measured])
            for form in wanted
        ]
        found |= _likeliest(evened, texts, runs, chosen)
    return found


def _likeliest(
    source: ModelSource,
    texts: list[list[int]],
    runs: list[range],
    caches: Sequence[tuple[str, KVFormat | list[LayerPrecision]]],
) -> dict[str, list[list[Top]]]:
    decoder = load_decoder(source, select_backend(CPU), CPU, torch.float32)
    found: dict[str, list[list[Top]]] = {}
    for name, cache in caches:
        of_runs: list[list[Top]] = [[] for _ in runs]
        for text in texts:
            with torch.inference_mode():
                logits = logits_of(decoder, text, format=cache)
            for tops, run in zip(of_runs, runs, strict=True):
                for length in run:
                    values, ids = logits[length - 1].log_softmax(-1).topk(TOP)
                    tops.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
        found[name] = of_runs
    return found


def theirs(
    program: Path, model: Path, texts: list[list[int]], runs: list[range], threads: int
) -> dict[str, list[list[Top]]]:
    """Return the same of llama.cpp."""
    found = {}
    for cache in (UNQUANTIZED, *THEIRS):
        with LlamaServer(program, model, cache, threads) as server:
            found[cache] = [
                [server.likeliest(text[:length]) for text in texts for length in run]
                for run in runs
            ]
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a BF16 .gguf file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1500])
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--places", type=int, default=48, help="after each context of each text")
    parser.add_argument("--only", nargs="+", default=[], help="of our caches, by name")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    runs = places(arguments.places, arguments.contexts)
    tokenizer = Tokenizer.from_path(arguments.model)
    ids = tokenizer.encode(arguments.text.read_text(), add_special_tokens=False)
    length = max(run.stop for run in runs)
    if len(ids) < length * arguments.texts:
        raise SystemExit(f"the text has {len(ids)} tokens, not {length * arguments.texts}")
    texts = [ids[i * length : (i + 1) * length] for i in range(arguments.texts)]
    result: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "conditions": conditions(),
        "model": arguments.model.name,
        "text": arguments.text.name,
        "places": arguments.texts * arguments.places,
        "rows": [],
    }
    if arguments.out is not None and arguments.out.is_file():
        result["rows"] = json.loads(arguments.out.read_text())["rows"]
    torch.set_num_threads(arguments.threads)
    programs = {"appliance": ours(arguments.model, texts, runs, arguments.only)}
    if arguments.llama_server:
        programs["llama.cpp"] = theirs(
            arguments.llama_server, arguments.model, texts, runs, arguments.threads
        )
    for program, found in programs.items():
        exact = next(iter(found))
        for cache in list(found)[1:]:
            for run, index in zip(runs, range(len(runs)), strict=True):
                row = {"program": program, "cache": cache, "context": run.start}
                result["rows"] = [old for old in result["rows"] if not row.items() <= old.items()]
                row |= compare(found[exact][index], found[cache][index])
                row["commit"] = result["conditions"]["commit"]
                result["rows"].append(row)
                print(
                    f"{program:10} {cache:12} context {run.start:5}: KLD {row['kld_mean']:.5f},"
                    f" same top {row['same_top_percent']:.1f} %"
                )
    write_result(arguments.out, result, quiet=True)
