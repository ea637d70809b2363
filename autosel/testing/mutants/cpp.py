"""Faults in C++ source: changes of one token or statement, by rules that use the language but no kernel's meaning.

Argument checks (AUTOSEL_CHECK), prefetches, preprocessor lines and comments are left out, because a fault in them does
not change a result. The rules recognise some changes that make a correct kernel; `SourceChange.right` gives the reason.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[a-zA-Z]*)|(?P<name>[A-Za-z_]\w*)
    |(?P<sign><<=|>>=|->|\+\+|--|&&|\|\||[-+*/%&|^<>=!]=|<<|>>|::|[^\s\w])""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_RELATIONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<<": ">>", "&&": "||", "||": "&&"}
_ASSIGNED = {"+=": "-=", "-=": "+=", "*=": "/=", "++": "--"}
_NARROWER = {"int64_t": "int16_t", "double": "float", "size_t": "uint16_t", "int32_t": "int16_t"}
_EXTREMES = {"max": "min", "min": "max", "_mm512_max_ps": "_mm512_min_ps", "_mm512_min_ps": "_mm512_max_ps"}
_UNSEEN = ("AUTOSEL_CHECK", "AUTOSEL_THROW", "AUTOSEL_EXPORT", "static_assert", "prefetch", "alignas")
_NO_STATEMENT = {"return", "using", "template", "struct", "typedef", "case", "break", "else", "public", "private"}
_COMMUTE = {"fma", "dot", "max", "min"}  # their first two arguments commute
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceChange:
    """A change that replaces source[start:end] by `text`. `rule`: the rule that makes it. `name`: unique in a file."""

    start: int
    end: int
    text: str
    line: int
    rule: str
    name: str
    right: str = ""  # why the changed kernel is correct; "" if no rule recognises that

    def apply(self, source: str) -> str:
        """Return the changed source, with the same number of lines."""
        gone = source[self.start : self.end].count("\n") - self.text.count("\n")
        return source[: self.start] + self.text + "\n" * gone + source[self.end :]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def changes(source: str) -> list[SourceChange]:
    tokens = [
        _Token(kind=m.lastgroup or "", text=m[0], start=m.start(), end=m.end())
        for m in _TOKEN.finditer(source)
        if m.lastgroup not in ("comment", "directive")
    ]
    return _named(source, _Rules(source, tokens))


def _named(source: str, rules: _Rules) -> list[SourceChange]:
    made, seen = [], dict[str, int]()
    for rule, start, end, text in sorted(rules.all(), key=lambda c: (c[1], c[2], c[0])):
        line = source.count("\n", 0, start)
        whole = " ".join(source.split("\n")[line].split())
        name = f"{whole} | {rule}: {_short(source[start:end])} to {_short(text)}"
        seen[name] = seen.get(name, 0) + 1
        name += f" #{seen[name]}" if seen[name] > 1 else ""
        right = rules.right(rule, start)
        made.append(SourceChange(start=start, end=end, text=text, line=line + 1, rule=rule, name=name, right=right))
    return made


def _short(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= 40 else f"{joined[:37]}..."


class _Rules:
    def __init__(self, source: str, tokens: Sequence[_Token]) -> None:
        self.source, self.tokens = source, tokens
        self.partner, self.parent = _brackets(tokens)
        self.opener = {close: opening for opening, close in self.partner.items()}
        self.starts = [t.start for t in tokens]
        self.hidden = self._unseen()
        self.checking = self._checking()

    def all(self) -> Iterator[tuple[str, int, int, str]]:
        for at, token in enumerate(self.tokens):
            if at not in self.hidden:
                yield from self._of_token(at, token)
                yield from self._of_keyword(at, token)
                yield from self._swapped(at, token)
                yield from self._deleted(at)

    def _unseen(self) -> set[int]:
        """Return the tokens of statements that do not affect results, and of the sizes of arrays."""
        found: set[int] = set()
        for at, token in enumerate(self.tokens):
            if token.kind == "name" and any(word in token.text for word in _UNSEEN):
                last = next((i for i in range(at, len(self.tokens)) if self.tokens[i].text in ";{"), at)
                found.update(range(self._begin(at), last + 1))
            if token.text == "[" and self._declares(at):
                found.update(range(at, self.partner.get(at, at) + 1))
        return found

    def _begin(self, at: int) -> int:
        """Return the first token of the statement that contains a token."""
        while at and self._text(at - 1) not in (";", "{", "}", "("):
            at = self.opener.get(at - 1, at - 1)
        return at

    def _declares(self, at: int) -> bool:
        """Return True if this bracket holds the size in a declaration of an array."""
        if self._text(at - 1) == "]":
            return self._declares(self.opener[at - 1])
        return (
            at > 1
            and self.tokens[at - 1].kind == "name"
            and ((self.tokens[at - 2].kind == "name" and self._text(at - 2) != "return") or self._text(at - 2) == ">")
        )

    def _of_token(self, at: int, token: _Token) -> Iterator[tuple[str, int, int, str]]:
        spaced = self.source[token.start - 1] == " " and self.source[token.end : token.end + 1] in (" ", "\n")
        for rule, table in (("relation", _RELATIONS), ("arithmetic", _ARITHMETIC)):
            if token.text in table and spaced:
                yield rule, token.start, token.end, table[token.text]
        if token.text in _ASSIGNED:
            yield "assignment", token.start, token.end, _ASSIGNED[token.text]
        if token.kind == "number":
            yield "constant", token.start, token.end, f"({token.text} + 1)"
            yield "constant", token.start, token.end, f"({token.text} - 1)"
        if token.text in _NARROWER:
            yield "narrowed", token.start, token.end, _NARROWER[token.text]
        if token.text in _EXTREMES and self._text(at + 1) == "(":
            yield "extreme", token.start, token.end, _EXTREMES[token.text]
        if token.text == "[" and at and (self.tokens[at - 1].kind == "name" or self._text(at - 1) in ")]"):
            inside = self._between(at)
            if inside.strip():
                yield "index", token.end, self.tokens[self.partner[at]].start, f"({inside}) + 1"

    def _of_keyword(self, at: int, token: _Token) -> Iterator[tuple[str, int, int, str]]:
        """Negate conditions, and leave out branches and loops."""
        if token.text not in ("if", "while", "for") or self._text(at + 1) != "(":
            return
        first, last = self.tokens[at + 1].end, self.tokens[self.partner.get(at + 1, at + 1)].start
        parts = self._split(at + 1, ";")
        if token.text == "for" and len(parts) == 3:
            yield "loop left out", *parts[1], "false"
        elif token.text != "for":
            start = parts[-1][0]  # after an initialiser
            if token.text == "if":
                yield "negated", start, last, f"!({self.source[start:last]})"
            if start == first:
                yield "branch left out", start, last, "false"

    def _swapped(self, at: int, token: _Token) -> Iterator[tuple[str, int, int, str]]:
        """Exchange an argument of a call with the next one."""
        if token.kind != "name" or self._text(at + 1) != "(" or token.text in ("if", "while", "for", "switch"):
            return
        parts = self._split(at + 1, ",")
        for (a, b), (c, d) in list(pairwise(parts))[token.text in _COMMUTE :]:
            one, other = self.source[a:b].strip(), self.source[c:d].strip()
            if one != other and not re.match(r"(const )?\w+(<.*>)?[ *&]+\w+$", one):  # not parameters
                yield "swapped", a, d, f"{other}, {one}"

    def _deleted(self, at: int) -> Iterator[tuple[str, int, int, str]]:
        """Delete a statement that assigns or calls."""
        if not at or self._text(at - 1) not in (";", "{", "}") or self.tokens[at].kind != "name":
            return
        if self.tokens[at].text in _NO_STATEMENT or self.tokens[at + 1].kind == "name":
            return
        end = at
        while end < len(self.tokens) and self._text(end) not in (";", "{", "}"):
            end = self.partner.get(end, end) + 1
        words = [t.text for t in self.tokens[at:end]]
        if end == len(self.tokens) or self._text(end) != ";" or re.match(r".*(\w|>)[ *&]+\w+ =", " ".join(words)[:40]):
            return
        if self._text(at + 1) in ("(", "=", "[", "+=", "-=", "*=", ".", "->", "++") and "if" not in words:
            yield "deleted", self.tokens[at].start, self.tokens[end].start, "(void)0"

    # --- changes that make a correct kernel ---------------------------------------------------------------------------

    def right(self, rule: str, start: int) -> str:
        """Return the reason if a rule recognises a change that makes a correct kernel; else ""."""
        at = bisect_left(self.starts, start)
        outer = self.parent[at]
        before = self._text(outer - 1)
        if at in self.checking:
            return "a loop that only checks arguments"
        if rule == "constant" and before == "parallel":
            return "how finely work is shared out"
        if self._text(self._begin(at)) == "threads" and self._text(self._begin(at) + 1) == "=":
            return "how many threads work"
        if rule == "swapped" and before.endswith("madd_ps") and at == outer + 1:
            return "a product, which commutes"
        if rule == "branch left out" and self._words(self.partner.get(outer, at) + 1)[:2] == ["threads", "="]:
            return "how many threads work"
        if rule == "narrowed" and self._text(at + 1) in (",", ")") and self._text(at - 1) in (",", "("):
            return "an argument without a name, which nothing reads"
        if rule == "narrowed" and (self._text(at + 1) == "threads" or self._in_a_tail(at)):
            return "a number of threads, or less than a vector's length"
        if rule == "relation" and self._text(at) == "<" and before == "if" and self._is_tail(self.partner[outer] + 1):
            return "a tail of no elements, all padding"
        if rule == "branch left out" and self._returns_an_instance(self.partner.get(outer, at) + 1):
            return "another instance of the same template"
        return ""

    def _in_a_tail(self, at: int) -> bool:
        """Return True within the parameters or body of a function that loads or stores part of a vector."""
        while (at := self.parent[at]) >= 0:
            opening = at if self._text(at) == "(" else self.opener.get(at - 1, -1)
            if self._text(at) in "({" and self._text(opening - 1).endswith("_tail"):
                return True
        return False

    def _is_tail(self, at: int) -> bool:
        """Return True if the statement or block that begins here loads or stores part of a vector."""
        return any(self._text(i).endswith("_tail") for i in range(at, self._end(at)))

    def _returns_an_instance(self, at: int) -> bool:
        words = self._words(at)
        return words[:1] == ["return"] and words[2:3] == ["<"] and words[-2:] == [">", ";"]

    def _words(self, at: int) -> list[str]:
        return [self._text(i) for i in range(at, self._end(at) + 1)]

    def _end(self, at: int) -> int:
        """Return the last token of the statement or block that begins here; of an `if` or loop, with its body."""
        while self._text(at) in ("if", "for", "while", "constexpr"):
            at += 1
            if self._text(at) == "(":
                at = self.partner.get(at, at) + 1
        while at < len(self.tokens) and self._text(at) not in ";{":
            at = self.partner.get(at, at) + 1
        return self.partner.get(at, at)

    def _checking(self) -> set[int]:
        """Return the tokens of loops that contain only checks of arguments and declarations."""
        found: set[int] = set()
        for at, token in enumerate(self.tokens):
            if token.text == "for" and at not in found:
                own = range(at, self._end(at) + 1)
                if any(self._text(i) == "AUTOSEL_CHECK" for i in own) and not any(map(self._does_more, own)):
                    found.update(own)
        return found

    def _does_more(self, at: int) -> bool:
        """Return True for a token outside checks that assigns to an existing variable, calls or returns."""
        text = self._text(at)
        if at in self.hidden:
            return False
        if text == "=" and self.tokens[at - 2].kind == "name":  # a type and a name: a declaration
            return False
        calls = text == "(" and self.tokens[at - 1].kind == "name" and self._text(at - 1) not in ("for", "if", "while")
        return calls or text in ("=", "+=", "-=", "*=", "/=", "return")

    # --- help ---------------------------------------------------------------------------------------------------------

    def _text(self, at: int) -> str:
        return self.tokens[at].text if 0 <= at < len(self.tokens) else ""

    def _between(self, opening: int) -> str:
        close = self.partner.get(opening)
        return "" if close is None else self.source[self.tokens[opening].end : self.tokens[close].start]

    def _split(self, opening: int, by: str) -> list[tuple[int, int]]:
        """Split the text between an opening bracket and its partner at the separators of that level."""
        close = self.partner.get(opening)
        if close is None:
            return []
        parts, begin, at = [], self.tokens[opening].end, opening + 1
        while at < close:
            if self._text(at) == by:
                parts.append((begin, self.tokens[at].start))
                begin = self.tokens[at].end
            at = self.partner.get(at, at) + 1
        return [*parts, (begin, self.tokens[close].start)]


def _brackets(tokens: Sequence[_Token]) -> tuple[dict[int, int], list[int]]:
    """Return the closing bracket of each opening one; and the innermost open bracket, or -1, of each token and of the
    end."""
    partner, parent, open_ = dict[int, int](), list[int](), list[int]()
    for at, token in enumerate(tokens):
        if token.text in _CLOSING.values() and open_:
            partner[open_.pop()] = at
        parent.append(open_[-1] if open_ else -1)
        if token.text in _CLOSING:
            open_.append(at)
    return partner, [*parent, -1]
