"""Writes tests/fixtures/smollm2/: logits and greedy continuations of eight prompts on the starter model.

`logits.json` has per prompt its text, token ids, 64 greedy tokens, the lead of each over the runner-up, top-64 logits at
some positions inside the prompt and the errors that int8 or int16 activations and f16 K/V cause by themselves (see
llama_reference.py), which is what the tests' bounds are derived from. `last.f32` has the full logits of every prompt's last
position, little-endian f32, prompts in order.

Each prompt is the best of its kind's candidates: the one whose smallest lead is largest, so that a correct engine has no
excuse for another token. A continuation that reaches end of turn is no candidate.
"""

import json
import pathlib

import numpy as np
import torch

import llama_reference as ref
from gguf_model import PlainBpe, field, open_model, template_environment, tokenizer

OUT = pathlib.Path(__file__).resolve().parents[1] / "fixtures/smollm2"
STEPS, SEEN = 64, 64

STORY = (
    "The lighthouse stood at the end of a long spit of sand, and every evening at dusk the keeper climbed its one hundred "
    "and twelve steps with a can of oil in one hand and a book in the other. He had done so for thirty years. The sea had "
    "taken two boats from the village in that time, both of them on nights when the fog was so thick that no light could "
    "have helped, and still he thought of those nights whenever the wind dropped. On the first day of October a girl came "
    "along the sand with a suitcase. She said that she was to be his assistant, that the harbour office had sent her, and "
    "that she could already tell a ketch from a yawl at three miles. He looked at her shoes, which were wet, and at her "
    "suitcase, which was tied with string, and he put the kettle on. "
)

TOPICS = ["water", "bicycles", "the moon", "bread", "trees", "the heart", "rivers", "glass", "bees", "rain", "iron", "salt", "the sun", "music",
          "paper", "clocks", "volcanoes", "horses", "electricity", "gravity", "cells", "maps", "coffee", "bridges"]
ASKS = ["Explain {} to a child.", "List ten facts about {}.", "Write a short story about {}.", "What are the benefits of {}?",
        "Describe the history of {}.", "How would you introduce {} in a lecture?", "Write an essay about {}."]
CHORES = ["Repeat this sentence ten times: My {} and I like the sea, but not on Mondays when it rains in the old town.","Write the word \"{}\" thirty times, separated by commas.", "Write a Python function called {} and show how to call it.", "Make a table about {} with three columns."]
NAMES = ["add", "square", "count", "find_max", "reverse", "is_even", "merge", "total", "average", "swap", "insert", "remove", "contains", "parse"]
EMOJI = ["😀😁😂🤣😃", "👩‍💻👨‍👩‍👧", "❤️🧡💛💚💙💜", "🇫🇷🇯🇵🇩🇪🇮🇹", "你好，世界！", "こんにちは、", "Привет, мир! ", "안녕하세요 ", "一二三四五六七八九十", "αβγδεζηθ ", "مرحبا ", "🍎🍌🍇"]
WORDS = ["red", "north", "salt", "cat", "one", "Paris", "Anna", "wood", "left", "day"]


