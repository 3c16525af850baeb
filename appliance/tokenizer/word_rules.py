"""Rules that split words in GGUF files, by the name that llama.cpp's converter writes.

The rules are those of the model's own tokenizer.json where it is known, else llama.cpp's; the two
differ on few texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Split

from appliance.tokenizer import pre_tokenizers as known

UNNAMED = "default"  # llama.cpp's name for the rules of a file that names none


@dataclass(frozen=True, slots=True)
class WordRules:
    """Rules that prepare text for byte-pair merges.

    Attributes:
        pre_tokenizer: makes the splitter.
        ignore_merges: keep a word whole if the vocabulary has it.
        add_bos: a prompt begins with BOS unless the file says otherwise.
        add_sep: a prompt ends with SEP unless the file says otherwise.
        normalizer: makes the normalizer, if there is one.
    """

    pre_tokenizer: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False
    normalizer: Callable[[], normalizers.Normalizer] | None = None


def _in_turn(*steps: PreTokenizer | str, by_gpt2: bool = False) -> Callable[[], PreTokenizer]:
    """Split by one step after the other, then by GPT-2's rules if wanted; write bytes."""

    def make() -> PreTokenizer:
        splits = [
            Split(Regex(step), behavior="isolated") if isinstance(step, str) else step
            for step in steps
        ]
        in_bytes = ByteLevel(add_prefix_space=False, use_regex=by_gpt2)
        return pre_tokenizers.Sequence([*splits, in_bytes]) if splits else in_bytes

    return make


def _falcon() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            Punctuation("contiguous"),
            ByteLevel(add_prefix_space=False, use_regex=True),
            Digits(individual_digits=False),
            Split(Regex(known.TRIPLES), behavior="isolated"),
        ]
    )


_DIGIT = Digits(individual_digits=True)
_GPT2 = _in_turn(by_gpt2=True)
_SINGLE_DIGITS = _in_turn(_DIGIT, by_gpt2=True)
_BLOOM = _in_turn(known.BLOOM)
_DEEPSEEK3 = _in_turn(r"\p{N}{1,3}", known.DEEPSEEK3_CHINESE, known.DEEPSEEK3)
_TINY_AYA = _in_turn(known.DIGITS_FROM_RIGHT, known.GPT4O)

# Names with the same rules. The converter prefers the first one.
_RULES: dict[Sequence[str], WordRules] = {
    (
        "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat",
        "a.x-4.0", "mellum", "modern-bert", "exaone4", "jais", "trillion", "granite-docling",
    ): WordRules(_GPT2),
    ("jina-v1-en", "jina-v2-code", "roberta-bpe"): WordRules(_GPT2, add_sep=True),
    ("olmo", "mpt"): WordRules(_GPT2, normalizer=normalizers.NFC),  # GPT-NeoX's
    (
        "smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2",
    ): WordRules(_SINGLE_DIGITS),
    ("command-r",): WordRules(_SINGLE_DIGITS, normalizer=normalizers.NFC),
    (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
        "lfm2", "jina-v5-nano",
    ): WordRules(_in_turn(known.LLAMA3), ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): WordRules(_in_turn(known.LLAMA3)),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"): WordRules(
        _in_turn(known.QWEN2), normalizer=normalizers.NFC
    ),
    ("stablelm2", "hunyuan", "solar-open", "grok-2"): WordRules(_in_turn(known.QWEN2)),
    ("qwen35",): WordRules(_in_turn(known.QWEN35), normalizer=normalizers.NFC),
    ("laguna",): WordRules(_in_turn(known.LINES, known.QWEN2)),
    ("jais-2",): WordRules(_in_turn(known.JAIS2)),
    ("minicpm5",): WordRules(_in_turn(r"\p{N}{1,3}", known.MINICPM5), ignore_merges=True),
    ("seed-coder",): WordRules(_in_turn(known.SEED_CODER)),
    ("exaone-moe",): WordRules(_in_turn(known.EXAONE_MOE)),
    ("tekken",): WordRules(_in_turn(known.TEKKEN), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): WordRules(_in_turn(known.GPT4O)),
    ("granite-embed-multi-97m",): WordRules(_in_turn(known.GPT4O), ignore_merges=True),
    ("tiny_aya", "cohere2moe"): WordRules(_TINY_AYA),
    ("youtu",): WordRules(_in_turn(known.YOUTU_SCRIPTS, known.YOUTU), ignore_merges=True),
    ("kimi-k2",): WordRules(_in_turn(known.KIMI)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): WordRules(_in_turn(known.BAILING)),
    ("bloom", "gpt3-finnish", "poro-chat"): WordRules(_BLOOM),
    ("viking",): WordRules(_in_turn(known.BLOOM, r"\p{N}")),
    ("falcon",): WordRules(_falcon),
    ("deepseek-llm",): WordRules(
        _in_turn(
            "[\r\n]",
            known.DEEPSEEK_LETTERS,
            known.DEEPSEEK_SIGNS,
            known.LAST_SPACE,
            known.DEEPSEEK_CHINESE,
            _DIGIT,
        )
    ),
    ("deepseek-coder",): WordRules(
        _in_turn("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", known.DEEPSEEK_CHINESE, _DIGIT)
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): WordRules(_DEEPSEEK3),
    ("afmoe",): WordRules(_in_turn(known.DIGITS_FROM_RIGHT, known.AFMOE_SCRIPTS, known.DEEPSEEK3)),
    ("superbpe",): WordRules(_in_turn(r"\p{N}+", known.DIGITS_FROM_RIGHT)),
    ("chameleon",): WordRules(
        _in_turn(
            *known.CHAMELEON_IMAGES,
            known.CHAMELEON_SPACE,
            _DIGIT,
            known.CHAMELEON_SIGNS,
            by_gpt2=True,
        ),
        add_bos=True,
    ),
    (UNNAMED,): WordRules(_in_turn(known.UNNAMED_SIGNS, known.GPT2, r"\p{N}+", known.TRIPLES)),
}  # fmt: skip

