"""Places where scripts/mutate_source breaks the source, and the switches that break it at run time.

A mutant with a switch is built into the same libraries as all others of its batch, and acts in the
process whose environment names its number (mutant_switch.h). What cannot be switched (a constant
that the compiler wants, a type) is built alone, as text; it still gets a probe, which tells the
tests that reach it.
"""
import bisect
import collections
import hashlib
import json
import random
import re
import sys

SWAPS = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "==": "!=", "!=": "==", "<": "<=",
         "<=": "<", ">": ">=", ">=": ">", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=",
         "&": "|", "|": "&", "<<": ">>", ">>": "<<"}
# The types of mutant_switch.h that stand between the operands of a switched operator.
TAGS = {"+": "Plus", "-": "Minus", "*": "Times", "/": "Over", "%": "Modulo", "==": "Equal",
        "!=": "Unequal", "<": "Less", "<=": "LessEqual", ">": "Greater", ">=": "GreaterEqual",
        "&": "And", "|": "Or", "<<": "Left", ">>": "Right", "+=": "Add", "-=": "Subtract"}
# Comments, strings, characters and preprocessor lines: nothing is changed there.
DEAD = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
                  r'|^[ \t]*#(?:\\\n|[^\n])*|static_assert\([^;]*;|template <[^\n]*', re.S | re.M)
OPERATOR = re.compile(r"(?<= )(&&|\|\||[-+*/%<>!=]=|<<|>>|[-+*/%<>&|])(?= )")
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.'])")
BOOL = re.compile(r"\b(true|false)\b")
NOT = re.compile(r"(?<=[(\s])!(?=[\w(])")
IF = re.compile(r"\b(?:if|while) \(")
# A call or an assignment that stands alone, without a declaration; also lines that leave early.
STATEMENT = re.compile(
    r"(?<=[;{})])\s+((?:continue|break|return|(?:[+-]{2}|\*)?[A-Za-z_][\w.:>\[\]-]*"
    r"(?:\([^;{}]*\)[^;{}=]*| [-+*/|&]?= [^;{}]*|\+\+|--)));")
# A line that opens a block of statements, not a class or a list.
BLOCK = re.compile(r"(\)( const| noexcept| override| final| mutable| -> [\w:<>&*]+)*|\belse|\bdo) \{$")

Mutant = collections.namedtuple("Mutant", "path line kind start end old new")


