"""A text with its escapes decoded, in which private data is searched; each character knows its place in the text.

In JSON, and in code, a text is in a string with escapes: `{"log": "user\\nanna@firma.de"}`. There the letter of an
escape is no part of the word after it. So the strings are decoded, and strings within them too (JSON in JSON). What is
found is replaced at its place in the given text: all other bytes stay as they are.

A character can also be written in other ways, which a reader does not see: with invisible ones between, as a wide form,
as a digit or a space of another script, as an entity of HTML. Each is searched in its plain form.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

DEEPEST = 12  # strings within strings; each level doubles the number of backslashes
INSIDE = -1  # a run of characters in a string of JSON, or in a text that is no JSON
# A string with double quotes as JSON has it, on one line; or, outside of strings, a character with a backslash. At a
# quote it always matches, to the end of the line if need be: so each character is read once.
_STRING = re.compile(r'\\[^\n]|"(?P<inner>[^"\\\n]*(?:\\[^\n][^"\\\n]*)*)(?P<close>"?)')
_JSON_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|([\"\\/bfnrt])|(.?))"
)
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
# A character as code writes it outside of a string of JSON: with other quotes, or any number of backslashes.
_CODE_ESCAPE = re.compile(r"(?<!\\)\\+(?:([nrtbfv])|u([0-9A-Fa-f]{4})|([\"'/]))")

_ENTITY = r"&#(?:[xX]([0-9a-fA-F]{1,6})|([0-9]{1,7}));"  # a character as HTML has it by its number
_WITH_FORMS = (range(0x80, 0xD800), range(0xE000, 0x20000), range(0xE0000, 0xE1000))  # code points beside CJK
_WIDE_MARKS = frozenset("＠．－＋＿")  # others, such as the wide colon and comma, have a meaning for the recognisers

_NUMBER = re.compile(r"-?\d[\d.eE+-]*")
_OF_NUMBERS = frozenset("0123456789.eE+-")
_WORDS = re.compile(r"\w(?:.*\w)?", re.DOTALL)  # of a finding that begins or ends in another string


class Decoded:
    """`text` is the decoded text; the character i of it begins at `places[i]` of the given one, and the last place is
    that of the end.

    runs: (start in `text`, INSIDE or the depth of the structure of JSON that begins here), by start.
    quoted: the texts of all levels that have an escaped quote, with the places of their characters: only there it can
    be told where a string with quotes in it ends.
    exact: no escape was decoded outside of a string of JSON, where a backslash may also be meant as it is.
    """

    def __init__(self, given: str, code: bool = True) -> None:
        """code: also decode escapes outside of the strings of JSON."""
        self.runs: list[tuple[int, int]] = [(0, INSIDE)]
        self.quoted: list[tuple[str, Sequence[int]]] = []
        self.exact = True
        self._code = code
        self.text: str = given
        self.places: Sequence[int] = range(len(given) + 1)
        if "\\" in given or _may_be_json(given) or _has_other_forms(given):
            self._pieces: list[str] = []
            self._starts = array("q")
            self._add(given, array("q", self.places), 0, INSIDE)
            self._starts.append(len(given))
            self.text, self.places = "".join(self._pieces), self._starts
            del self._pieces

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The part of `text` of a part of the given text; of an escape only the whole."""
        return bisect_left(self.places, start), bisect_right(self.places, end) - 1

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of `text` that are replaced for a finding, so that JSON stays JSON: of each string its own part,
        and whole numbers."""
        for index in range(bisect_right(self.runs, (start, DEEPEST)) - 1, len(self.runs)):
            begin, kind = self.runs[index]
            stop = self.runs[index + 1][0] if index + 1 < len(self.runs) else len(self.text)
            if begin >= end:
                return
            low, high = max(begin, start), min(stop, end)
            if kind == INSIDE:
                words = _WORDS.search(self.text, low, high)
                if words and (low, high) == (start, end):
                    yield start, end
                elif words:
                    yield words.span()
            else:
                while low > begin and self.text[low - 1] in _OF_NUMBERS:
                    low -= 1
                while high < stop and self.text[high] in _OF_NUMBERS:
                    high += 1
                yield from (number.span() for number in _NUMBER.finditer(self.text, low, high))

    def quote(self, place: int) -> str:
        """What belongs before and after a placeholder here: the quotes of a string if a number is replaced."""
        depth = self.runs[bisect_right(self.runs, (place, DEEPEST)) - 1][1]
        return "" if depth == INSIDE else "\\" * (2**depth - 1) + '"'

    def _add(self, text: str, places: array[int], depth: int, around: int) -> None:
        """Append a text of this depth; `around`: the run in which it is."""
        structure = _is_json(text)
        if structure:
            self._run(depth)
        if '\\"' in text or "\\'" in text:
            self.quoted.append((text, places))
        end = 0
        for string in _STRING.finditer(text):
            start, stop = string.span("inner")
            if not string["close"] or not structure and "\\" not in string["inner"]:
                continue
            decoded = _decode_string(string["inner"], places[start : stop + 1])
            if decoded is None:
                continue
            self._add_code(text, places, end, start)
            if structure:
                self._run(INSIDE)
            inner, inner_places = decoded
            if "\\" in string["inner"] and depth < DEEPEST:
                self._add(inner, inner_places, depth + 1, INSIDE)
            else:
                self._copy(inner, inner_places)
            if structure:
                self._run(depth)
            end = stop
        self._add_code(text, places, end, len(text))
        if structure:
            self._run(around)

    def _add_code(self, text: str, places: array[int], start: int, stop: int) -> None:
        """Append what is outside of the strings of JSON."""
        if self._code:
            for found in _CODE_ESCAPE.finditer(text, start, stop):
                space, code, mark = found.groups()
                at, letter = found.start(), "\n" if space else _letter(int(code, 16)) if code else mark
                self._copy(text[start:at] + letter, places[start : at + 1])
                self.exact, start = False, found.end()
        self._copy(text[start:stop], places[start:stop])

    def _copy(self, text: str, places: array[int]) -> None:
        end = 0
        for found in _forms()[0].finditer(text) if _has_other_forms(text) else ():
            plain, at = _plain(found), found.start()
            self._append(text[end:at] + plain, places[end : at + len(plain)])
            end = found.end()
        self._append(text[end:], places[end:])

    def _append(self, text: str, places: array[int]) -> None:
        self._pieces.append(text)
        self._starts += places[: len(text)]

    def _run(self, kind: int) -> None:
        self.runs.append((len(self._starts), kind))


def _may_be_json(text: str) -> bool:
    return text[:64].lstrip()[:1] in ("{", "[")


def _is_json(text: str) -> bool:
    if not _may_be_json(text):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _decode_string(inner: str, places: array[int]) -> tuple[str, array[int]] | None:
    """The text of a string of JSON and the places of its characters and of its end; None: no escapes of JSON."""
    if "\\" not in inner:
        return inner, places
    pieces: list[str] = []
    starts, end = array("q"), 0
    for found in _JSON_ESCAPE.finditer(inner):
        high, low, code, mark, wrong = found.groups()
        if wrong is not None:
            return None
        if high:
            letter = _letter(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
        else:
            letter = _letter(int(code, 16)) if code else _LETTERS.get(mark, mark)
        pieces += inner[end : found.start()], letter
        starts += places[end : found.start() + 1]
        end = found.end()
    pieces.append(inner[end:])
    starts += places[end:]
    return "".join(pieces), starts


def _has_other_forms(text: str) -> bool:
    return "&#" in text or not text.isascii() and _forms()[0].search(text) is not None


def _plain(found: re.Match[str]) -> str:
    """The plain form of what the expression of `_forms` has found; "" for what is not seen."""
    code = found[1] or found[2]
    letter = _letter(min(int(code, 16 if found[1] else 10), 0x10FFFF)) if code else found[0]
    return _forms()[1].get(letter, letter)


@cache
def _forms() -> tuple[re.Pattern[str], dict[str, str]]:
    """An expression for characters that can have a plain form, and these forms."""
    letters = map(chr, chain.from_iterable(_WITH_FORMS))
    plain = {letter: form for letter in letters if (form := _plain_form(letter)) != letter}
    # Python's expressions look a character up in a table only if it has two bytes; of others a range is fast.
    low = "".join(letter for letter in plain if letter < "\U00010000")
    return re.compile(f"[{re.escape(low)}\U00010000-\U0010ffff]|{_ENTITY}"), plain


def _plain_form(letter: str) -> str:
    kind = unicodedata.category(letter)
    if kind == "Cf":  # soft hyphens, joiners, marks of direction
        return ""
    if kind == "Zs":
        return " "
    if kind == "Nd":
        return str(unicodedata.decimal(letter))
    form = unicodedata.decomposition(letter).partition(" ")[0]
    if form == "<font>" or form == "<wide>" and (letter.isalpha() or letter in _WIDE_MARKS):
        plain = unicodedata.normalize("NFKC", letter)
        return plain if len(plain) == 1 else letter
    return letter


def _letter(code: int) -> str:
    """The character of a code; half of a pair is a space of its own, because no recogniser takes it."""
    return "\n" if 0xD800 <= code <= 0xDFFF else chr(code)