CANDIDATES = {
    "chat": (24, [("chat", a.format(t)) for a in ASKS[:4] for t in TOPICS[:14]] + [("chat", f.format(t)) for t in NAMES for f in CHORES]),
    "code": (20, list(("text", f.format(n)) for n in NAMES for f in [
        "def {0}(items):\n    \"\"\"", "fn {0}(a: &[i32]) -> i32 {{\n", "#include <stdio.h>\n\nint {0}(int *a, int n) {{\n    int i;\n    for (i = 0; i < n; i++) {{\n",
        "class Node:\n    def __init__(self, value):\n        self.value = value\n\n    def {0}(self):\n",
        "def {0}(a, b):\n    return a + b\n\nprint({0}(1, 2))\nprint({0}(2, 3))\n", "function {0}(list) {{\n  let result = [];\n",
    ])),
    "unicode": (8, [("text", f.format(e, o)) for k in (1, 5) for e, o in zip(EMOJI, EMOJI[k:] + EMOJI[:k]) for f in ["{0}{1}{0}{1}{0}{1}", "{0} {1}\n{0} {1}\n{0} {1}\n", "{0}: {1}\n{0}:"]]),
    "short": (20, [("text", t) for t in ["The", "1", "Once upon a time", "A B C", "Hello", "In the beginning", "#", "To be, or not", "import", "Monday, Tuesday,",
              "Dear", "##", "Question:", "(a)", "I.", "Step 1:", "<html>", "Name:", "Chapter 1", "Abstract", "Table 1", "x =", "1.", "a, b, c", "***", "Q:", "Title:", "0 1", "1, 2, 3"]]),
    "long": (40, list([("text", STORY + "\n\n" + STORY), ("text", STORY + "\n\n" + STORY[:200])]
            + [("chat", f.format(STORY)) for f in ["Repeat this story word for word:\n\n{}", "Copy the following text:\n\n{}", "{}\n\nRepeat the text above exactly."]]
            + [("text", STORY + f"Then he spoke of {t}. " + STORY + f"Then he spoke of {t}.") for t in TOPICS])),
    "numbers": (8, list([("text", " ".join(str(k) for k in range(a, a + n * b, b))) for a in range(1, 60, 14) for b in (1, 2, 3, 5, 10) for n in (9, 14)]
            + [("text", "".join(f"{k} x {a} = {k * a}\n" for k in range(1, 5))) for a in range(2, 12)])),
    "system": (24, list(("system", s, a.format(t)) for s in ["You are a pirate. Answer in pirate speech.", "You always answer in numbered lists.", "You are a strict teacher. You answer with one fact per line."]
            for a in ASKS[:4] for t in TOPICS[:8])),
    "list": (8, list(("text", f.format(w)) for w in WORDS + TOPICS[:8] for f in [
        "{0} 1\n{0} 2\n{0} 3\n{0} 4\n", "| n | {0} |\n|---|-----|\n| 1 | 1 |\n| 2 | 4 |\n| 3 | 9 |\n", "{{\"id\": 1, \"name\": \"{0}\"}},\n{{\"id\": 2, \"name\": \"{0}\"}},\n{{\"id\": 3,",
        "The first is {0}.\nThe second is {0}.\nThe third is"])),
}
FLOOR, BATCH = 0.12, 48


reader = open_model()
tok, _ = tokenizer(reader)
second = PlainBpe(reader)
template = template_environment().from_string(field(reader, "tokenizer.chat_template"))
stop = {0, field(reader, "tokenizer.ggml.eos_token_id")}


def text_of(candidate):
    kind, *parts = candidate
    if kind == "text":
        return parts[0]
    messages = [{"role": "system", "content": parts[0]}] if kind == "system" else []
    return template.render(messages=[*messages, {"role": "user", "content": parts[-1]}], add_generation_prompt=True)


def error_along(model, ids, tokens, want, draws):
    """Emulated errors over several draws: at the prompt's last position, anywhere, and of a lead in the continuation."""
    everything = [*ids, *tokens[:-1]]
    last, anywhere, leads = [], [], []
    for levels in draws:
        with ref.rounding(model, levels):
            got = ref.logits(model, everything)
        for row, t in enumerate(tokens, len(ids) - 1):
            runner_up = int(want[row].topk(2).indices[1])
            leads.append(abs(float((got[row, t] - got[row, runner_up]) - (want[row, t] - want[row, runner_up]))))
        anywhere += [ref.errors(g, w) for g, w in zip(got, want)]
        last.append(anywhere[len(ids) - 1 - len(everything)])
    return {
        "last_rel": max(e["rel"] for e in last),
        "last_max_abs": max(e["max_abs"] for e in last),
        "rel_median": float(np.median([e["rel"] for e in anywhere])),
        "rel_worst": max(e["rel"] for e in anywhere),
        "max_abs_worst": max(e["max_abs"] for e in anywhere),
        "lead_change_worst": max(leads),
    }


