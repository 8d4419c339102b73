#!/usr/bin/env python3
"""Writes tests/data/text: small tokenizers of several kinds, texts with the ids that Hugging Face's
tokenizers gives for them, and chat templates with what Jinja makes of them.

  python3 -m venv VENV && VENV/bin/pip install tokenizers jinja2
  VENV/bin/python scripts/make_text_answers.py
"""
import datetime
import json
import pathlib

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "text"

TEXTS = [
    "Hello world", " leading and  double  spaces ", "tabs\tand\nnew\n\nlines\r\n end  ",
    "don't we'll they've I'm it's he'd you're DON'T", "numbers 1 12 123 1234567 3.14 ٣٤ Ⅷ ½",
    "naïve café Straße ŒUVRE ǅ", "日本語のテキスト 中文 한국어", "Привет, мир! Ελληνικά עברית العربية",
    "emoji 🙂👩‍👩‍👧🏽 flags 🇩🇪", "e\u0301 combining \u200b zero \u00a0nbsp \u2003em \u3000wide",
    "code(x) { return a[i] += *p++; } // done", "http://example.org/?q=1&r=%20#x", "aaaaaaaaaaaaaaaaaaaaaaaa",
    "<|start|>user\nhi<|end|>\n<|start|>", "a<|end|>b <|end|> c", "word wordy xword word",
    "   ", "\n", "", "x", "\u0000\u0001\u007f", "mixed<mask> <mask> and  <mask>\n.", "<|st", "Ġ Ċ characters",
    "a\u0085b \u2028c\u2029 d\u1680e\u202ff\u205fg\ufeffh\u200bi\u000b\u000cj \u001ck \u001fl",
    "a\u0903b\u0301\u0302c \u0e01\u0e33 \u1100\u1161 \u00b2\u2460\u3007 \u02b0\u1d2c \u01c5 \u1f88",
    "x\u00a0y \u00a0 z  \u00a0\n \u3000\u3000w", "<mask>\u00a0 <mask>x", "\u00e9word word\u00e9 word_ word1 -word-",
    "'S 'Re n'T ''s '\u017f 'll've", "<|start|><|end|><|start|", "1/2 10% 5\u00b0C 1e-5 0x1F \u00bd\u2155",
    "the fox jumps over, jumps  over and jumpsjumps overjumps", "a . b,  ,c..d , . e",
    "one. Two, three; four: five! six? 'seven' \"eight\" (nine) [ten]",
]
CORPUS = TEXTS + [
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the fox",
    "this is a small text from which a small number of merges is learnt, over and over again",
    "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist Verpflichtung.",
    "return the number of words in the text that the function takes; return zero where there are none",
] * 3
# A pattern of the newer kind: case-blind contractions, at most three digits, line ends apart.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")


def split(pattern, behavior, invert=False):
    return pre_tokenizers.Split(pattern, behavior, invert)


def byte_level(prefix=False, regex=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


KINDS = {
    "gpt2": byte_level(),
    "prefix": byte_level(prefix=True),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
    "runs": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), byte_level()]),
    "split": pre_tokenizers.Sequence([split(Regex(WORDS), "isolated"), byte_level(regex=False)]),
    "removed": pre_tokenizers.Sequence([split(" ", "removed"), byte_level(regex=False)]),
    "previous": pre_tokenizers.Sequence([split(Regex(r"[ .,]"), "merged_with_previous"), byte_level(regex=False)]),
    "next": pre_tokenizers.Sequence([split(Regex(r"[ .,]"), "merged_with_next"), byte_level(regex=False)]),
    "contiguous": pre_tokenizers.Sequence([split(Regex(r"\s"), "contiguous"), byte_level(regex=False)]),
    "inverted": pre_tokenizers.Sequence([split(Regex(r"\p{L}+"), "removed", True), byte_level(regex=False)]),
}


def added(tokenizer):
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("word", single_word=True), AddedToken("jumps over"), "jumps"])


