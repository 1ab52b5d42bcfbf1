"""Reading JSON text exactly: the one parser whose answers and errors both kernels give.

The pure kernel always reads with it. The compiled kernel reads with a faster parser where that is known to
give the same answer, and comes here for the rest and for every error, so that both report the same ones.

Exact means: integers of any size keep all digits, a number with a fraction or an exponent is a float, halves
of surrogate pairs survive, a repeated name keeps its last value. Strict means: RFC 8259 and nothing more,
UTF-8 without a byte order mark, no `NaN`, no control character in a string, no number beyond the range of a
float, at most `MAX_DEPTH` levels.

Invariant: one loop, no recursion; the containers around the cursor are on an explicit stack.
"""

from __future__ import annotations

import re
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]  # typeshed omits scanstring
from math import isinf
from typing import Any

from loomfast import _digits
from loomfast._errors import JsonTextError, TooDeepError
from loomfast._jsonform import MAX_DEPTH, Step, path_text

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = (("true", True), ("false", False), ("null", None))


def parse(data: bytes) -> object:
    """Return the value that `data`, UTF-8 JSON text, spells; every list and dict in it is new.

    Raises `JsonTextError` (with the offset in bytes) and `TooDeepError`.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonTextError(error.start, "invalid UTF-8") from None
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        # The open containers, outermost first, and the name under which the next value of each goes.
        self.open: list[Any] = []
        self.names: list[str] = []

    def run(self) -> object:
        text = self.text
        self.space()
        while True:
            char = text[self.at : self.at + 1]
            value: Any
            if char == "[" or char == "{":
                value = self.enter(char)
                if value is None:
                    continue
            elif char == '"':
                value = self.string()
            else:
                value = self.scalar()
            # `value` is whole: put it where it belongs, and close what ends with it.
            while True:
                self.space()
                if not self.open:
                    if self.at < len(text):
                        raise self.error("text after the end of the value")
                    return value
                top = self.open[-1]
                if type(top) is list:
                    top.append(value)
                else:
                    top[self.names[-1]] = value
                char = text[self.at : self.at + 1]
                if char == ",":
                    self.at += 1
                    self.space()
                    if type(top) is dict:
                        self.names[-1] = self.name()
                    break
                if char != ("]" if type(top) is list else "}"):
                    raise self.error("expected ',' or ']'" if type(top) is list else "expected ',' or '}'")
                self.at += 1
                value = self.open.pop()
                self.names.pop()

    def enter(self, char: str) -> object:
        """Open an array or an object; return it if empty, else None with the cursor at its first value."""
        if len(self.open) == MAX_DEPTH:
            kind = "array" if char == "[" else "object"
            raise TooDeepError(path_text(self.steps()), kind, f"nested deeper than {MAX_DEPTH} levels")
        self.at += 1
        self.space()
        end = self.text[self.at : self.at + 1]
        if char == "[":
            if end == "]":
                self.at += 1
                return []
            self.open.append([])
            self.names.append("")
        else:
            if end == "}":
                self.at += 1
                return {}
            name = self.name()
            self.open.append({})
            self.names.append(name)
        return None

    def steps(self) -> list[Step]:
        pairs = zip(self.open, self.names, strict=True)
        return [len(top) if type(top) is list else name for top, name in pairs]

    def space(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it always matches

    def name(self) -> str:
        if self.text[self.at : self.at + 1] != '"':
            raise self.error("expected a name in double quotes")
        name = self.string()
        self.space()
        if self.text[self.at : self.at + 1] != ":":
            raise self.error("expected ':'")
        self.at += 1
        self.space()
        return name

    def string(self) -> str:
        try:
            value, self.at = scanstring(self.text, self.at + 1, True)
        except JSONDecodeError as error:
            self.at = error.pos
            raise self.error(error.msg[0].lower() + error.msg[1:]) from None
        return str(value)

    def scalar(self) -> object:
        found = _NUMBER.match(self.text, self.at)
        if found is not None:
            whole, fraction, exponent = found.groups()
            number = _digits.integer(whole) if fraction is exponent is None else float(found[0])
            if type(number) is float and isinf(number):
                raise self.error("a number beyond the range of a float")
            self.at = found.end()
            return number
        for word, value in _WORDS:
            if self.text.startswith(word, self.at):
                self.at += len(word)
                return value
        raise self.error("expected a value" if self.at < len(self.text) else "the text ends too early")

    def error(self, reason: str) -> JsonTextError:
        return JsonTextError(len(self.text[: self.at].encode("utf-8")), reason)
