"""Fill in the documentation's tables from results, settings and the import table.

    scripts/docs            # writes them
    scripts/docs --check    # names the pages that are out of date

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from appliance.config.reference import settings_reference
from appliance.engine.memory.experts.prediction import TokenTime
from appliance.engine.memory.known_gpus import gpu_named
from appliance.fit.expected import expected_rate
from appliance.fit.published import QUOTES, Quote
from appliance.model.executor import heads_of
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role
from bench.docs.int8_prompts import int8_prompts
from bench.docs.widened_pages import widened_pages
from bench.lib.conditions import ROOT
from bench.lib.model_shapes import (
    GEMMA_3_27B,
    GEMMA_4_26B_A4B,
    LLAMA_3_8B,
    QWEN_3_8B,
    QWEN_30B_A3B,
    QWEN_35_27B,
    QWEN_36_35B_A3B,
)
from bench.lib.synthetic import Schemes, synthetic_model

DOCS = ROOT / "appliance" / "docs"
RESULTS = ROOT / "scripts" / "bench" / "results"
PART = re.compile(r"(?<=<!-- generated: )(?P<name>[a-z-]+) -->\n.*?(?=<!-- end -->)", re.DOTALL)
SERVERS = {
    "ours": "appliance, the shipped Q4_1 file",
    "llama-q4_1": "llama.cpp, the same file",
    "llama-q4_0": "llama.cpp, requantized to Q4_0",
    "llama-bf16": "llama.cpp, bf16",
    "vllm-bf16": "vLLM (CPU build), bf16",
    "transformers-bf16": "transformers serve, bf16",
}
_35B = QWEN_36_35B_A3B | {"num_hidden_layers": 40, "vocab_size": 248320}
# Whole configs of the models that are quoted.
EXPECTED = {
    **dict.fromkeys(("Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"), QWEN_35_27B),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), _35B),
    "Qwen3-30B-A3B": QWEN_30B_A3B | {"num_hidden_layers": 48, "vocab_size": 151936},
    "Gemma 4 26B-A4B": GEMMA_4_26B_A4B,
    "Gemma 3 27B": GEMMA_3_27B,
    "Qwen3-8B": QWEN_3_8B,
    "Llama 3.1 8B": LLAMA_3_8B,
}
METHODS = {"rtn": "rounding", "awq": "AWQ", "gptq": "GPTQ", "awq+gptq": "AWQ and GPTQ"}


def read(name: str) -> Any:
    """Read a file of results."""
    return json.loads((RESULTS / name).read_text())


def table(head: list[str], rows: list[list[str]]) -> str:
    """Format Markdown; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def peers() -> str:
    """Compare the servers."""
    result = read("cpu/peers_smollm2.json")
    head = [
        "server", "tokens/s, 1 client", "8 clients", "16 clients", "prefill of 512, tokens/s",
        "first token at 16, p50 / p99 ms", "start, s", "memory idle / loaded, MB",
    ]  # fmt: skip
    rows = []
    for server in result["servers"]:
        sweep = {one["concurrency"]: one for one in server["sweep"]}
        rates = [sweep[n]["output_tokens_per_second"]["median"] for n in (1, 8, 16)]
        first = sweep[16]["ttft_ms"]
        idle, loaded = (server[f"memory_{when}_load"]["pss_mb"] for when in ("before", "after"))
        rows.append(
            [
                SERVERS[server["name"]],
                *(f"{rate:,.0f}" for rate in rates),
                f"{server['prefill']['tokens_per_second']['median']:,.0f}",
                f"{first['p50']:,.0f} / {first['p99']:,.0f}",
                f"{server['start']['healthy_seconds']:.1f}",
                f"{idle:,} / {loaded:,}",
            ]
        )
    where = result["conditions"]
    return f"{table(head, rows)}\n{where['cpu']}, {where['time'][:10]}, commit {where['commit']}.\n"


def quantize() -> str:
    """Compare the methods of quantization."""
    rows = read("quantize/smollm2.json")["rows"]
    head = ["method", "asymmetric: mean KLD", "same top", "symmetric: mean KLD", "same top"]
    lines = []
    for method, words in METHODS.items():
        cells = [words]
        for kind in ("asym", "sym"):
            row = rows[f"{method} 4 {kind}"]
            cells += [f"{row['kld_mean']:.3f}", f"{row['same_top_1_percent']:.0f} %"]
        lines.append(cells)
    for name, words in (("fp8", "FP8, a scale per channel"), ("int8", "INT8")):
        row = rows[name]
        kld, same = f"{row['kld_mean']:.4f}", f"{row['same_top_1_percent']:.0f} %"
        lines.append([words, *((kld, same, "", "") if name == "fp8" else ("", "", kld, same))])
    return table(head, lines)


