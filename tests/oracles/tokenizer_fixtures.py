"""Writes tests/fixtures/tokenizer/smollm2.json: texts and their token ids.

Ids come from Hugging Face `tokenizers`; a plain Python BPE that shares no code with it must agree on every text.
`plain` is given where reading special tokens as ordinary text makes a difference.
"""

import json
import pathlib
import random
import unicodedata

from gguf_model import PlainBpe, open_model, tokenizer

OUT = pathlib.Path(__file__).resolve().parents[1] / "fixtures/tokenizer/smollm2.json"
rnd = random.Random(20261130)

WRITTEN = [
    "", " ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "a", " a", "a ", "  a  ", "\u00a0", "\u2003x", "\u3000全角",
    "Hello, world!", "The quick brown fox jumps over the lazy dog.", "What is the capital of France?",
    "I'm you're they've we'll he'd it's don't 'S 'T I'M", "'''quotes'''", "don’t “smart” quotes — dash…",
    "0", "7", "42", "2024", "3.14159", "1,234,567.89", "0x1F", "1e-9", "+1 (555) 010-0199", "12345678901234567890",
    "²³½Ⅻ①٣४๓", "x1y22z333", "v1.2.3-rc4", "٠١٢٣٤٥٦٧٨٩",
    "def f(x):\n    return x ** 2\n\n\nprint(f(3))\n", "fn main() {\n\tprintln!(\"{}\", 1 + 1);\n}\n",
    "for (int i = 0; i < n; ++i) { a[i] = b[i] * c[i]; }", "SELECT * FROM t WHERE a = 'b' AND c <> 3;",
    "{\"a\": [1, 2, {\"b\": null}], \"c\": \"\\u00e9\"}", "<html><body class=\"x\">&nbsp;</body></html>",
    "```python\nimport os\n```", "| a | b |\n|---|---|\n| 1 | 2 |", "https://example.org/a/b?c=d&e=%20#f", "a@b.example",
    "C:\\path\\to\\file.txt", "$ ls -la | grep '\\.rs$' > out.txt 2>&1", "----------", "==========", "!!!???...", "((((((((", "\\\\\\\\",
    "    indented by four", "        indented by eight", "\tindented by tab", "\t\ttwo tabs", "trailing spaces   \nnext", "a\n\n\n\nb", "a \n b \n c", "a\u2028b\u2029c",
    "café", "cafe\u0301", "naïve façade", "Ångström", "Straße", "ŁÓDŹ", "İstanbul ıI", "ﬁ ligature ﬀ", "Ελληνικά κείμενο", "Привет, мир! Как дела?", "Українська мова", "Български",
    "שלום עולם", "مرحبا بالعالم", "فارسی می‌خواهم", "नमस्ते दुनिया", "বাংলা ভাষা", "தமிழ் மொழி", "తెలుగు", "ಕನ್ನಡ", "മലയാളം", "ไทยภาษาไทย", "ລາວ", "မြန်မာ", "ខ្មែរ", "ქართული", "Հայերեն", "አማርኛ", "ᏣᎳᎩ", "ᠮᠣᠩᠭᠣᠯ",
    "你好，世界！", "今天天气怎么样？", "繁體中文測試", "こんにちは世界", "カタカナとひらがな", "안녕하세요 세계", "한국어 텍스트 123", "𠮷野家", "東京2020オリンピック",
    "😀", "😀😁😂", "👍🏽", "👩‍💻", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇯🇵", "❤️", "1️⃣2️⃣", "🧑🏿‍🚀 to the 🌕!", "text👍text", "☃★♫", "𝓗𝓮𝓵𝓵𝓸", "𝟙𝟚𝟛", "🀄🂡", "∑∫√π≈∞≠", "€£¥₿¢", "←↑→↓⇒", "┌─┐│└┘", "█▓▒░",
    "\u200b", "zero\u200bwidth", "\ufeffbom", "a\u200db", "soft\u00adhyphen", "\u202eoverride", "e\u0301\u0323\u0308", "Z̸̛͎a̵l̶g̴o̷", "\x00", "\x01\x02\x7f", "a\x00b", "\x1b[31mred\x1b[0m", "\x85", "\ufffd", "\U0010ffff", "\ue000",
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>b", " <|im_end|> ", "<|im_end|><|im_end|>", "<|im_end", "|im_end|>", "<|im_end |>", "<|IM_END|>", "<file_sep>", "<repo_name>x/y<file_sep>z", "<empty_output>\n", "x<jupyter_code>1+1<jupyter_output>2", "< |im_start|>", "<<|im_start|>>", "<reponame>", "<repo_name",
    "supercalifragilisticexpialidocious", "antidisestablishmentarianism", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ababababababab", "AAAAaaaaAAAA", "xX" * 20, "camelCaseIdentifier", "snake_case_identifier", "SCREAMING_CASE", "kebab-case-name", "mixed123numbers456", "a1b2c3", "ThisIsAVeryLongIdentifierName42",
    " leading", "  two leading", "word  two  spaces", "word\ttab", "word \n newline", "...\n...", "a,b;c:d", "a , b", "Mr. Smith's dog's bone", "O'Neill's", "rock'n'roll", "'tis", "y'all'd've",
]

# Code point ranges to draw from, assigned in Unicode 14 so that no library's table is too old.
RANGES = [
    (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF), (0x900, 0x97F),
    (0xE00, 0xE7F), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x20A0, 0x20BF), (0x2100, 0x218F), (0x2190, 0x22FF), (0x2500, 0x27BF),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF00, 0xFFEF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF),
]
SNIPPETS = [" ", "  ", "\n", "\t", "\n\n", " \n", "<|im_end|>", "<|im_start|>", "\u200d", "\ufe0f", "12", "'s", "...", "\r\n"]


def random_text():
    out = []
    for _ in range(rnd.randint(1, 14)):
        if rnd.random() < 0.35:
            out.append(rnd.choice(SNIPPETS))
            continue
        low, high = rnd.choice(RANGES)
        for _ in range(rnd.randint(1, 6)):
            c = chr(rnd.randint(low, high))
            if unicodedata.category(c) not in ("Cn", "Cs"):
                out.append(c)
    return "".join(out)


reader = open_model()
special, plain = tokenizer(reader)
second = PlainBpe(reader)
texts = WRITTEN + [random_text() for _ in range(320 - len(WRITTEN))]
texts = list(dict.fromkeys(texts))
cases = []
for text in texts:
    ids = special.encode(text, add_special_tokens=False).ids
    ids_plain = plain.encode(text, add_special_tokens=False).ids
    assert ids == second.encode(text), (text, ids, second.encode(text))
    assert ids_plain == second.encode(text, specials=False), text
    assert special.decode(ids, skip_special_tokens=False) == text, text
    case = {"text": text, "ids": ids}
    if ids_plain != ids:
        case["plain"] = ids_plain
    cases.append(case)
OUT.parent.mkdir(parents=True, exist_ok=True)
lines = ",\n".join(json.dumps(c, ensure_ascii=True, separators=(",", ":")) for c in cases)
OUT.write_text("[\n" + lines + "\n]\n")
print(len(cases), "texts,", sum("plain" in c for c in cases), "with special tokens,", OUT.stat().st_size, "bytes")
