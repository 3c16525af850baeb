"""Record small SentencePiece models with the ids that SentencePiece gives.

    pip install --target FOLDER sentencepiece
    PYTHONPATH=FOLDER python tests/tokenizer/record_pieces.py

Writes recorded_pieces.json beside this, which test_older_files.py reads.
"""

from __future__ import annotations

import base64
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "sings",
    "of",
    "100",
    "small",
    "cats",
    "in",
    "den",
    "wald",
    "中文",
    "été",
]
ATOMS = ["the", " ", "  ", "qu", "fox", "\n", "\t", "1", "23", "中", "é", "🙂", "ﬁ", "x", "[tool]"]
KINDS: dict[str, dict[str, Any]] = {
    # Made like Llama's and Gemma's, and with SentencePiece's own defaults except for few rules.
    "llama": {"remove_extra_whitespaces": False, "split_digits": True},
    "gemma": {
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["[tool]", "\u2581\u2581"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
    },
    "with rules": {"normalization_rule_tsv": "rules.tsv"},
}


def record(folder: Path) -> dict[str, Any]:
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=12)) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines))
    (folder / "rules.tsv").write_text("FB01\t66 69\n9\t20\n")
    texts = ["", " the  fox ", "\n the"]
    texts += ["".join(rng.choices(ATOMS, k=rng.randint(1, 8))) for _ in range(40)]
    found: dict[str, Any] = {"texts": texts, "models": {}}
    for name, options in KINDS.items():
        rules = options.pop("normalization_rule_tsv", None)
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text.txt"),
            model_prefix=str(folder / "model"),
            vocab_size=380,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=1.0,
            minloglevel=2,
            **({"normalization_rule_tsv": str(folder / rules)} if rules else {}),
            **({} if rules else {"normalization_rule_name": "identity"}),
            **options,
        )
        model = (folder / "model.model").read_bytes()
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        found["models"][name] = {
            "model": base64.b64encode(model).decode(),
            "bos": processor.bos_id(),
            "eos": processor.eos_id(),
            "ids": processor.encode(texts),
        }
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        recorded = record(Path(made))
    target = Path(__file__).parent / "recorded_pieces.json"
    target.write_text(json.dumps(recorded, ensure_ascii=False) + "\n")
