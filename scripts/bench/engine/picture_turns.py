"""Measures a server with a picture model: turns about a picture, and streams beside pictures.

Weights are random: a tower of Qwen3.5-0.8B's width, and text of SmolLM2-135M's.
"""

from __future__ import annotations

import base64
import io
import itertools
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from PIL import Image
from support.models.picture_models import write_picture_model
from support.server.free_ports import free_port

from appliance.bench.figures import percentile
from appliance.bench.own_server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CONTEXT = 16384
SIDES = {1: (1024, 1024), 2: (1440, 1440), 4: (2048, 2048)}  # by megapixels
_SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_TOWER = {
    "hidden_size": 768, "intermediate_size": 3072, "depth": 12, "num_heads": 12,
    "num_position_embeddings": 2304, "out_hidden_size": 576, "deepstack_visual_indexes": [],
}  # fmt: skip
_SIZE = {"shortest_edge": 65536, "longest_edge": 16777216}
_QUESTION = "{:04} And what stands beside it, please?"
_STREAMS = 2  # beside pictures


def measure_turns(threads: int, runs: int, megapixels: Sequence[int]) -> list[dict[str, Any]]:
    """Time the first token of a question about a known picture, and of one about as long a text.

    Both come in turns; of both the server has all but the question.

    Returns:
        For each size the median seconds, and `ratio`, the picture's over the text's.
    """
    found = []
    with _serving(threads) as asking:
        for width, height in (SIDES[one] for one in megapixels):
            url = _url((width, height), 0)
            picture = [_part(url)]
            first = asking.seconds(picture, "")
            rows = asking.usage["prompt_tokens_details"]["image_tokens"]
            prompt = asking.usage["prompt_tokens"]
            text = "It was a dark and stormy night. " * (rows // 32 + 1)
            whole = text[: rows + 2]  # and the words around it
            asking.seconds(whole, "")
            assert asking.usage["prompt_tokens"] == prompt
            times: dict[str, list[float]] = {"picture": [], "text": []}
            cached = set()
            for number in range(runs):
                for name, content in (("picture", picture), ("text", whole)):
                    times[name].append(asking.seconds(content, _QUESTION.format(number)))
                    details = asking.usage["prompt_tokens_details"]
                    cached.add(asking.usage["prompt_tokens"] - details["cached_tokens"])
            medians = {name: statistics.median(one) for name, one in times.items()}
            found.append(
                {
                    "pixels": [width, height],
                    "bytes": len(url),
                    "rows": rows,
                    "computed_tokens": sorted(cached),
                    "first_seconds": round(first, 3),
                    "seconds": {name: round(one, 4) for name, one in medians.items()},
                    "ratio": round(medians["picture"] / medians["text"], 3),
                }
            )
    return found


def measure_streams(threads: int, runs: int, megapixels: Sequence[int]) -> list[dict[str, Any]]:
    """Time the tokens of streams while others' prompts come: none, pictures, and as long texts.

    Returns:
        For each kind of prompt the seconds between tokens: median, 99th percentile and most.
    """
    found = []
    with _serving(threads) as asking:
        seed = iter(range(1, 10_000))

        def show(side: tuple[int, int]) -> None:
            asking.seconds([_part(_url(side, next(seed)))], "")

        def tell(rows: int) -> None:
            asking.seconds(f"{next(seed):05}" * (rows // 5), "")

        kinds: dict[str, Callable[[], object]] = {"nothing": lambda: time.sleep(1.0)}
        for one in megapixels:
            side = SIDES[one]
            rows = side[0] * side[1] // 1024
            kinds[f"pictures of {one} Mpx"] = partial(show, side)
            kinds[f"texts of {rows} tokens"] = partial(tell, rows)
        for name, work in kinds.items():
            gaps: list[float] = []
            for _ in range(runs):
                gaps += _gaps(asking, work)
            found.append(
                {
                    "beside": name,
                    "tokens": len(gaps),
                    "p50": round(percentile(gaps, 0.5), 4),
                    "p99": round(percentile(gaps, 0.99), 4),
                    "most": round(max(gaps), 4),
                }
            )
    return found


class _Asking:
    """Asks one server; `usage` is the last answer's."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=600)
        self.usage: dict[str, Any] = {}

    def seconds(self, content: Any, question: str) -> float:
        """Return the seconds to the first token of an answer."""
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "It is a cup."},
            {"role": "user", "content": question},
        ]
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        begin = time.perf_counter()
        answer = self.client.post("/v1/chat/completions", json=body).raise_for_status().json()
        self.usage = answer["usage"]
        return time.perf_counter() - begin

    def letters(self) -> dict[str, int]:
        """Return a bias to letters, each of which is a piece of a stream."""
        body = {"prompt": "abcdefgh", "add_special_tokens": False}
        tokens = self.client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        return {str(token): 100 for token in tokens}

    def stream(self, number: int, ends: threading.Event, times: list[float]) -> None:
        """Note when each token of an answer comes, until the end."""
        body = {
            "messages": [{"role": "user", "content": f"{number}: tell me a long story."}],
            "max_tokens": CONTEXT // 2,
            "ignore_eos": True,
            "stream": True,
            "logit_bias": self.letters(),
        }
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if '"content":"' in line:
                    times.append(time.perf_counter())
                if ends.is_set():
                    return


def _gaps(asking: _Asking, work: Callable[[], object]) -> list[float]:
    """Return the seconds between tokens of all streams while some work runs."""
    ends = threading.Event()
    times: list[list[float]] = [[] for _ in range(_STREAMS)]
    threads = [
        threading.Thread(target=asking.stream, args=(number, ends, times[number]))
        for number in range(_STREAMS)
    ]
    for thread in threads:
        thread.start()
    while min(map(len, times)) < 5:
        time.sleep(0.01)
    begin = time.perf_counter()
    work()
    end = time.perf_counter()
    ends.set()
    for thread in threads:
        thread.join()
    return [
        after - before
        for one in times
        for before, after in itertools.pairwise(one)
        if after > begin and before < end
    ]


@contextmanager
def _serving(threads: int) -> Iterator[_Asking]:
    with tempfile.TemporaryDirectory() as folder:
        write_picture_model(
            "qwen3_vl", Path(folder), context=CONTEXT, text=_SMOLLM2, vision=_TOWER, size=_SIZE
        )
        port = free_port()
        options = ("--threads", str(threads), "--packed-weights", "off", folder)
        with ServerProcess.ours(port, *options) as server:
            asking = _Asking(f"http://127.0.0.1:{port}")
            while True:
                try:
                    if asking.client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert server.tree(), server.last_words()
                time.sleep(0.1)
            yield asking
            asking.client.close()


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _url(side: tuple[int, int], seed: int) -> str:
    """Return a picture as cameras make them: smooth, with noise; a different one for each seed."""
    width, height = side
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), np.uint8))
    smooth = np.asarray(coarse.resize(side, Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + generator.integers(-6, 7, (height, width, 3), np.int16)
    out = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