def make(name, pre):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    # One kind learns from few characters: others have no token.
    alphabet = [] if name == "runs" else pre_tokenizers.ByteLevel.alphabet()
    corpus = CORPUS[:2] if name == "runs" else CORPUS
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    added(tokenizer)
    if name in ("split", "prefix"):
        start, end = tokenizer.token_to_id("<|start|>"), tokenizer.token_to_id("<|end|>")
        template = processors.TemplateProcessing(
            single="<|start|> $A <|end|>" if name == "prefix" else "<|start|> $A",
            special_tokens=[("<|start|>", start), ("<|end|>", end)])
        tokenizer.post_processor = (template if name == "prefix" else
                                    processors.Sequence([processors.ByteLevel(), template]))
    saved = json.loads(tokenizer.to_str())
    if name == "gpt2":  # the older spelling of merges
        saved["model"]["merges"] = [" ".join(merge) for merge in saved["model"]["merges"]]
    if name == "split":
        saved["model"]["ignore_merges"] = True
    text = json.dumps(saved, ensure_ascii=False, separators=(",", ":"))
    tokenizer = Tokenizer.from_str(text)
    cases = []
    for t in TEXTS:
        ids = tokenizer.encode(t).ids
        cases.append({"text": t, "ids": ids, "bare": tokenizer.encode(t, add_special_tokens=False).ids,
                      "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                      "skipped": tokenizer.decode(ids, skip_special_tokens=True)})
    return {"tokenizer": json.loads(text), "cases": cases}


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " What is 1 + 1?\n"}
ANSWER = {"role": "assistant", "content": "2"}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, {"role": "user", "content": "é 日 <x>"}]]
TEMPLATES = {
    "smollm2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
               "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
               "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
               "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
               "{% endif %}",
    "lines": "{{ bos_token }}\n{% for m in messages %}\n  {% if m.role == 'user' %}\n[U] {{ m.content | trim }}\n"
             "  {% elif m.role == \"assistant\" %}\n[A] {{ m['content'] }}{{ eos_token }}\n  {% else %}\n[S]\n"
             "  {%- endif %}\n{% endfor %}\n{# the answer #}\n{% if add_generation_prompt %}[A]{% endif %}\n",
    "slices": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set s = messages[0].content %}"
              "{% else %}{% set rest = messages %}{% set s = '' %}{% endif %}"
              "{%- for m in rest -%}\n{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
              "{{ raise_exception('Roles must alternate') }}{% endif %}"
              "{{ (s ~ '|' if loop.first and s else '') + m.content.strip() + ('.' if loop.last else ';') }}{% endfor -%}\n"
              "\n  {{ rest | length }}{{ tools is defined }}{{ messages[-1].role }}{{ 'x' in s or not s }}",
    "exception": "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
                 "{{ raise_exception('no ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "filtered": "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }} {{ m.content|trim }};"
                "{% else %}nobody{% endfor %}{% for m in messages if m.role == 'tool' %}x{% else %}no tool{% endfor %}"
                "{% for x in nothing %}x{% else %}nothing{% endfor %}",
    "loop": "{% for m in messages %}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.index }}{{ loop.index0 }}"
            "{% if loop.nextitem is defined %}>{{ loop.nextitem.role }}{% endif %}"
            "{% if loop.previtem is not defined %}first{% else %}<{{ loop.previtem['role'] }}{% endif %}"
            "{% for c in [1, 2] %}{{ loop.last }}{{ loop.length }}{% endfor %}{{ loop.last }}\n\n{% endfor %}",
    "lazy": "{% set m = messages[0] %}{{ m.content if m.content is string else raise_exception('no') }}"
            "{{ 'list' if nothing is defined and nothing.a.b else 'none' }}{{ nothing is not defined or nothing.x }}"
            "{% if messages is string and messages.startswith('a') %}x{% endif %}{{ m.nothing or 'other' }}"
            "{{ (1 if false) is defined }}{{ 'a' if 0 else 'b' if '' else 'c' }}",
    "length": "{{ nothing|length }}{{ messages|length }}{{ messages[-1].content|length }}{{ [1, 'a']|count }}"
              "{{ nothing|trim }}|{{ 5|trim }}|{{ none|upper }}|{{ messages[-1].content|length > 3 }}",
    "binding": "{{ 1 + 2 ~ 3|string ~ 4 - 5 if false else 'x' ~ 1 + 1|length|string if false else 'y' }}"
               "{{ 'a' ~ 1 ~ true ~ none ~ nothing }}{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 2 == 2 is defined }}"
               "{{ not 1 == 2 }}{{ - 3 % 5 }}{{ 7 % 5 }}{{ --3 }}{{ 1 == true }}{{ 'b' > 'a' }}{{ 0 or '' or none }}"
               "{{ 1 and 'k' }}{{ not not 'k' }}{{ 5 % 9223372036854775807 }}{{ 'é' in messages[-1].content }}"
               "{{ nothing == other }}{{ nothing == none }}{{ nothing in messages }}{{ 1 in nothing }}",
    "tests": "{% for v in [1, 'a', true, none, nothing, messages[0]] %}{{ v is string }}{{ v is none }}{{ v is defined }}"
             "{{ v is mapping }}{{ v is boolean }}{{ v is true }}{{ v is iterable }}{{ v is sequence }},{% endfor %}"
             "{{ messages[9] is defined }}{{ messages[0].get('nothing') is none }}{{ messages[0].get('role') }}"
             "{{ messages[0]['nothing'] is undefined }}{{ 'abc'.nothing is defined }}",
    "spaces": "{{ '\u00a0\u3000 a\u00a0b \u2003\u0085'|trim }}|{{ ' \u00a0x '.rstrip() }}|{{ ' x\u3000 '.lstrip() }}|\r\n"
              "{% if true %}\r\n a \r\n{% endif %}\r\nb\rc{{ 'd\r\ne' }}\n\n",
    "given": "{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ strftime_now is defined }}"
             "{{ raise_exception is not defined }}{{ range is defined and namespace is defined }}"
             "{{ 'tools' if tools is not none else 'no tools' }}{{ 'tools' if tools else '' }}",
    "undefined_member": "{{ nothing.a }}",
    "undefined_item": "{{ nothing['a'] }}",
    "undefined_sum": "{{ nothing + 'a' }}",
    "undefined_order": "{{ nothing < 1 }}",
    "order": "{{ 'a' < 1 }}",
}


def render(source, chat, answer):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    # What transformers gives every template.
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    try:
        return {"text": environment.from_string(source).render(
            messages=chat, add_generation_prompt=answer, bos_token="<s>", eos_token="</s>",
            tools=None, documents=None)}
    except (jinja2.exceptions.TemplateError, TypeError) as e:
        return {"error": str(e), "raised": source.find("raise_exception") >= 0}


OUT.mkdir(parents=True, exist_ok=True)
for name, pre in KINDS.items():
    (OUT / f"tokenizer_{name}.json").write_text(
        json.dumps(make(name, pre), ensure_ascii=False, separators=(",", ":")) + "\n")
cases = [{"name": n, "template": t, "messages": c, "answer": a, **render(t, c, a)}
         for n, t in TEMPLATES.items() for c in CHATS for a in (True, False)]
(OUT / "chat.json").write_text(json.dumps(
    {"made_with": {"tokenizers": tokenizers.__version__, "jinja2": jinja2.__version__}, "cases": cases},
    ensure_ascii=False, indent=1) + "\n")
