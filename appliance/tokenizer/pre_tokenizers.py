"""Regular expressions that split words, known to take linear time.

An unknown expression can take hours on a short text. `word_rules` makes the rules of GGUF files of
the known ones; a tokenizer.json with others encodes in a process with limits, see `known_parts`.
"""

from __future__ import annotations

# Each as in the tokenizer.json of the model that it is named after, character for character.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
MINICPM5 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")
JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + (
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
    r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
SEED_CODER = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}"
    "| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+CONTRACTION"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*CONTRACTION"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = _CASED.replace("CONTRACTION", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
TEKKEN = _CASED.replace("CONTRACTION", "").replace(r"\p{N}{1,3}", r"\p{N}")
YOUTU = GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")
KIMI = r"[\p{Han}]+|" + GPT4O.replace(r"[\r\n/]*", r"[\r\n]*").replace(
    r"\p{Lo}\p{M}]", r"\p{Lo}\p{M}&&[^\p{Han}]]"
)
PHI4 = (  # GPT-4's
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
BAILING = PHI4.replace(r"\p{N}{1,3}", r"\p{N}")
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_DEEPSEEK_ALPHABETS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-"
    "\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-"
    "\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LETTERS = rf"\s?[{_DEEPSEEK_ALPHABETS}]+"
DEEPSEEK_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
DEEPSEEK_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK3_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{DEEPSEEK3_CHINESE}"
)
AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
CHAMELEON_IMAGES = ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z")
CHAMELEON_SPACE, CHAMELEON_SIGNS = r"([\t\n]|    |  )", r"[\p{P}!-/:-@\[-`{-~]"
TRIPLES, LINES = "[0-9][0-9][0-9]", r"[^\n]+|[\n]+"

# The models' own expressions for these two look ahead from every character, in quadratic time.
LAST_SPACE = r"(?<!\s)\s++$"
DIGITS_FROM_RIGHT = r"(?<!\d)\d{1,3}(?=(?:\d{3})*+(?!\d))|\d{3}"
# llama.cpp's, for files that name no rules.
UNNAMED_SIGNS = r"[\p{P}\$\+<=>\^~\|]+"

KNOWN_PATTERNS = frozenset(
    {
        GPT2, LLAMA3, QWEN2, QWEN35, MINICPM5, JAIS2, SEED_CODER, EXAONE_MOE, GPT4O, TEKKEN,
        YOUTU, KIMI, PHI4, BAILING, BLOOM, DEEPSEEK3, DEEPSEEK_LETTERS, DEEPSEEK_SIGNS,
        DEEPSEEK_CHINESE, DEEPSEEK3_CHINESE, YOUTU_SCRIPTS, AFMOE_SCRIPTS, *CHAMELEON_IMAGES,
        CHAMELEON_SPACE, CHAMELEON_SIGNS, TRIPLES, LINES, LAST_SPACE, DIGITS_FROM_RIGHT,
        UNNAMED_SIGNS, r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\s?\p{L}+", r"\s?\p{P}+", r"\d",
        r"(?:\r?\n)+(?!\r?\n)", "[\r\n]", r"[\r\n]", "[0-9]", " {2,}", r"\s+", "\n", r"\n", " ",
    }
)  # fmt: skip
