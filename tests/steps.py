r"""Counts the steps of regular expressions. A step is one try to match a part of a pattern at one character.

    with Steps(module, …) as steps:       # replaces the modules' patterns and their names `re`
        module.function(text)
    steps.count

The module `re` doesn't say how much work a match was, and a test must not measure seconds. So each search is
done a second time by a plain backtracking matcher, which follows the parse tree of `re`. It has none of the
shortcuts of `re`, so its count is an upper bound. It must find the same matches as `re`."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from re import _constants as sre
from re import _parser as parser

CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_NOT_WORD: r"\W"}
ASCII, DOTALL, IGNORECASE, MULTILINE = map(int, (re.ASCII, re.DOTALL, re.IGNORECASE, re.MULTILINE))
SINGLE = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
LIMIT = 300_000  # steps of one search


@lru_cache(None)
def tree(pattern):
    return list(parser.parse(pattern.pattern, pattern.flags))


@lru_cache(None)
def listed(part):
    """Returns a part of a parse tree as a list."""
    return list(part)


@lru_cache(None)
def among(kinds, found, flags):
    """Returns whether a character is in a set such as [^a-z]."""
    negated = kinds[0][0] is sre.NEGATE
    for kind, value in kinds[negated:]:
        if (kind is sre.LITERAL and ord(found) == value
                or kind is sre.RANGE and value[0] <= ord(found) <= value[1]
                or kind is sre.CATEGORY and re.match(CATEGORIES[value], found, flags & ASCII)):
            return not negated
    return negated


class Matcher:
    def __init__(self, pattern: re.Pattern, text: str):
        self.tree = tree(pattern)
        self.flags, self.text, self.steps, self.groups = pattern.flags, text, 0, {}

    def spans(self, whole: bool = False, first: bool = False) -> list[tuple[int, int]]:
        """Returns the spans of all matches, as finditer does. whole: only a match of the whole text;
        first: only the first match."""
        found, at, forbidden = [], 0, None
        op, arg = self.tree[0]
        while at <= len(self.text):
            if op in SINGLE and not self.one(op, arg, at, self.flags):
                self.steps += 1
                at += 1
                if whole:
                    break
                continue
            self.groups, end = {}, []
            def done(j, at=at, end=end, forbidden=forbidden):
                fits = j == len(self.text) if whole else (at, j) != forbidden
                return fits and (end.append(j) or True)
            if self.match(self.tree, at, self.flags, done):
                found.append((at, end[0]))
                # An empty match may not come directly after another match at the same place.
                forbidden, at = (end[0], end[0]), end[0]
                if first:
                    break
            else:
                at += 1
            if whole:
                break
        return found

    def match(self, items, at, flags, then):
        """Returns whether the items match at a position, and `then` accepts the position after them."""
        if not items:
            return then(at)
        self.steps += 1
        assert self.steps < LIMIT, f"{self.text[:50]!r} needs more than {LIMIT} steps"
        (op, arg), rest = items[0], items[1:]
        def follow(j):
            return self.match(rest, j, flags, then)
        if op in SINGLE:
            return self.one(op, arg, at, flags) and follow(at + 1)
        if op is sre.BRANCH:
            return any(self.match(listed(branch), at, flags, follow) for branch in arg[1])
        if op is sre.SUBPATTERN:
            group, add, remove, inner = arg
            inside = (flags | add) & ~remove
            return self.match(listed(inner), at, inside, lambda j: self.close(group, at, j, follow))
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = arg
            inner = listed(inner)
            if len(inner) == 1 and inner[0][0] in SINGLE:
                ends = self.run(inner[0], at, low, high, flags)
                return any(map(follow, reversed(ends) if op is sre.MAX_REPEAT else ends))
            return self.repeat(inner, at, low, high, flags, follow, op is sre.MAX_REPEAT)
        if op is sre.POSSESSIVE_REPEAT:
            low, high, inner = arg
            count = 0
            while count < high and (end := self.end(listed(inner), at, flags)) not in (None, at):
                count, at = count + 1, end
            return count >= low and follow(at)
        if op is sre.ATOMIC_GROUP:
            end = self.end(listed(arg), at, flags)
            return end is not None and follow(end)
        if op in (sre.ASSERT, sre.ASSERT_NOT):
            direction, inner = arg
            start = at - inner.getwidth()[0] if direction < 0 else at
            ahead = (lambda j: j == at) if direction < 0 else (lambda j: True)
            holds = start >= 0 and self.match(listed(inner), start, flags, ahead)
            return holds == (op is sre.ASSERT) and follow(at)
        if op is sre.AT:
            return self.place(arg, at, flags) and follow(at)
        if op is sre.GROUPREF:
            known = self.groups.get(arg)
            return known is not None and self.text.startswith(known, at) and follow(at + len(known))
        if op is sre.GROUPREF_EXISTS:
            group, yes, no = arg
            return self.match(list(yes if group in self.groups else no or []), at, flags, follow)
        raise AssertionError(f"the matcher does not know {op}")

    def one(self, op, arg, at, flags):
        if at >= len(self.text):
            return False
        found = self.text[at]
        if op is sre.ANY:
            return found != "\n" or bool(flags & DOTALL)
        if flags & IGNORECASE:
            return any(self.fits(op, arg, c, flags) for c in (found.lower(), found.upper()))
        return self.fits(op, arg, found, flags)

    def fits(self, op, arg, found, flags):
        if op is sre.LITERAL:
            return ord(found) == arg
        if op is sre.NOT_LITERAL:
            return ord(found) != arg
        return among(tuple(arg), found, flags)

    def place(self, where, at, flags):
        text = self.text
        if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            return at == 0 or bool(flags & MULTILINE) and text[at - 1] == "\n"
        if where is sre.AT_END:
            return text[at:] in ("", "\n") or bool(flags & MULTILINE) and text[at] == "\n"
        letter = re.compile(r"\w", flags & ASCII).match
        bounds = bool(at and letter(text[at - 1])) != bool(at < len(text) and letter(text[at]))
        return bounds == (where is sre.AT_BOUNDARY)

    def run(self, item, at, low, high, flags):
        """Returns the positions at which a repeated character may end."""
        end = at
        while end - at < high and self.one(*item, end, flags):
            end += 1
        self.steps += end - at
        return range(at + low, end + 1)

    def repeat(self, inner, at, low, high, flags, follow, greedy, count=0):
        def again():
            return count < high and self.match(inner, at, flags, lambda j: j != at and self.repeat(
                inner, j, low, high, flags, follow, greedy, count + 1))
        if greedy:
            return again() or count >= low and follow(at)
        return count >= low and follow(at) or again()

    def end(self, inner, at, flags):
        """Returns where the first match of a group ends that never tries a second way."""
        ends = []
        self.match(inner, at, flags, lambda j: ends.append(j) or True)
        return ends[0] if ends else None

    def close(self, group, start, end, follow):
        before = dict(self.groups)
        if group is not None:
            self.groups[group] = self.text[start:end]
        if follow(end):
            return True
        self.groups = before
        return False


class Counted:
    """A pattern whose steps are counted."""

    def __init__(self, pattern, counter):
        self.real, self.counter = re.compile(pattern), counter

    def count(self, text, **how):
        matcher = Matcher(self.real, text)
        found = matcher.spans(**how)
        self.counter.count += matcher.steps
        return found

    def _all(self, text):
        counted = self.count(text)  # before `re`, which might hang
        assert counted == [m.span() for m in self.real.finditer(text)], self.real.pattern

    def _first(self, search, text, **how):
        counted = self.count(text, **how)
        match = search(text)
        assert counted == ([match.span()] if match else []), self.real.pattern
        return match

    def sub(self, new, text):
        self._all(text)
        return self.real.sub(new, text)

    def split(self, text):
        self._all(text)
        return self.real.split(text)

    def findall(self, text):
        self._all(text)
        return self.real.findall(text)

    def finditer(self, text):
        self._all(text)
        return self.real.finditer(text)

    def search(self, text):
        return self._first(self.real.search, text, first=True)

    def fullmatch(self, text):
        return self._first(self.real.fullmatch, text, whole=True)


class Steps:
    """Counts the steps of some modules' patterns, also in their lists and dicts."""

    def __init__(self, *modules):
        self.count, self.before = 0, [(module, dict(vars(module))) for module in modules]

    def counted(self, value):
        if isinstance(value, re.Pattern):
            return Counted(value, self)
        if isinstance(value, tuple) and any(isinstance(v, re.Pattern) for v in value):
            return tuple(map(self.counted, value))
        if isinstance(value, list):
            return [self.counted(v) for v in value]
        if type(value) is dict:
            return {k: self.counted(v) for k, v in value.items()}
        return value

    def __getattr__(self, name):
        """Stands for the module's name `re`: re.sub(pattern, new, text)."""
        if name in ("sub", "split", "findall", "finditer", "search", "fullmatch"):
            return lambda pattern, *rest: getattr(Counted(pattern, self), name)(*rest)
        return getattr(re, name)

    def __enter__(self):
        for module, before in self.before:
            for name, value in before.items():
                if not name.startswith("__"):
                    setattr(module, name, self.counted(value))
            module.re = self
        self.depth = sys.getrecursionlimit()
        sys.setrecursionlimit(10_000)
        return self

    def __exit__(self, *_):
        sys.setrecursionlimit(self.depth)
        for module, before in self.before:
            for name, value in before.items():
                setattr(module, name, value)