WORD_RULES: dict[str, WordRules] = {
    name: rules for names, rules in _RULES.items() for name in names
}

_BEGIN, _END = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)

# Control tokens by id, which tell a vocabulary whose file names no rules.
_MARKS: tuple[tuple[str, dict[int, str]], ...] = (
    ("llama-bpe", {128000: "<|begin_of_text|>", 128009: "<|eot_id|>"}),
    ("llama-bpe", {128000: _BEGIN, 128001: _END}),  # DeepSeek-R1-Distill-Llama
    ("qwen2", {151643: "<|endoftext|>", 151644: "<|im_start|>"}),
    ("deepseek-r1-qwen", {151643: _END, 151646: _BEGIN}),
    ("qwen35", {248044: "<|endoftext|>", 248045: "<|im_start|>"}),
    ("deepseek-llm", {100000: _BEGIN, 100001: _END}),
    ("deepseek-coder", {32013: _BEGIN, 32014: _END}),
    ("deepseek-v3", {0: _BEGIN, 1: _END, 128803: "<\uff5cUser\uff5c>"}),
    ("falcon", {0: ">>TITLE<<", 11: "<|endoftext|>"}),
    ("tekken", {1: "<s>", 3: "[INST]", 5: "[AVAILABLE_TOOLS]"}),
    ("command-r", {5: "<BOS_TOKEN>", 255001: "<|END_OF_TURN_TOKEN|>"}),
    ("glm4", {151329: "<|endoftext|>", 151331: "[gMASK]"}),
    ("gpt-4o", {199999: "<|endoftext|>"}),
    ("starcoder", {0: "<|endoftext|>", 1: "<fim_prefix>", 4: "<fim_pad>"}),
    ("refact", {0: "<|end_of_text|>", 1: "<fim_prefix>", 4: "<fim_pad>"}),  # Granite's code models
    ("smollm", {0: "<|endoftext|>", 1: "<|im_start|>", 3: "<repo_name>"}),
    ("olmo", {0: "<|endoftext|>", 1: "<|padding|>"}),  # GPT-NeoX
    ("gpt-2", {50256: "<|endoftext|>"}),
)


def recovered_name(tokens: Sequence[str]) -> str | None:
    """Return the name of the rules of a well-known vocabulary."""
    for name, marks in _MARKS:
        if all(at < len(tokens) and tokens[at] == text for at, text in marks.items()):
            return name
    return None
