r"""Measure how long a CPU encodes a picture, by tower and size, beside llama.cpp on the same file.

    scripts/benchmark pictures                                  # ours alone
    scripts/benchmark pictures --peer /path/to/mtmd_encode --threads 2
    scripts/benchmark pictures --isas amx avx512                # instruction sets in turns
    scripts/benchmark pictures --only --turns --streams         # with a server

Towers have published widths and random weights of 16 bits, in one projector file that both read.
The peer is `scripts/bench/cpu/mtmd_encode.cpp`, built against llama.cpp:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON && cmake --build build -t mtmd
    g++ -O2 -std=c++17 -Itools/mtmd -Iinclude -Iggml/include -Icommon mtmd_encode.cpp \
        -Lbuild/bin -lmtmd -lllama -lggml -lggml-base -lggml-cpu -Wl,-rpath,build/bin

All run in turns; `ratio` is the peer's median seconds over ours with the first instruction set.
Ours include cutting the pixels into patches. `--turns` times the first token of a second question
about a picture beside one about a text of equal length; `--streams` the tokens of other streams
while pictures are encoded; see `picture_turns`.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from support.gguf.projector_files import as_published, f16, write_projector
from support.models.towers import TOWER_CASES, text_of, with_tower

from appliance.engine.nouns.picture import CanvasPixels
from appliance.engine.run.picture_encoder import PictureEncoder
from appliance.gguf import GGUFFile
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library, select_isa
from appliance.media.mmproj import image_processor_of_mmproj
from appliance.media.sizing import Canvas
from appliance.model.vision.source import tower_of
from appliance.model.vision.tower import load_native_tower
from bench.engine.picture_turns import SIDES, measure_streams, measure_turns
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"longest_edge": 2048}}
_QWEN = {"num_position_embeddings": 2304, "patch_size": 16}


@dataclass(frozen=True, slots=True)
class Shape:
    """A published tower.

    Attributes:
        case: of `TOWER_CASES`, whose layout it has.
        sides: of square pictures, in pixels.
    """

    case: str
    vision: dict[str, Any]
    sides: tuple[int, ...]
    whole: dict[str, Any]


SHAPES = {
    "SmolVLM-256M": Shape(
        "smolvlm",
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
         "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
        (512,),
        {"scale_factor": 4},
    ),
    "Qwen3.5-0.8B": Shape(
        "qwen3_5",
        _QWEN | {"hidden_size": 768, "intermediate_size": 3072, "depth": 12, "num_heads": 12},
        (512, 1024),
        {},
    ),
    "Qwen3-VL-4B": Shape(
        "qwen3_vl",
        _QWEN
        | {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16,
           "deepstack_visual_indexes": [5, 11, 17]},
        (512,),
        {},
    ),
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peer", type=Path, help="the program of llama.cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--isas", nargs="+", default=["auto"], help="instruction sets of ours")
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--turns", action="store_true", help="questions about a known picture")
    parser.add_argument("--streams", action="store_true", help="streams beside pictures")
    parser.add_argument("--megapixels", type=int, nargs="+", default=[1, 2, 4], choices=[*SIDES])
    options = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "pictures",
        "conditions": conditions(),
        "threads": options.threads,
        "towers": [],
    }
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            result["towers"] += _measured(name, Path(folder), options)
    if options.turns:
        result["turns"] = measure_turns(options.threads, options.runs, options.megapixels)
    if options.streams:
        result["streams"] = measure_streams(options.threads, options.runs, options.megapixels)
    write_result(options.out, result)


def _measured(name: str, folder: Path, options: Any) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    case = as_published(TOWER_CASES[shape.case])
    case = replace(case, vision=case.vision | shape.vision, whole=case.whole | shape.whole)
    model = with_tower(case)
    model.save_pretrained(folder)
    file = write_projector(folder / "mmproj.gguf", model, HALF, f16)
    source = tower_of(text_of(folder, case.kind), file, in_torch=False)
    assert source is not None
    library = load_library()
    tower = load_native_tower(
        source, NativeEngine(library, options.threads), "bfloat16", lambda *_: None
    )
    encoder = PictureEncoder(tower, image_processor_of_mmproj(GGUFFile(file).metadata))
    found = []
    for side in shape.sides:
        picture = _picture(side, tower.spec.patch.size * tower.spec.merge)
        ours: dict[str, list[float]] = {}
        peers: list[float] = []
        encoder(picture)
        for _ in range(options.runs):
            for isa in options.isas:
                name_of_isa = select_isa(library, isa).name.lower()
                begin = time.perf_counter()
                encoder(picture)
                ours.setdefault(name_of_isa, []).append(time.perf_counter() - begin)
            if options.peer is not None:
                command = [options.peer, file, side, side, options.threads, 1]
                lines = subprocess.run(
                    list(map(str, command)), capture_output=True, text=True, check=True
                ).stdout
                peers += map(float, lines.split())
        medians = {isa: statistics.median(seconds) for isa, seconds in ours.items()}
        one: dict[str, Any] = {
            "tower": name,
            "pixels": side,
            "seconds": {isa: round(median, 4) for isa, median in medians.items()},
        }
        if peers:
            one["peer_seconds"] = round(statistics.median(peers), 4)
            one["ratio"] = round(statistics.median(peers) / next(iter(medians.values())), 2)
        found.append(one)
    return found


def _picture(side: int, cell: int) -> CanvasPixels:
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8).tobytes()
    return CanvasPixels(b"", Canvas(((side, side),)), pixels, (side // cell, side // cell))


if __name__ == "__main__":
    main()
