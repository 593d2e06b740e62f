"""Shared by the generators: opens a GGUF with the `gguf` package, and builds tokenizers and templates from its metadata.

The model file is argv[1], else $DS4_STARTER_MODEL.
"""

import os
import sys

import gguf
import jinja2
import jinja2.ext
import jinja2.sandbox
import json
import regex
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def open_model():
    path = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DS4_STARTER_MODEL")
    if not path:
        sys.exit(f"usage: {sys.argv[0]} SmolLM2-135M-Instruct.Q4_1.gguf (or set DS4_STARTER_MODEL)")
    return gguf.GGUFReader(path)


def field(reader, key):
    return reader.fields[key].contents()


def tokenizer(reader):
    """The byte-level BPE that the metadata describes, in Hugging Face `tokenizers`, as SmolLM2 publishes it."""
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in field(reader, "tokenizer.ggml.merges")]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tok.decoder = decoders.ByteLevel()
    plain = Tokenizer.from_str(tok.to_str())  # special tokens are ordinary text here
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == 3])
    return tok, plain


GPT2_SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_alphabet():
    """GPT-2's printable stand-in for each byte."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, n = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + n)
            n += 1
    return table


class PlainBpe:
    """The textbook algorithm, as a second opinion that shares no code with `tokenizers`."""

    def __init__(self, reader):
        self.vocab = {t: i for i, t in enumerate(field(reader, "tokenizer.ggml.tokens"))}
        self.rank = {tuple(m.split(" ")): i for i, m in enumerate(field(reader, "tokenizer.ggml.merges"))}
        self.alphabet = byte_alphabet()
        types = field(reader, "tokenizer.ggml.token_type")
        special = sorted((t for t, i in self.vocab.items() if types[i] == 3), key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")

    def word(self, text):
        parts = [self.alphabet[b] for b in text.encode()]
        while len(parts) > 1:
            best = min(zip(parts, parts[1:]), key=lambda p: self.rank.get(p, 1 << 60))
            if best not in self.rank:
                break
            merged, i = [], 0
            while i < len(parts):
                if tuple(parts[i:i + 2]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [self.vocab[p] for p in parts]

    def encode(self, text, specials=True):
        ids = []
        for piece in self.special.split(text) if specials else [text]:
            if specials and self.special.fullmatch(piece):
                ids.append(self.vocab[piece])
                continue
            for run in regex.findall(r"\p{N}|[^\p{N}]+", piece):
                for word in GPT2_SPLIT.findall(run):
                    ids += self.word(word)
        return ids


def template_environment():
    """Jinja as transformers sets it up for chat templates."""

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env
