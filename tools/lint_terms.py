"""Find the terms that this project no longer uses, in names and in prose, and say what the field calls them.

Usage: python tools/lint_terms.py [PATH ...]     (default: every tracked source file and document)

A path may be a file or a folder. Python, C++ and CUDA files are read for identifiers, comments and strings; Markdown
for prose outside code blocks; the Makefile for its lines. One finding per line, `FILE:LINE: "TERM": REPLACEMENT`; the
exit status is 1 when there is one. Legitimate uses of a word are in the rules or in ALLOWED, with a reason.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".h", ".cc", ".cu", ".cuh", ".md"}


class Rule(NamedTuple):
    """A term, as a pattern, and what to write in its place."""

    pattern: re.Pattern[str]
    instead: str
    where: str = ""  # a pattern of paths; empty: everywhere


class Allowed(NamedTuple):
    """A use that is right: patterns of its path, its term and its line, which must all be found."""

    path: str
    term: str
    line: str
    reason: str


class Finding(NamedTuple):
    path: str
    line: int
    term: str
    instead: str


Block = list[tuple[int, str]]  # line numbers and texts of prose that belongs together: a phrase may cross a line break


def _name(parts: str, instead: str, where: str = "") -> Rule:
    return Rule(re.compile(rf"(?:^|_)(?:{parts})(?:_|$)"), instead, where)


def _prose(pattern: str, instead: str, where: str = "") -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), instead, where)


# Identifiers and their parts between underscores; `PlayedTurn` is looked at as `played_turn`.
NAMES = [
    _name("doors?", "argument checks, bindings"),
    _name("(?<!import_)laws?", "target distribution"),
    _name("worth", "value, gain"),
    _name("seams?", "contract, names of the engine"),
    _name("paced", "times against a reference"),
    _name("made_up", "dummy", r"eagle_plugin/"),
    _name("hand_over", "fall_back, fallback"),
    _name("staging", "host_to_device"),
    _name("beams?", "topk", r"eagle_plugin/|csrc/"),
    _name("lanes?", "padded batch", r"eagle_plugin/(?:core|policy|runtime|sglang|vllm|selftest)|round_start"),
    Rule(re.compile(r"^_*keys$"), "prefix_tokens", r"eagle_plugin/policy/(?:chooser|costs|policy)"),
    _name("pending(?!_structured)", "deferred", r"eagle_plugin/(?:policy|runtime|sglang|vllm)/"),
    _name("liked", "say what it does", r"eagle_plugin/"),
    Rule(re.compile(r"^_*keys$"), "rng_keys", r"core/(rng|round_start)|kernels/(sampling|round_start)|runtime/rng"),
    _name("listed", "top_m", r"core/|runtime|sglang|vllm|kernels|csrc|reference|evaluate"),
    _name("said", "output tokens, logged"),
    _name("play|plays|played", "rollout, regenerate"),
    _name("deal|deals|dealt", "assign"),
    _name("takeover|take_over|taken_over", "support"),
    _name("left_alone", "unsupported reasons"),
    _name("growth", "tree builder"),
    Rule(re.compile(r"^_*grow$"), "draft"),
    _name("figures", "stats"),
    _name("numbers", "rng, uniforms", r"core/|runtime|sglang|vllm|kernels|csrc|reference"),
    _name("texts", "responses"),
    _name("words", "ancestors, ancestor bitmask; args"),
    _name("screen|screens|screened|screening", "privacy filter", r"data/|privacy"),
    Rule(re.compile(r"^_*stride$"), "max_accept_length"),
]

_UNIT = (
    "answer|batch|bin|block|call|candidate|cell|child|column|conversation|core|cpu|device|document|domain|draft|draw|element|"
    "engine|epoch|file|gpu|group|head|job|kernel|key|layer|level|line|machine|message|minute|model|multiprocessor|node|operation|"
    "pass|path|place|position|process|prompt|query|question|rank|record|repeat|request|round|row|run|sample|second|sequence|server|"
    "set(?! of)|setting|shape|slot|step|task|team|test|thread|token|turn|update|value|verification|warp|worker"
)
_MEASURE = (
    "bits|bytes|candidates|children|chunks|documents|entries|forwards|heads|keys|layers|lengths|levels|means|nodes|numbers|"
    "once|positions|programs|prompts|questions|requests|rows|seconds|slots|steps|threads|times|tokens|twice|updates|words|[kmg]b"
)
_NO_NOUN = (
    "and|as|at|but|by|for|from|has|how|if|in|into|is|not|of|on|only|or|over|per|so|than|that|then|to|under|what|when|where|"
    "which|while|with|within|without"
)
_NOUN = rf"(?!(?:{_NO_NOUN}) )[\w-]*(?:[^s\W]|ss)(?<!ing)"  # no verb: that would end with s
_ONE = rf"\bone (?!of )(?:(?!(?:that|which|what|how) )[\w'-]+ ){{0,3}}?{_NOUN} an? (?:{_UNIT})\b"
_A = rf"(?<!give )(?<!gives )\ban? {_NOUN} an? (?:{_UNIT})\b"

PROSE = [
    _prose(rf"\b(?:{_MEASURE}) an? (?:{_UNIT})\b|{_ONE}|{_A}", "per"),
    _prose(r"\bdoors?\b", "argument checks, bindings"),
    _prose(r"(?<!import )(?<!import-)(?<!Zipf's )\blaws?\b", "target distribution"),
    _prose(r"\bseams?\b", "contract, hook"),
    _prose(r"\bworth\b(?! \w+ing\b)", "value"),
    _prose(r"\blisted (?:tokens?|candidates?|children)\b", "top-M candidates"),
    _prose(r"\bsaid\b", "generated, output tokens, logged"),
    _prose(r"\bplay(?:s|ed|ing)?\b(?! a (?:part|role))", "generate, rollout"),
    _prose(r"\bdeal(?:s|t)?\b(?! with)", "assign"),
    _prose(r"\btake-?overs?\b", "support"),
    _prose(r"\b(?:left|leaves?|leaving)(?: \w+)? alone\b", "not served by the plugin, unchanged"),
    _prose(r"\bleft away\b", "left out"),
    _prose(r"\bgrowth\b", "tree building"),
    _prose(r"\bancestors?'? (?:as )?words?\b|\bwords of (?:a|the) (?:tree|chain)\b|\bfit a word\b", "ancestor bitmask"),
    _prose(r"(?<!leave )(?<!leaves )(?<!left )(?<!stays )(?<!command )\bbehind\b(?! a proxy)", "after"),
    _prose(r"\b(?:stands?|stood|standing)\b(?!-| for\b| in for\b)", "is, are"),
    _prose(r"\blikeliest\b", "most likely"),
    _prose(r"\b(?:keeps?|kept) (?:the|its|their|our) books\b", "records"),
    _prose(r"\b(?:served by hand|called so|word was the last)\b|\bis nothing(?=[.,;])", "say it literally"),
]

ALLOWED = [
    Allowed(r"tools/lint_terms\.py|tests/test_terms\.py", "", "", "the rules and their samples name the terms"),
    Allowed(r"figures\.py|test_animation|CHANGELOG", r"(?i)figures", "", "pictures of documents, by `make figures`"),
    Allowed(r"test_import_law", r"(?i)law", "", "the rule of who may import whom"),
    Allowed(r"privacy|tests/data/|tiny_checkpoints", r"(?i)texts$|words", "", "texts to redact or to tokenize"),
    Allowed(r"builtin|word_problems|tests/data/", "", r"[\"']", "planted texts and questions"),
    Allowed(r"tests/", r"^WORDS$|words$", r"WORDS|bad[ _]words", "words of a language: of prompts, or forbidden ones"),
    Allowed(
        r"vllm|tests/engines|interpreted|wrap_markdown|doctor/command",
        r"(?i)bad_?words|long_words",
        "",
        "vLLM's and textwrap's",
    ),
    Allowed(r"core/rng\.py|murmur\.py|philox", r"words", "", "the 32-bit words of a counter-based generator"),
    Allowed(r"csrc/|tests/kernels/cuda", r"[Ww]ords", "", "machine words of a copy or of a warp's exchange"),
    Allowed(r"versions\.py|docs/versions", r"(?i)law", r"sampling_law", "a column of out/versions.json"),
    Allowed(r"", r"stride", r"output_stride|accept_stride|\.stride\b", "engines' names, a tensor's stride"),
]


def check(path: str, source: str) -> Iterator[Finding]:
    """The terms in one file, given its path from the root of the repository and its content."""
    lines = source.splitlines()
    seen: set[tuple[int, str]] = set()
    found = [Finding(path, 1, *hit) for part in Path(path).parts for hit in _in_name(part.split(".")[0], path)]
    if path.endswith(".py"):
        found += _python(path, source)
    elif path.endswith(".md"):
        found += _in_blocks(path, _markdown(lines))
    elif Path(path).suffix in SUFFIXES:
        found += _cpp(path, source)
    else:
        found += _in_blocks(path, [[(i, line)] for i, line in enumerate(lines, 1)])
    for hit in sorted(found, key=lambda hit: hit.line):
        line = lines[hit.line - 1] if hit.line <= len(lines) else ""
        allowed = any(all(map(re.search, a[:3], (path, hit.term, line))) for a in ALLOWED)
        if not allowed and (hit.line, hit.term) not in seen:
            seen.add((hit.line, hit.term))
            yield hit


def _in_name(identifier: str, path: str) -> Iterator[tuple[str, str]]:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier).lower()
    for rule in NAMES:
        if rule.pattern.search(snake) and re.search(rule.where, path):
            yield identifier, rule.instead
    if identifier == "SAMPLED":
        yield identifier, "NUM_SAMPLED"
    if identifier == "Draft" and re.search(r"\bdata/", path):
        yield identifier, "RawPrompt"


def _in_blocks(path: str, blocks: Iterable[Block]) -> Iterator[Finding]:
    """Prose rules on each block, and the rules for names on what a block has between backticks."""
    for block in blocks:
        starts, text = [], ""
        for _, line in block:
            starts.append(len(text))
            text += line.strip() + " "

        def line_at(position: int, block: Block = block, starts: list[int] = starts) -> int:
            return block[bisect_right(starts, position) - 1][0]

        for span in re.finditer(r"`+([^`]+)`+", text):
            for name in re.finditer(r"[A-Za-z_]\w*", span[1]):
                yield from (Finding(path, line_at(span.start()), *hit) for hit in _in_name(name[0], path))
        prose = re.sub(r"`+[^`]+`+", lambda span: "`" * len(span[0]), text)
        for rule in PROSE:
            for hit in rule.pattern.finditer(prose):
                yield Finding(path, line_at(hit.end() - 1), hit[0], rule.instead)


def _markdown(lines: list[str]) -> Iterator[Block]:
    """Paragraphs outside code blocks."""
    block: Block = []
    fenced = False
    for i, line in enumerate([*lines, ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if fence or fenced or not line.strip() or re.match(r"\s*(?:[-*#|]|\d+\.) ?", line):
            if block:
                yield block
            block = []
        if not (fence or fenced) and line.strip():
            block.append((i, line))


def _python(path: str, source: str) -> Iterator[Finding]:
    blocks: list[Block] = []
    strings: Block = []
    previous = tokenize.NEWLINE
    docstring = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, row = token.type, token.start[0]
        if kind == tokenize.COMMENT:
            _add_comment(blocks, [(row, token.string.lstrip("#: "))], token.line[: token.start[1]])
        elif kind == tokenize.STRING or tokenize.tok_name[kind] == "FSTRING_MIDDLE":
            docstring = docstring or previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            lines = token.string.replace("\\n", " ").split("\n")
            strings += [(row + i, line.strip("\"'frb")) for i, line in enumerate(lines)]
        elif kind not in (tokenize.NL, tokenize.COMMENT) and "FSTRING" not in tokenize.tok_name[kind]:
            if strings and (docstring or not path.startswith("tests/")):
                blocks += _paragraphs(strings)
            strings, docstring = [], False
        if kind == tokenize.NAME:
            yield from (Finding(path, row, *hit) for hit in _in_name(token.string, path))
        if kind not in (tokenize.NL, tokenize.COMMENT):
            previous = kind
    yield from _in_blocks(path, blocks)
    yield from _bound_names(path, ast.parse(source))


def _paragraphs(lines: Block) -> Iterator[Block]:
    block: Block = []
    for line in [*lines, (0, "")]:
        if line[1].strip():
            block.append(line)
        elif block:
            yield block
            block = []


def _add_comment(blocks: list[Block], lines: Block, before: str) -> None:
    """Add a comment; one that has its lines to itself continues the comment on the line above."""
    if blocks and not before.strip() and blocks[-1][-1][0] == lines[0][0] - 1:
        blocks[-1].extend(lines)
    else:
        blocks.append(list(lines))


def _bound_names(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Where `round`, a builtin, is given to something else; a field of that name is one."""
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        if name == "round" and isinstance(getattr(node, "ctx", ast.Store()), ast.Store):
            yield Finding(path, getattr(node, "lineno", 1), name, "another name: `round` is a builtin")