def robust(model, ids, tokens, draws):
    """True when rounding alone, in any draw, leaves the continuation as it is."""
    for levels in draws:
        with ref.rounding(model, levels):
            if ref.greedy(model, ids, STEPS)[0] != tokens:
                return False
    return True


def best_of(model, candidates, distinct):
    """Of the candidates that are varied enough, the one with the largest smallest lead; among the best few, one that even
    int8 rounding leaves alone goes first."""
    texts = [text_of(c) for c in candidates]
    prompts = [tok.encode(t, add_special_tokens=False).ids for t in texts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # little padding
    found = {}
    for at in range(0, len(order), BATCH):
        batch = order[at:at + BATCH]
        for i, result in ref.screen(model, [prompts[i] for i in batch], STEPS, FLOOR, stop).items():
            found[batch[i]] = result
    first = None
    for i in sorted((i for i in found if found[i][1] >= distinct), key=lambda i: -found[i][0])[:4]:
        text, ids = texts[i], prompts[i]
        assert ids == second.encode(text)
        tokens, margins = ref.greedy(model, ids, STEPS)
        steady = robust(model, ids, tokens, ref.INT8)
        print("   ", len(ids), found[i], f"{min(margins):.3f}", steady, repr(tok.decode(tokens)[:110]), flush=True)
        if steady or not first:
            first = (text, ids, tokens, margins, steady)
        if steady:
            break
    if not first:
        raise SystemExit(f"no candidate is good enough, {sorted(found.values())}: add candidates")
    return first


model = ref.load(reader)
OUT.mkdir(parents=True, exist_ok=True)
prompts, last = [], []
for name, (distinct, candidates) in CANDIDATES.items():
    print(name, len(candidates), flush=True)
    text, ids, tokens, margins, steady = best_of(model, candidates, distinct)
    want = ref.logits(model, [*ids, *tokens[:-1]])
    error = {"int8_error": error_along(model, ids, tokens, want, ref.INT8), "int16_error": error_along(model, ids, tokens, want, ref.INT16)}
    assert robust(model, ids, tokens, ref.INT16) and min(margins) > error["int16_error"]["lead_change_worst"], "too close to call"
    one_shot = [int(t) for t in want[len(ids) - 1:].argmax(-1)]
    assert one_shot == tokens, "the reference's cached and uncached runs differ"
    inside = sorted({len(ids) * k // 4 for k in range(4)} - {len(ids) - 1}) or [0]
    last.append(want[len(ids) - 1].numpy().astype("<f4"))
    prompts.append({
        "name": name, "text": text, "tokens": ids, "greedy": tokens, "greedy_text": tok.decode(tokens, skip_special_tokens=False),
        "margins": [round(m, 4) for m in margins], "min_margin": round(min(margins), 4), "same_under_int8": steady, **error,
        "inside": {str(i): [[int(j), float(f"{v:.7g}")] for v, j in zip(*(x.tolist() for x in want[i].topk(SEEN)))] for i in inside},
    })
    print("  chose", repr(text[-60:]), "margin", min(margins), error, flush=True)

head = {
    "model": "SmolLM2-135M-Instruct.Q4_1.gguf", "made_by": "tests/oracles/smollm2_logits.py",
    "torch": torch.__version__, "vocab": last[0].size, "last_logits": "last.f32", "prompts": prompts,
}
(OUT / "logits.json").write_text(json.dumps(head, separators=(",", ":")).replace(',{"name"', ',\n{"name"') + "\n")
(OUT / "last.f32").write_bytes(b"".join(r.tobytes() for r in last))
print([(p["name"], p["min_margin"], p["int8_error"]["lead_change_worst"], p["int16_error"]["lead_change_worst"]) for p in prompts])
