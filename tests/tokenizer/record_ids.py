"""Record transformers' ids of some texts, for test_real_models.py to compare with.

    python tests/tokenizer/record_ids.py MODELS_DIR > tests/tokenizer/recorded_ids.json

MODELS_DIR holds the two GGUF files of the tests. transformers' conversion of a GGUF tokenizer does
not know the word rules named `smollm` and falls back to GPT-2's, which differ where several spaces
stand before a digit; so the rules that the model was trained with (each digit by itself, then
GPT-2's) are put in by hand.
"""

from __future__ import annotations

import json
import sys

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoTokenizer

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
}

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and   inner  spaces and trailing ones   ",
    "tabs\there\t\tand\t\t\tthere\n\n\nnew\r\nlines\n",
    "The year 2024, pi = 3.14159, 1/2, 1,000,000 and   42.",
    "x²+½ ٣٤ Ⅷ",
    "I'll say we're sure they don't; IT'S he'd 've",
    "CamelCase snake_case kebab-case SHOUTING",
    "def area(r: float) -> float:\n    # a circle\n\treturn 3.14 * r ** 2  # ok\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] >> 2; }",
    '{"key": ["value", null, 1e-9], "ключ": "значение"}',
    "<html><body><p class='x'>&amp; text</p></body></html>",
    "https://example.org/path?q=1&b=%20#frag user@example.org C:\\dir\\file",
    "日本語のテキストと漢字。中文文本，标点符号！한국어 문장입니다.",  # noqa: RUF001
    "Привет, мир! Ελληνικά, עברית, العربية, हिन्दी, ไทย",
    "naïve café Ångström ß ﬁ æ œ e\u0301 n\u0303",
    "🙂👍🏽 family 👩‍👩‍👧‍👦 flags 🇫🇷🏳️‍🌈 ☃ ♥︎",
    "zero\u200bwidth nbsp\u00a0here \u2028 line sep \ufeff bom",
    "control \u0001\u0007\u007f bytes",
    "a" * 100 + " " * 30 + "\n" * 20 + "=" * 50,
    "▁ looks like a space mark, <0x0A> like a byte, Ġ like another",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<eos><unused3>",
    "text<|im_end|>  spaced  <end_of_turn>  text",
]

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word.\n"},
        {"role": "user", "content": "  2 + 2 = ?  "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "日本語で 🙂\n\n\tdef f(): pass"},
    ],
    [{"role": "user", "content": ""}],
]


def main() -> None:
    recorded = {}
    for model, file in MODELS.items():
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=file)
        if model == "smollm2":
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
                [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
            )
        recorded[model] = {
            "texts": [
                [
                    text,
                    tokenizer(text, add_special_tokens=True)["input_ids"],
                    tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
                        "input_ids"
                    ],
                ]
                for text in TEXTS
            ],
            "chats": [
                [chat, tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]]
                for chat in CHATS
                if tokenizer.chat_template
            ],
        }
    json.dump(recorded, sys.stdout, ensure_ascii=True, separators=(",", ":"))


if __name__ == "__main__":
    main()