def _cpp(path: str, source: str) -> Iterator[Finding]:
    blocks: list[Block] = []
    lexer = re.compile(r"//[^\n]*|/\*.*?\*/|\"[^\" \n]* (?:\\.|[^\"\\\n])*\"|[A-Za-z_]\w*", re.DOTALL)
    for token in lexer.finditer(source):
        row, text = source.count("\n", 0, token.start()) + 1, token[0]
        if text[0] == "/":
            lines = [(row + i, line.strip("/* ")) for i, line in enumerate(text.split("\n"))]
            _add_comment(blocks, lines, source[source.rfind("\n", 0, token.start()) + 1 : token.start()])
        elif text[0] == '"':
            blocks.append([(row, text.strip('"'))])
        elif text != "stride":
            yield from (Finding(path, row, *hit) for hit in _in_name(text, path))
    yield from _in_blocks(path, blocks)


def check_file(file: Path) -> Iterator[Finding]:
    """The terms in one file."""
    file = file.resolve()
    root = next((parent for parent in file.parents if (parent / ".git").exists()), file.parent)
    return check(file.relative_to(root).as_posix(), file.read_text("utf-8"))


def files(paths: list[str]) -> list[Path]:
    """The files of these paths; without paths, every tracked one."""
    if not paths:
        listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        found = [ROOT / line for line in listing.stdout.splitlines()]
    else:
        found = [file for path in map(Path, paths) for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in found if file.is_file() and (file.suffix in SUFFIXES or file.name == "Makefile")]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Find terms that this project does not use.")
    parser.add_argument("paths", nargs="*", help="files or folders (default: every tracked source file and document)")
    count = 0
    for file in files(parser.parse_args().paths):
        for hit in check_file(file):
            print(f'{hit.path}:{hit.line}: "{hit.term}": {hit.instead}')
            count += 1
    if count:
        print(f"lint_terms: {count} findings", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