# Shares of schemas that Guidance and llama.cpp accept, and that they obey: table 4 of Geng and
# others 2025, arXiv 2501.10868v2. Two categories are not in it.
COVERAGE = {
    "Glaiveai2K": ("0.98 / 0.96", "0.98 / 0.95"),
    "Github_trivial": ("", ""),
    "Github_easy": ("0.90 / 0.86", "0.85 / 0.75"),
    "Snowplow": ("0.87 / 0.82", "0.92 / 0.74"),
    "Github_medium": ("0.79 / 0.69", "0.77 / 0.57"),
    "Kubernetes": ("0.98 / 0.91", "0.98 / 0.76"),
    "WashingtonPost": ("0.86 / 0.86", "0.97 / 0.94"),
    "Github_hard": ("0.60 / 0.41", "0.61 / 0.39"),
    "JsonSchemaStore": ("0.35 / 0.30", "0.54 / 0.38"),
    "Github_ultra": ("", ""),
}


def published_schemas() -> str:
    """Compare by category which published schemas compile, and how their examples are judged."""
    result = read("published_schemas.json")
    found = {name: Counter(one) for name, one in result["categories"].items()}
    head = [
        "category", "schemas", "compile here", "Guidance", "llama.cpp", "examples",
        "right ones refused", "because objects are closed", "wrong ones let through",
    ]  # fmt: skip
    rest = sum((one for name, one in found.items() if name not in COVERAGE), Counter[str]())
    lines = [(name, found[name], *coverage) for name, coverage in COVERAGE.items()]
    lines.append(("others of MaskBench", rest, "", ""))
    rows = [
        [
            name,
            f"{one['schemas']:,}",
            f"{one['compiled'] / one['schemas']:.2f}",
            guidance, llama, f"{one['examples']:,}",
            str(one["refused"]), str(one["closed"]), str(one["let_through"]),
        ]
        for name, one, guidance, llama in lines
    ]  # fmt: skip
    times = " and ".join(
        f"{result[kind]['p50']:,} us ({words}, {result[kind]['p99']:,} at p99)"
        for kind, words in (("mask_us", "a mask"), ("compile_us", "a schema"))
    )
    where = result["conditions"]
    machine = "an idle" if where["load_average"][0] < where["cores"] else "a busy"
    text = (
        f"One file of every {result['every']}; {result['masks']:,} masks of Qwen's "
        f"{result['vocabulary']:,} tokens, in medians of a processor's time {times}; "
        f"{where['cpu']}, {where['time'][:10]}, commit {where['commit']}, on {machine} machine."
    )
    return f"{table(head, rows)}\n{text}\n"


def replicas() -> str:
    """Compare the prefix cache's hit rates of ways to route agents to replicas."""
    result = read("replicas.json")
    ways = ["one server, all memory", "by prefix", "least loaded", "round robin"]
    head = ["replicas, KV memory of what the agents at work hold", *ways]
    head += ["by prefix over one server", "round robin over one server"]
    rows = []
    for case in result["cases"]:
        found = case["ways"]
        ratios = [found[way]["of_one_server"] for way in ("by prefix", "round robin")]
        rates = [found[way]["hit_rate"] for way in ways]
        name = f"{case['replicas']}, {case['room']:.1f} times"
        rows.append([name, *(f"{value:.3f}" for value in (*rates, *ratios))])
    trace = result["cases"][0]["trace"]
    ideal = result["cases"][0]["ways"]["by prefix"]["ideal"]
    about = (
        f"{trace['agents']} agents at work, {trace['conversations']} conversations of"
        f" {trace['turns']} turns behind one system prompt of {trace['system']:,} tokens; what"
        f" could be found at best is {ideal:.3f}. Counts, no times; commit"
        f" {result['conditions']['commit']}."
    )
    return f"{table(head, rows)}\n{about}\n"


def instructions() -> str:
    """Compare the instructions of ARM's and of x86's libraries."""
    result = read("cpu/instructions.json")
    counts = result["instructions of a weight and row"]
    columns = list(next(iter(counts.values())))
    rows = [[name, *(f"{found[one]:.2f}" for one in columns)] for name, found in counts.items()]
    about = f"Counts, no times; commit {result['conditions']['commit']}."
    return f"{table(['instruction set', *columns], rows)}\n{about}\n"


