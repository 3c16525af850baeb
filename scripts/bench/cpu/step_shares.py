"""Find where a step's time goes on an x86 CPU: linears, attention, other rows, waiting, Python.

    scripts/benchmark cpu_step_shares                # streams of the default model, and a prompt
    scripts/benchmark cpu_step_shares --isa avx2

A timer of processor time interrupts the threads and notes the function that ran. The parts are
shares of the time that the threads ran; `running` is that time over all of the threads' time on the
clock, for the rest of which they slept or waited for a processor. `memory_share` is the bytes of
weights that steps read over what a copy moves in that time, `issue_share` the products of the
linears over those that the threads could issue from registers while they ran linears; both rates
are of the same run.
"""

from __future__ import annotations

import bisect
import ctypes
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import LLM
from appliance.bench.bandwidth import probe
from appliance.kernels.cpu.build import find_compiler
from appliance.kernels.cpu.library import LIBRARY, load_library
from appliance.kernels.cpu.structs import Isa
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.requests import submit

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine

INTERVAL = 500  # microseconds
PARTS = {
    "linears": (
        "nibbles_", "bytes_", "e2m1_", "codes_", "multiply_", "decoded_", "few_rows_",
        "two_tiles_", "load_block_scales", "linear_chunk", "store_outputs",
    ),
    "attention": (
        "scores_", "values_", "split_", "attend", "merge_", "weigh", "combine_", "highest_score",
    ),
    "waiting": ("work", "wait_for_others", "sleep_", "ap_pool_", "publish", "take_chunks"),
    "sampling": ("sample", "select_", "scan_", "top_", "sift", "sort_", "likeliest", "row_mass"),
}  # fmt: skip


class Sampler:
    """Takes samples of this process's threads."""

    def __init__(self, folder: Path) -> None:
        out = folder / "step_shares.so"
        flags = ["-O2", "-march=native", "-shared", "-fPIC"]
        source = str(Path(__file__).with_suffix(".c"))
        subprocess.run([*find_compiler(), *flags, source, "-o", str(out)], check=True)
        self.library = ctypes.CDLL(str(out))
        self.library.dot_rate.restype = ctypes.c_double
        lines = subprocess.run(
            ["nm", "-n", str(LIBRARY)], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        symbols = [line.split() for line in lines if line.split()[-2].lower() == "t"]
        self.starts = [int(words[0], 16) for words in symbols]
        self.names = [words[2] for words in symbols]
        self.base = _base_of(load_library())

    @contextmanager
    def taken(self, into: Counter[str]) -> Iterator[None]:
        """Count the samples of a block by part."""
        self.library.sample_each(INTERVAL)
        try:
            yield
        finally:
            count = self.library.sample_each(0)
        found = (ctypes.c_size_t * count).in_dll(self.library, "samples")
        into.update(Counter(map(self.part_of, found)))

    def part_of(self, address: int) -> str:
        """Return the part of a step that an address belongs to."""
        place = address - self.base
        if not self.starts[0] <= place < self.starts[-1]:
            return "python"
        name = self.names[bisect.bisect(self.starts, place) - 1]
        for part, prefixes in PARTS.items():
            if name.startswith(prefixes):
                return part
        return "other rows"


def _base_of(library: ctypes.CDLL) -> int:
    """Return where the library was loaded."""
    address = ctypes.cast(library.ap_abi, ctypes.c_void_p).value
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        assert address is not None
        if int(first, 16) <= address < int(last, 16):
            return int(first, 16) - int(line.split()[2], 16)
    raise LookupError("the library is not mapped")


def shares(
    sampler: Sampler, run: Callable[[], float], threads: int
) -> tuple[float, dict[str, Any]]:
    """Return the seconds that `run` says it measured, and the parts' shares of its time."""
    counts: Counter[str] = Counter()
    begin, processor = time.perf_counter(), time.process_time()
    with sampler.taken(counts):
        seconds = run()
    elapsed, processor = time.perf_counter() - begin, time.process_time() - processor
    total = counts.total()
    parts = {part: round(counts[part] / total, 3) for part in [*PARTS, "other rows", "python"]}
    return seconds, parts | {"running": round(processor / (threads * elapsed), 3)}


def decode(engine: LLMEngine, streams: int, prompt: int, steps: int) -> Callable[[], float]:
    """Prefill `streams` prompts now; the call returned takes steps of decoding alone."""
    submit(engine, streams, prompt, steps + 2, seed=1000 * streams)
    while engine.stats().step_decode_tokens < streams:
        engine.step()

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step()
        return time.perf_counter() - begin

    return run


def prefill(engine: LLMEngine, tokens: int, prompts: int) -> Callable[[], float]:
    def run() -> float:
        begin = time.perf_counter()
        for number in range(prompts):
            submit(engine, 1, tokens, 1, seed=10**6 + number)
            while engine.has_work:
                engine.step()
        return time.perf_counter() - begin

    return run


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        threads=options.threads,
        cpu_isa=options.isa,
        speculate="off",
        prefix_caching=False,
    )
    info = llm.engine.info
    (machine,) = probe([options.threads])
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder))
        rates = [sampler.library.dot_rate() for _ in range(20)]
        machine["products_per_second"] = round(options.threads * max(rates))
        prefill(llm.engine, 64, 2)()
        rows = [
            measured_decode(llm.engine, sampler, streams, machine, options)
            for streams in options.streams
        ]
        rows.append(measured_prefill(llm.engine, sampler, machine, options))
    result = {
        "benchmark": "cpu_step_shares",
        "conditions": conditions(),
        "model": info.model,
        "isa": Isa(load_library().ap_current_isa()).name.lower(),
        "weights": info.weight_format,
        "kv": info.kv_format,
        "machine": machine,
        "steps": rows,
    }
    write_result(options.out, result)


def measured_decode(
    engine: LLMEngine, sampler: Sampler, streams: int, machine: dict[str, Any], options: Any
) -> dict[str, Any]:
    info, steps = engine.info, options.steps
    run = decode(engine, streams, options.prompt_tokens, steps)
    seconds, parts = shares(sampler, run, options.threads)
    while engine.has_work:
        engine.step()
    rate = {"streams": streams, "tokens_per_second": round(streams * steps / seconds)}
    products = info.num_parameters * streams * steps
    return rate | _rates(parts, seconds, products, info.weight_bytes * steps, machine)


def measured_prefill(
    engine: LLMEngine, sampler: Sampler, machine: dict[str, Any], options: Any
) -> dict[str, Any]:
    info, tokens, prompts = engine.info, options.prefill_tokens, options.prompts
    seconds, parts = shares(sampler, prefill(engine, tokens, prompts), options.threads)
    rate = {"prompt": tokens, "tokens_per_second": round(tokens * prompts / seconds)}
    head = info.vocab_size * info.hidden_size  # multiplied for the last token alone
    products = (info.num_parameters - head) * tokens * prompts
    return rate | _rates(parts, seconds, products, info.weight_bytes * prompts, machine)


def _rates(
    parts: dict[str, float],
    seconds: float,
    products: int,
    bytes_read: int,
    machine: dict[str, Any],
) -> dict[str, Any]:
    in_linears = seconds * parts["running"] * parts["linears"]
    return {
        "shares": parts,
        "memory_share": round(bytes_read / seconds / (machine["copy_gb_per_second"] * 1e9), 3),
        "issue_share": round(products / (machine["products_per_second"] * in_linears), 3),
    }


if __name__ == "__main__":
    main()
