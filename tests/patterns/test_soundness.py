"""Matches may be replaced: random programs with calls in their place give the same numbers."""

from __future__ import annotations

import tempfile
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_rewrite.patterns.search import Match
from tests.finding import HEAD, forward, selection


def sum_relu(p, q):
    return F.relu(p + q)


def product_sum(p, q, r):
    return p * q + r


def twice(p):
    return F.relu(p) + p


def dropped(p, q):
    return F.dropout(p, 0.5, True) * q


def two_drops(p, q):
    return F.dropout(p, 0.5, True) + F.dropout(q, 0.5, True)


def chosen(p, q, flag):
    return F.relu(p + q if flag else p)


def diamond(p, q):
    s = p * q
    return F.relu(s) - s


def sum_and_relu(p, q):
    s = p + q
    return F.relu(s), s


def side_by_side(p, q, r):
    return p * r, q * r


def drop_and_sum(p, q):
    s = F.dropout(p, 0.5, True) + q
    return s, F.relu(s)


SEVERAL = [sum_and_relu, side_by_side, drop_and_sum]
PATTERNS = [sum_relu, product_sum, twice, dropped, two_drops, chosen, diamond]
NAMES = st.sampled_from(["a", "b", "c", "x", "y"])
EXPRESSIONS = st.recursive(
    NAMES,
    lambda inner: st.one_of(
        st.builds("({} + {})".format, inner, inner),
        st.builds("({} * {})".format, inner, inner),
        st.builds("({} - {})".format, inner, inner),
        st.builds("F.relu({})".format, inner),
        st.builds("{}.t()".format, NAMES),
        st.builds("F.dropout({}, 0.5, True)".format, inner),
        st.builds("({} if flag else {})".format, inner, inner),
        st.builds("self.drop({})".format, inner),
        st.builds("helper({}, {})".format, inner, inner),
        st.builds("({0} + {0})".format, NAMES),
    ),
    max_leaves=4,
)
SIMPLE = st.one_of(
    st.builds("{} = {}".format, NAMES, EXPRESSIONS),
    st.builds("{} = {}".format, NAMES, EXPRESSIONS),
    st.builds("{} += {}".format, NAMES, EXPRESSIONS),
    st.builds("{}.mul_({})".format, NAMES, NAMES),
    st.builds("{}[0] = {}[1]".format, NAMES, NAMES),
    st.builds("{}, {} = {}, {}".format, NAMES, NAMES, EXPRESSIONS, EXPRESSIONS),
    st.builds("self.kept = {}".format, NAMES),
    st.builds("{} = self.kept".format, NAMES),
    st.builds("later = lambda: {} + 1".format, NAMES),
)
# The two halves of a pattern, and anything in between.
HALVES = st.sampled_from(
    [
        ("{0} = {1} + {2}", "{3} = F.relu({0})"),
        ("{0} = {1} * {2}", "{3} = {0} + {4}"),
        ("{0} = F.relu({1})", "{3} = {1} + {0}"),
        ("{0} = F.dropout({1}, 0.5, True)", "{3} = {0} * {4}"),
        ("{0} = F.dropout({1}, 0.5, True)", "{3} = {0} + F.dropout({2}, 0.5, True)"),
        ("if flag:\n    {1} += {2}", "{3} = F.relu({1})"),
        ("if flag:\n    {0} = {1} + {2}\nelse:\n    {0} = {1}", "{3} = F.relu({0})"),
        ("{0} = {1} * {2}", "{3} = F.relu({0}) - {0}"),
        ("{0} = helper({1}, {2})", "{3} = {0} + {4}"),
        ("{0} = {1} + {2}\n{1} = {0}", "{3} = F.relu({0})"),
        ("{0} = {1} * {2}", "{3} = {4} * {2}"),
        ("{0} = F.dropout({1}, 0.5, True) + {2}", "{3} = {4} * F.relu({0})"),
    ]
)
SPLIT = st.builds(
    lambda halves, between, names: "\n".join(
        [halves[0].format(*names), *between, halves[1].format(*names)]
    ),
    HALVES,
    st.lists(SIMPLE, max_size=1),
    st.lists(NAMES, min_size=5, max_size=5),
)
BLOCK = st.lists(SIMPLE, min_size=1, max_size=2).map("\n".join)


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")


STATEMENTS = st.one_of(
    SIMPLE,
    SIMPLE,
    SPLIT,
    SPLIT,
    SPLIT,
    BLOCK.map(lambda body: f"if flag:\n{indented(body)}"),
    st.tuples(BLOCK, BLOCK).map(
        lambda way: f"if flag:\n{indented(way[0])}\nelse:\n{indented(way[1])}"
    ),
    BLOCK.map(lambda body: f"for _ in range(2):\n{indented(body)}"),
    BLOCK.map(lambda body: f"with torch.no_grad():\n{indented(body)}"),
)
PROGRAMS = st.lists(STATEMENTS, min_size=2, max_size=7).map("\n".join)
START = "a, b, c = x * 2, y + 1, x - y\nself.kept = a\nlater = lambda: 0\n"
HELPER = "def helper(u, v):\n    return F.relu(u + v)\n\n\n"


def replaced(text: str, match: Match) -> str:
    """The program with a call of the pattern in the place of a match."""
    call = ", ".join(f"{name}={operand}" for name, operand in match.operands.items())
    place, span = match.replaced, match.file.span
    begin, end = span(place.node)
    if place.above:
        pad = " " * place.node.col_offset
        edits = [(begin, begin, f"{place.target}wanted({call})\n{pad}")]
    else:
        edits = [(begin, end, f"{place.target}wanted({call})")]
    edits += [(*span(statement), "pass") for statement in place.removed]
    edits += [(*span(node), name) for node, name in place.reads]
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def outcome(text: str, pattern, flag: bool) -> list[torch.Tensor]:
    """What a program returns, and what becomes of its inputs."""
    space = {"wanted": pattern}
    exec(compile(text, "program", "exec"), space)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, 3, generator=generator) for _ in range(2)]
    torch.manual_seed(0)
    model = space["Model"]()
    given = [x.clone() for x in inputs]
    return [*model(*given, flag), *given]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(PROGRAMS, st.sampled_from(PATTERNS), NAMES)
def test_a_match_may_be_replaced(program, pattern, returned):
    check(program, pattern, returned)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(PROGRAMS, st.sampled_from(SEVERAL))
def test_a_match_of_several_results_may_be_replaced(program, pattern):
    check(program, pattern, "a, b, c, x, y")


def check(program, pattern, returned):
    """Replaces each match by itself, and compares the numbers."""
    body = f"{START}{program}\nreturn {returned}, self.kept, later()"
    source = HELPER + forward(body, "self, x, y, flag", "self.drop = nn.Dropout(0.5)")
    with tempfile.TemporaryDirectory() as folder:
        found = selection(Path(folder), source).find(pattern)
    for match in found:
        if match.function != "forward" or not match.replaced.whole:
            continue
        text = replaced(HEAD + source, match)
        for flag in (True, False):
            try:
                expected = outcome(HEAD + source, pattern, flag)
            except RuntimeError:  # the program itself is wrong: writes to what it reads, say
                continue
            got = outcome(text, pattern, flag)
            for one, other in zip(expected, got, strict=True):
                assert torch.allclose(torch.as_tensor(one), torch.as_tensor(other)), text
