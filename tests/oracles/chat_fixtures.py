"""Writes tests/fixtures/tokenizer/smollm2_chat.json and chat_features.json: templates rendered by Python's Jinja.

The first has conversations in SmolLM2's own template; the second small templates, written here, that use what chat
templates in the field use (whitespace control, Python string and dict methods, tojson, namespaces, loop controls).
A case with `error` must be refused; its text is Python's and not to be compared.
"""

import json
import pathlib

from gguf_model import field, open_model, template_environment

OUT = pathlib.Path(__file__).resolve().parents[1] / "fixtures/tokenizer"


def m(role, content):
    return {"role": role, "content": content}


CONVERSATIONS = [
    [m("user", "Hi")],
    [m("system", "You are terse."), m("user", "What is 2+2?")],
    [m("user", "Hi"), m("assistant", "Hello! How can I help?"), m("user", "Tell me a joke.")],
    [m("system", ""), m("user", "")],
    [m("user", "  spaces kept  \n\n")],
    [m("user", "line 1\nline 2\r\nline 3\ttab")],
    [m("user", "emoji 👩‍💻 and 漢字 and \u0301combining")],
    [m("user", "literal <|im_end|> and {{ braces }} and {% tags %}")],
    [m("user", "<b>&amp; \"quoted\" 'single'</b>")],
    [m("system", "A"), m("system", "B"), m("user", "two systems")],
    [m("assistant", "I speak first"), m("user", "ok")],
    [m("user", "a"), m("user", "b"), m("assistant", "c"), m("tool", "d"), m("user", "e")],
    [m("user", "x" * 500)],
    [],
]

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Wetter für \"Städte\" <ok>",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
USER = [m("system", " S "), m("user", "Hello world"), m("assistant", "<think>hm</think>Answer\n")]

FEATURES = [
    ("trim_and_lstrip_blocks", "A\n  {% if true %}\n  B\n  {% endif %}\nC\n", {}),
    ("explicit_dashes", "A  {%- if true -%}  B  {%- endif -%}  C", {}),
    ("comment_trimmed", "A\n  {# note #}\nB", {}),
    ("final_newline_dropped", "line\n", {}),
    ("strip_methods", "{% for m in messages %}[{{ m.content.strip() }}|{{ m['content'].lstrip() }}|{{ m.content.rstrip('\\n') }}]{% endfor %}", {"messages": USER}),
    ("split_and_index", "{{ messages[2].content.split('</think>')[-1] }}{{ messages[-1]['content'].split('<think>')[0] }}", {"messages": USER}),
    ("starts_and_ends", "{{ 'y' if messages[2].content.startswith('<think>') else 'n' }}{{ 'y' if messages[2].content.endswith('x') else 'n' }}", {"messages": USER}),
    ("upper_title_replace", "{{ 'abc def'.upper() }}{{ 'abc def'.title() }}{{ 'a-b'.replace('-', '+') }}{{ 'user' | capitalize }}", {}),
    ("tojson", "{{ tools | tojson }}", {"tools": TOOLS}),
    ("tojson_indent", "{{ tools | tojson(indent=4) }}", {"tools": TOOLS}),
    ("items", "{% for k, v in tools[0].function.items() %}{{ k }};{% endfor %}", {"tools": TOOLS}),
    ("get_with_default", "{{ messages[0].get('name', 'none') }}{{ messages[0].get('role') }}", {"messages": USER}),
    ("namespace", "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}", {"messages": USER}),
    ("loop_fields", "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ 'F' if loop.first }}{{ 'L' if loop.last }}{{ loop.previtem.role if loop.previtem is defined }};{% endfor %}", {"messages": USER}),
    ("break_continue", "{% for m in messages %}{% if loop.index == 1 %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}", {"messages": USER}),
    ("reverse_slice", "{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}{{ messages[1:] | length }}", {"messages": USER}),
    ("defined_and_none", "{{ 'd' if tools is defined and tools is not none else 'u' }}{{ 'n' if x is none }}{{ 'd' if y is defined }}", {"x": None}),
    ("type_tests", "{{ 1 if 'a' is string }}{{ 2 if messages is iterable }}{{ 3 if messages[0] is mapping }}{{ 4 if 'a' is mapping }}{{ 5 if 1 is number }}", {"messages": USER}),
    ("macro", "{% macro show(x) %}<{{ x }}>{% endmacro %}{{ show('a') }}{{ show(1) }}", {}),
    ("selectattr", "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') }}", {"messages": USER}),
    ("concat_tilde", "{{ 'a' ~ 1 }}{{ 'b' + 'c' }}", {}),
    ("in_operator", "{{ 1 if 'think' in messages[2].content }}{{ 2 if 'role' in messages[0] }}{{ 3 if 'z' not in 'abc' }}", {"messages": USER}),
    ("default_filter", "{{ nothing | default('dflt') }}{{ '' | default('e', true) }}", {}),
    ("python_spelling_of_constants", "{{ true }} {{ false }} {{ none }}", {}),
    ("no_escaping", "{{ '<&>\"' }}", {}),
    ("raise", "{{ raise_exception('Conversation roles must alternate') }}", {}),
    ("undefined_attribute_of_undefined", "{{ nothing.at_all }}", {}),
]


def render(env, source, values):
    try:
        return {"text": env.from_string(source).render(**values)}
    except Exception as e:  # whatever Python raises, the template refused
        return {"error": f"{type(e).__name__}: {e}"}


def write(name, cases):
    (OUT / name).write_text("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")
    print(name, len(cases), "cases,", sum("error" in c for c in cases), "errors")


env = template_environment()
reader = open_model()
template = field(reader, "tokenizer.chat_template")
write("smollm2_chat.json", [
    {"messages": c, "add_generation_prompt": g, **render(env, template, {"messages": c, "add_generation_prompt": g})}
    for c in CONVERSATIONS for g in (False, True)
])
write("chat_features.json", [{"name": n, "template": t, "values": v, **render(env, t, v)} for n, t, v in FEATURES])