def blank(text):
    """The text with everything that is not code as spaces: offsets stay."""
    return DEAD.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def closing(code, at):
    """The offset of the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if depth == 0:
            return i
    return len(code) - 1


def candidates(path, text):
    code = blank(text)
    starts = [0] + [m.end() for m in re.finditer("\n", text)]

    def mutant(kind, start, end, new):
        line = bisect.bisect_right(starts, start)
        return Mutant(str(path), line, kind, start, end, text[start:end], new)

    for m in OPERATOR.finditer(code):
        if m.group() in SWAPS:
            yield mutant("operator", m.start(), m.end(), SWAPS[m.group()])
    for m in NUMBER.finditer(code):
        if re.match(r"[^\n]*= 0;", code[m.start() - 2:m.end() + 1]) and ") " in \
                code[max(0, m.start() - 12):m.start()]:
            continue  # a pure virtual function
        number = int(m.group())
        yield mutant("constant", m.start(), m.end(), str(number + 1))
        if number > 0:
            yield mutant("constant", m.start(), m.end(), str(number - 1))
    for m in BOOL.finditer(code):
        yield mutant("constant", m.start(), m.end(), "false" if m.group() == "true" else "true")
    for m in NOT.finditer(code):
        yield mutant("condition", m.start(), m.end(), "")
    for m in IF.finditer(code):
        end = closing(code, m.end() - 1)
        inside = text[m.end():end]
        if ";" not in inside and not re.match(r"(const )?(auto|[\w:<>]+)[*&]? \w+ = ", inside):
            yield mutant("condition", m.end(), end, "!(" + inside + ")")
            yield mutant("condition", m.end(), end, "false && (" + inside + ")")
    for m in STATEMENT.finditer(code):
        if not m.group(1).startswith("DT_ASSIGN"):  # a declaration too
            yield mutant("statement", m.start(1), m.end(1), "(void)0")


def ident(m):
    text = f"{m.path}:{m.line}:{m.start}:{m.new}"
    return f"{m.path}:{m.line}:{hashlib.sha1(text.encode()).hexdigest()[:6]}"


def draw(root, read, folders, files, seed):
    """All mutants in random order: lines are drawn evenly, one mutant of each line drawn.

    `read` gives the text of a path under `root` as it is without mutants."""
    by_line = collections.defaultdict(list)
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root)
            if path.suffix in (".cc", ".h", ".inc") and re.search(files, str(relative)):
                for m in candidates(relative, read(relative)):
                    by_line[(m.path, m.line)].append(m)
    generator = random.Random(seed)
    lines = sorted(by_line)
    generator.shuffle(lines)
    for line in lines:
        kinds = collections.defaultdict(list)
        for m in by_line[line]:
            kinds[m.kind].append(m)
        yield generator.choice(kinds[generator.choice(sorted(kinds))])


def given(read, file, stale=sys.exit):
    """The mutants that a file lists, [path, old, new] or [path, old, new, why] per line: with why,
    "" without. `old` stands once in the file at `path`, else `stale` is told."""
    for line in file.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        path, old, new, *why = json.loads(line)
        text = read(path)
        if text.count(old) != 1:
            stale(f"{file}: {old!r} stands {text.count(old)} times in {path}")
            continue
        start = text.index(old)
        yield Mutant(path, text.count("\n", 0, start) + 1, "given", start, start + len(old), old,
                     new), "".join(why)


def text_of(m, read):
    """The whole file with the mutant in it."""
    return applied(read(m.path), [(m.start, m.end, m.new)])


def show(m):
    return f"{m.kind}: {' '.join(m.old.split())[:60]!r} -> {' '.join(m.new.split())[:60]!r}"


def operand(code, at, step, ends):
    """Where the operand of a logical operator ends: `at` and on by `step`, at its own depth."""
    depth, opens, closes = 0, *("([{", ")]}")[::step]
    while 0 <= at < len(code):
        c = code[at]
        if c in closes and depth == 0:
            break
        depth += (c in opens) - (c in closes)
        if depth == 0:
            if c in ",;?" or code[at:at + 2] in ends or code[at - 1:at + 1] in ends:
                break
            if c == ":" and ":" not in (code[at - 1], code[at + 1]):
                break
            if c == "=" and not set("=!<>").intersection((code[at - 1], code[at + 1])):
                break
            if step < 0 and re.match(r"return\b", code[at:at + 7]) and not code[at - 1].isalnum():
                return at + 6
        at += step
    return at + 1 if step < 0 else at


def nvcc_compiles(path):
    """Of these files nothing includes the switches: each of their mutants is built alone."""
    return path.startswith("tensor/cuda/")


def switch(m, number, text):
    """[(offset, end, replacement)]: the mutant's source with a switch in it; None: it has none."""
    on = f"dt_mutant::On({number})"
    if nvcc_compiles(m.path):
        return None
    if m.kind == "statement":
        return [(m.start, m.start, f"if ({on}) {{}} else {{ "), (m.end + 1, m.end + 1, " }")]
    if m.kind == "constant":
        if m.old in ("true", "false"):
            return [(m.start, m.end, f"({'!' if m.old == 'true' else ''}{on})")]
        return [(m.start, m.end, f"({on} ? {m.new} : {m.old})")]
    if m.kind == "condition" and m.old == "!":
        return [(m.start, m.end, f"dt_mutant::Not<{number}>{{}} ->* ")]
    if m.kind == "condition":
        before = f"!{on} && (" if m.new.startswith("false &&") else \
            f"{on} != static_cast<bool>("
        return [(m.start, m.start, before), (m.end, m.end, ")")]
    if m.kind == "operator" and m.old in TAGS:
        return [(m.end, m.end, f" dt_mutant::{TAGS[m.old]}<{number}>{{}} {m.old}")]
    if m.kind == "operator":  # a && b is (a != on) ? b : on, with or without the mutant
        code = blank(text)
        ends = ("||",) if m.old == "||" else ("||", "&&")
        start = operand(code, m.start - 1, -1, ends)
        end = operand(code, m.end, 1, ends)
        other = on if m.old == "&&" else f"!{on}"
        return [(start, start, " ((static_cast<bool>("),
                (m.start, m.end, f") != {other}) ? static_cast<bool>("),
                (end, end, f") : {other})")]
    return None


def probe(m, number, text):
    """A statement at the start of the block around the mutant, which notes that it was reached."""
    if nvcc_compiles(m.path):
        return None
    code, depth = blank(text), 0
    for at in range(m.start - 1, -1, -1):
        depth += {"}": 1, "{": -1}.get(code[at], 0)
        if depth < 0:
            line = code[code.rfind("\n", 0, at) + 1:at + 1]
            if BLOCK.search(line) and not re.search(r"\bswitch \(", line):
                return [(at + 1, at + 1, f" (void)dt_mutant::On({number});")]
            depth = 0
    return None


def applied(text, edits):
    """The text with edits [(offset, end, replacement)], which do not overlap."""
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def overlap(edits, others):
    """Whether two mutants' edits get in each other's way."""
    return any(a < d and c < b or a == c for a, b, _ in edits for c, d, _ in others)