def step_shares() -> str:
    """Show where a step's time goes."""
    result = read("cpu/step_shares_smollm2.json")
    parts = [part for part in result["steps"][0]["shares"] if part != "running"]
    head = ["step", *parts, "memory's rate", "products' rate"]
    rows = []
    for one in result["steps"]:
        streams = one.get("streams", 0)
        what = f"{streams} stream{'s' * (streams > 1)}" if streams else f"prompt of {one['prompt']}"
        shares = [one["shares"][part] for part in parts]
        rates = [one["memory_share"], one["issue_share"]]
        rows.append([what, *(f"{100 * share:.0f} %" for share in [*shares, *rates])])
    where, ran = result["conditions"], [one["shares"]["running"] for one in result["steps"]]
    about = (
        f"{where['cpu']}, {result['isa']}, {result['machine']['threads']} threads,"
        f" {where['time'][:10]}, commit {where['commit']}, load {where['load_average'][0]:.1f}"
        f" before it; the threads ran {100 * min(ran):.0f} to {100 * max(ran):.0f} % of the time."
    )
    return f"{table(head, rows)}\n{about}\n"


def imports() -> str:
    """Return the table and the orders that the architecture test enforces."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text())
    found: dict[str, Any] = {}
    for node in tree.body:
        names = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(names[0], ast.Name):
            found[names[0].id] = node.value
    leaves = sorted(ast.literal_eval(found["LEAVES"]))
    rows = []
    for key, value in zip(found["MAY_IMPORT"].keys, found["MAY_IMPORT"].values, strict=True):
        unit = ast.literal_eval(key)
        allowed = sorted(ast.literal_eval(value)) if isinstance(value, ast.Set) else []
        if unit not in leaves and allowed:
            rows.append([f"`{unit}`", ", ".join(f"`{name}`" for name in allowed)])
    head = "| room | may import |\n| --- | --- |\n"
    body = "".join(f"| {unit} | {allowed} |\n" for unit, allowed in rows)
    parts = [f"{head}{body}", f"All may import the leaves: {_in_code(', ', leaves)}.\n", IN_ORDER]
    orders = ast.literal_eval(found["ROOMS"])
    parts += [f"`{unit}`: {_in_code(' < ', rooms)}.\n" for unit, rooms in orders.items()]
    return "\n".join(parts)


IN_ORDER = (
    "The rooms inside these have an order too, and import only themselves and those before:\n"
)


def _in_code(between: str, names: Iterable[str]) -> str:
    return between.join(f"`{name}`" for name in names)


HELD_TYPES = ("smollm2", "1b", "1b_more", "avx2_smollm2", "few_layers")


def held_types() -> str:
    """Compare GGUF types held as they are with their files, with float32, and with llama.cpp."""
    head = [
        "weights", "file, MB", "held over file", "mean KLD to float32",
        "1 stream, tokens/s (of the memory's rate)", "8 streams", "prefill", "over llama.cpp",
    ]  # fmt: skip
    rows, origins, is_timed = [], [], False
    for name in HELD_TYPES:
        if not (RESULTS / f"cpu/held_types_{name}.json").exists():
            continue
        result = read(f"cpu/held_types_{name}.json")
        for row in result["rows"]:
            rows.append(held_row(row, result["layers"]))
            is_timed = is_timed or "speed" in row
        where = result["conditions"]
        origins.append(f"{where['cpu']}, {where['time'][:10]}, commit {where['commit']}")
    note = "" if is_timed else " Speeds were not measured: the machine was shared."
    return f"{table(head, rows)}\n{'; '.join(dict.fromkeys(origins))}.{note}\n"


def held_row(row: dict[str, Any], layers: int | None) -> list[str]:
    """Format one file; ratios are by streams and then of the prefill."""
    speed = row.get("speed", {"runs": {"ours": []}})
    runs, ratios = speed["runs"]["ours"], speed.get("ratios", {})
    places = ("decode_1", "decode_8", "prefill")
    rates = [median(run[place] for run in runs) for place in places] if runs else []
    rates_in_words = [f"{rate:,.0f}" for rate in rates] or [""] * len(places)
    if rate_of_memory := row.get("read_gb_per_second"):
        share = rates[0] * row["held_bytes"] / rate_of_memory / 1e9
        rates_in_words[0] += f" ({share:.0%})"
    is_random = row["model"].startswith("random")
    name = f"random, {layers} layers" if is_random else row["model"]
    words = [name, row.get("type"), "AVX2" if row.get("isa") == "avx2" else None]
    return [
        ", ".join(word for word in words if word),
        f"{row['file_bytes'] / 1e6:,.0f}",
        f"{row['held_bytes'] / row['file_bytes']:.3f}",
        f"{row['closeness']['kld_mean']:.4f}",
        *rates_in_words, " / ".join(f"{each['median']:.1f}x" for each in ratios.values()),
    ]  # fmt: skip


def expected() -> str:
    """Lay speeds that others published beside what is expected of ours with as many bits."""
    head = ["card", "model, one stream without drafts", "expected of ours", "quoted", "ratio", "of"]
    rows = []
    for quote in QUOTES:
        ours = _expected_of(quote)
        figures = map(float, quote.tokens.strip("~").split("-"))
        ratios = sorted({f"{ours / figure:.1f}" for figure in figures})
        settings = f"{quote.engine}, {quote.weights}; {quote.settings}; {quote.date}"
        rows.append(
            [
                quote.card, quote.model, f"{ours:,.0f}", quote.tokens, " to ".join(ratios),
                f"{settings}; [{quote.source}]({quote.address})",
            ]
        )  # fmt: skip
    return table(head, rows)


def _expected_of(quote: Quote) -> float:
    """Return the tokens/s expected with a quote's bits, after its context in BF16."""
    config = next(shape for name, shape in EXPECTED.items() if quote.model.startswith(name))
    source = synthetic_model(Path(), config, Schemes(), torch.device("cpu"))
    spec, (layers, ends) = source.spec, quote.bits
    shares = {
        index: one.mlp.router.top_k / one.mlp.router.num_experts
        for index, one in enumerate(spec.layers)
        if isinstance(one.mlp, ExpertsSpec)
    }
    read = 0.0
    for slot in source.slots():
        bits = layers if slot.is_linear else 32.0  # norms, filters and routers
        if slot.role in (Role.HEAD, Role.EMBEDDING):
            bits = ends if slot.role is Role.HEAD or spec.tied_head else 0.0
        share = 1.0 if slot.expert is None or slot.layer is None else shares[slot.layer]
        read += math.prod(slot.shape) * share * bits / 8
    for mixer, (heads, width) in zip(spec.cache_layers.values(), heads_of(spec), strict=True):
        window = getattr(mixer, "window", None) or quote.context
        read += 2 * 2 * heads * width * min(quote.context, window)
    read += 2 * spec.state_bytes
    seconds = read / (gpu_named(quote.card).bandwidth * 1e9)
    return expected_rate(TokenTime(seconds, 0.0, 0.0), spec)


