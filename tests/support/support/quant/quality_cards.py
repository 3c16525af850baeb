"""Quality cards for tests, with invented figures."""

from __future__ import annotations

from appliance.quant.quality.card import (
    Alternative,
    Card,
    Comparison,
    Cost,
    Figure,
    Histogram,
    KindRow,
    KVRow,
    LayerError,
    ModelFacts,
    QuantizeFacts,
    TaskScore,
    TextFacts,
    ToolCalls,
)


def make_comparison(kld: float = 0.25, same_top: float = 80.0) -> Comparison:
    return Comparison(
        places=1000,
        perplexity=Figure(22.0, 1.0),
        base_perplexity=Figure(20.0, 1.0),
        perplexity_ratio=Figure(1.1, 0.01),
        kld_mean=Figure(kld, 0.01),
        kld_median=0.1,
        kld_p99=1.5,
        kld_p999=3.0,
        kld_max=6.0,
        same_top_percent=Figure(same_top, 0.5),
        mean_change_percent=Figure(-2.0, 0.1),
        rms_change_percent=Figure(9.0, 0.2),
    )


def make_card(
    kld: float = 0.25, same_top: float = 80.0, name: str = "tiny-W4", fingerprint: str = "f"
) -> Card:
    """Make a card with every part."""
    return Card(
        created="2026-01-02T03:04:05+00:00",
        version="0",
        model=ModelFacts(
            name,
            "llama",
            "4 bits (groups of 64)",
            1000,
            800,
            600,
            330,
            fingerprint,
            ("appliance", "vLLM"),
        ),
        base=ModelFacts("tiny <16>", "llama", "bf16", 1000, 2000, 600, 1200),
        text=TextFacts("some | text", "0123456789abcdef", 8, 512, 512),
        perplexity=Figure(22.0, 1.0),
        comparison=make_comparison(kld, same_top),
        histogram=Histogram((-3.0, -2.0, -1.0, 0.0, 1.0), (0, 10, 600, 390)),
        layers=(LayerError(0.1, 0.2, 0.15), LayerError(0.2, 0.1, 0.3)),
        kv=(
            KVRow("int8", 1000.0, 8.25, make_comparison(0.001, 99.0)),
            KVRow("int4", 600.0, 5.0, make_comparison(0.06, 86.0), declared=True),
        ),
        alternatives=(Alternative("rounding & more", 6.4, 0.4, 70.0, 25.0),),
        quantize=QuantizeFacts(
            "gptq", "4 bits", "8 rows", "fedcba", 12.0, 1 << 30, 0, {"a": 0.5}, ("re-quantized",)
        ),
        cost=Cost(10.0, 20.0, 1 << 29, 0, "cpu"),
        tasks=(TaskScore("arc", "acc", 0.5, 0.1, 20), TaskScore("b", "f1", 1.0, None, 0)),
        notes=("measured on <little>",),
        kinds=(
            KindRow("prose", 5, make_comparison(0.2, 82.0)),
            KindRow("tool calls", 10, make_comparison(0.02, 97.0)),
        ),
        calls=ToolCalls(10, True, 8, 7, 6),
    )
