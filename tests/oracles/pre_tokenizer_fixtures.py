"""Writes tests/fixtures/tokenizer/pre_tokenizers.json: texts cut into words by the models' own regular expressions.

The expressions are those of the models' tokenizer files (and of llama.cpp for `default`), run by Python's `regex`.
"""

import json
import pathlib
import random
import unicodedata

import regex

OUT = pathlib.Path(__file__).resolve().parents[1] / "fixtures/tokenizer/pre_tokenizers.json"
rnd = random.Random(20261131)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
STAGES = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "llama-bpe": [CL100K % 3],
    "qwen2": [CL100K % 1],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]"],
}
STAGES = {name: [regex.compile(r) for r in stages] for name, stages in STAGES.items()}


def cut(name, text):
    pieces = [text]
    for stage in STAGES[name]:
        later = []
        for piece in pieces:
            at = 0
            for m in stage.finditer(piece):
                later += [piece[at:m.start()], m.group()]
                at = m.end()
            later.append(piece[at:])
        pieces = [p for p in later if p]
    return pieces


WRITTEN = [
    "", "Hello, world!", "I'm you're THEY'VE we'Ll he'd it'S don't", "'ſ 'sa ''s 's's", "12345 67 a1b22c333d4444", "x = foo(bar[1]);\n\n  return;\r\n",
    "   leading", "trailing   ", "a  b   c", "\n\n  \n x", " \t\n \r\n", "!!!\n\n\nx", "#include <stdio.h>", "$100 + 20% = ~120|^", "a_b.c-d/e\\f",
    "漢字かなカナ混じりtext", "中文，标点。English", "한국어 텍스트", "e\u0301e\u0301 \u0301x", "\u0301", "हिन्दी पाठ", "😀 👩‍💻!", "٣٤٥ ½²Ⅻ 𝟙𝟚𝟛",
    "\x00\x01a\x7f", "a\u200bb\u200dc", "\u3000x\u2003 y\xa0z\x85w", "\u2028p\u2029q", "'", "''", " '", "'\n", "...\r\n...", "\r\r\n\n\r",
]
RANGES = [
    (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0x09, 0x0D), (0x30, 0x39), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x4FF), (0x590, 0x6FF),
    (0x900, 0x97F), (0x2000, 0x206F), (0x2150, 0x218F), (0x2190, 0x22FF), (0x3000, 0x30FF), (0x4E00, 0x9FA5), (0x9FA6, 0x9FFF),
    (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF),
]
SNIPPETS = [" ", "  ", "   ", "\n", "\r\n", "\t", " \n", "'s", "'LL", "123", "4567", "...", "\u0301", "$", "a", "Bc"]


def random_text():
    out = []
    for _ in range(rnd.randint(1, 12)):
        if rnd.random() < 0.55:
            out.append(rnd.choice(SNIPPETS))
            continue
        low, high = rnd.choice(RANGES)
        # Assigned in Unicode 14, so that no library's table is too old: none of these ranges has gained letters since.
        out += [c for c in (chr(rnd.randint(low, high)) for _ in range(rnd.randint(1, 3))) if unicodedata.category(c) != "Cn"]
    return "".join(out)


texts = list(dict.fromkeys(WRITTEN + [random_text() for _ in range(300)]))
cases = [{"text": t, "pieces": {name: cut(name, t) for name in STAGES}} for t in texts]
assert all("".join(p) == c["text"] for c in cases for p in c["pieces"].values())
OUT.write_text("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")
print(len(cases), "texts,", OUT.stat().st_size, "bytes")