def states() -> str:
    """Compare the precisions in which recurrent states are kept."""
    result = read("cpu/states.json")
    head = ["family", "fp16: mean KLD", "last quarter", "same top", "bf16: mean KLD", "same top"]
    rows = []
    for family, found in result["families"].items():
        fp16, bf16 = found["fp16"], found["bf16"]
        rows.append(
            [
                family,
                f"{fp16['kld_mean']:.2g}",
                f"{fp16['kld_mean_last_quarter']:.2g}",
                f"{fp16['same_top_1_percent']:.1f} %",
                f"{bf16['kld_mean']:.2g}",
                f"{bf16['same_top_1_percent']:.1f} %",
            ]
        )
    where = result["conditions"]
    about = f"{where['cpu']}, {where['time'][:10]}, commit {where['commit']}"
    return f"{table(head, rows)}\n{about}.\n"


MAKERS = {
    "states": states,
    "expected": expected,
    "peers": peers,
    "held-types": held_types,
    "quantize": quantize,
    "imports": imports,
    "published-schemas": published_schemas,
    "replicas": replicas,
    "instructions": instructions,
    "step-shares": step_shares,
    "widened-pages": lambda: table(*widened_pages()),
    "rounded-prompts": lambda: table(*int8_prompts()),
    "settings": settings_reference,
}


def filled(text: str) -> str:
    """Return a page with its generated parts made anew."""
    return PART.sub(lambda part: f"{part['name']} -->\n{MAKERS[part['name']]()}", text)


def stale_pages() -> dict[Path, str]:
    """Return the new text of each page that is out of date."""
    texts = {path: path.read_text() for path in sorted(DOCS.glob("*.md"))}
    return {path: wanted for path, text in texts.items() if (wanted := filled(text)) != text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    stale = stale_pages()
    if parser.parse_args().check:
        if stale:
            sys.exit(f"run scripts/docs: {', '.join(path.name for path in stale)}")
        return
    for path, wanted in stale.items():
        path.write_text(wanted)


if __name__ == "__main__":
    main()
