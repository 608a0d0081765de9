"""`find`: finds a computation in the `forward` of a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.fusion import known_branches
from slapo_rewrite.fusion.match_rules import pattern_for, scopes_for
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.search import CallSite, Matches, find_calls, path_predicate
from slapo_rewrite.primitives.base import Call, Example, Question, Refusal

MLP = """\
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.bias = nn.Parameter(torch.zeros(4 * width))
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.up(x)
        y = self.bias + y
        return x + self.down(self.act(y))
"""

MODEL = setting(
    "MLP(8)",
    imports="from torch.nn import functional as F\n\nfrom slapo_rewrite import call_module\n",
)
SAMPLE = Sample(MLP, MODEL)


BLOCK = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, mask=None):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        if mask is not None:
            scores = scores + mask
        x = x + self.dropout(F.softmax(scores, dim=-1) @ x)
        return self.norm(x), x
"""
WAYS = (
    MODEL.replace("m.MLP", "m.Block")
    .replace("(2, 8)", "(2, 3, 8)")
    .replace("outputs.", "outputs[0].")
    .replace("import torch\n", "import torch\nfrom torch import nn\n", 1)
    + """\
def attention(query, key, value):
    return torch.softmax(torch.matmul(query, key), -1) @ value


def add_and_norm(x, y, shape, weight, bias, eps):
    total = x + y
    return F.layer_norm(total, shape, weight, bias, eps), total


class DropoutAndAdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)  # of any rate

    def forward(self, x, residual):
        return self.drop(x) + residual


def schedule(s):
    # A function, where the branch goes one way; without `concrete_args` it stands in between.
    print(s.find(attention, concrete_args={"mask": None}))
    # A function of several results.
    (match,) = s.find(add_and_norm)
    print(match.lines, [result.operation for result in match.results])
    # A class: its submodules stand for submodules of the same classes.
    (match,) = s.find(DropoutAndAdd)
    print(match.calls, match.operands["residual"])
    # Calls of submodules by their path, and those of them that work on one operand.
    print([match.calls for match in s.find("query|key").groups[0]])
    # The same as a part of a pattern.
    print(s.find(lambda x: call_module("query|key", x).transpose(-1, -2)))
    # Calls that a function picks.
    print(s.find(where=lambda call: call.operation == "softmax"))
"""
)


class Find(Question):
    """Find a computation in a module's `forward`.

    A pattern is a function whose body is the computation and whose parameters match any value; a
    module class, whose submodules match submodules of the same class; or a regular expression,
    which matches calls of submodules by their path. Patterns match the data flow: local names,
    temporaries, unrelated statements in between, the spelling of an operation (`nn.GELU()(x)`,
    `F.gelu(x)`, an activation of transformers), keywords and the order of commutative operands make
    no difference. Calls of functions and submodules whose body is one value are expanded: a norm
    class of the file may be part of a larger pattern.

    A match can be replaced by one call, at the place of its result. So there is none if an inner
    value is used elsewhere as well, if a branch or a loop is in between, if an operand is
    overwritten or rebound in between, or if random numbers would be drawn in another order. A
    branch does not count if its condition is known: it depends on a constant of the module, or on
    an argument with a value in `concrete_args`, such as `{"mask": None}`, or `{"mask": True}` for
    an argument that is passed. Before such a match is replaced, the code around the branch is moved
    into both of its arms, so that the text is right for either condition.
    A pattern that returns a tuple has several results, which other code may use. The call is then
    inserted after all operands and before any use of a result: `out, residual = call(...)`.

    The result is a sequence of matches, false if it is empty: `match.operands`, `.lines`,
    `.spans`, `.calls`, `.results`, `.replaced`; `found.groups` are groups of matches on one
    operand, and `found.nearest` is the nearest miss. Functions of the file and methods that
    `forward` names are searched as well; `match.function` is the name of the function.

    Rewrite:
        Nothing is rewritten.

    Shapes: Not checked.
    Numerics: A match computes bitwise the same as the pattern, from the same operands.
    State: Unchanged.

    Raises:
        SR210 the pattern is not a pure computation.
        SR305 the module was replaced by one whose source is not known.

    Source: Slapo's `find`; Chen et al., arXiv 2302.08005.
    """

    name = "find"
    examples = (
        Example(
            MLP,
            MODEL
            + """\
def bias_gelu(x, bias):
    return F.gelu(x + bias)


def schedule(s):
    for match in s.find(bias_gelu):
        print(match)
        print(match.replaced.removed[0].lineno, "goes")
    print(s.find(lambda x: F.gelu(call_module("up", x))))
""",
            printed="""\
the model, forward, line 15-16: x = y, bias = self.bias
15 goes
`the lambda` is not found in the model, forward: the pattern has a call of `up` where the model has `add` (1 of 2 operations found)
   --> source_0.py:15:13
   |
15 |         y = self.bias + y
   |             ^^^^^^^^^^^^^ `add` here
   ::: s.py:27:35
   |
27 |     print(s.find(lambda x: F.gelu(call_module("up", x))))
   |                                   ^^^^^^^^^^^^^^^^^^^^ a call of `up`
""",  # noqa: E501
            about="what is found, and why something is not",
        ),
        Example(
            BLOCK,
            WAYS,
            printed="""\
the model, forward, line 15-18, through `if mask is not None`: query = self.query(x), key = self.key(x).transpose(-1, -2), value = x
[18, 19] ['layer_norm', 'add']
['dropout'] x
[['query'], ['key']]
the model, forward, line 15: x = x
the model, forward, line 18: input = scores, dim = -1, dtype = None
""",  # noqa: E501
            about="the ways to say what is looked for",
        ),
    )
    refusals = (
        Refusal(
            MLP,
            MODEL
            + """\
def leaky(x):
    if x > 0:
        return x
    return 0.1 * x


def schedule(s):
    s.find(leaky)
""",
            "SR210",
        ),
        SAMPLE.refused("SR206", 's.find("up(")'),
        SAMPLE.refused("SR206", "s.find(3)"),
        SAMPLE.refused("SR206", 's.find(lambda x: F.gelu(x), concrete_args={"y": 1})'),
    )

    @staticmethod
    def takes(
        pattern: Callable[..., Any] | type | str | None = None,
        *,
        where: Callable[[CallSite], bool] | None = None,
        concrete_args: Mapping[str, object] | None = None,
    ) -> None:
        """`find(pattern=None, *, where=None, concrete_args=None)`."""

    def answer(self, call: Call, nodes: list[Node]) -> Matches:
        """The matches in all selected modules."""
        return found(call, nodes)


def found(call: Call, nodes: list[Node]) -> Matches:
    """The matches of a call's pattern in all selected modules."""
    sources, wanted = call.sources, call.arguments["pattern"]
    where = call.arguments.get("where")
    given = known_branches.given_for(call.arguments.get("concrete_args"), nodes)
    for node in nodes:
        _check_original(call, node)
    if (wanted is None) is (where is None):
        raise errors.BadArgument(
            f"`{call.directive.primitive}` takes a pattern, or a predicate as `where`"
        )
    if given.values and not callable(wanted):
        raise errors.BadArgument(
            "`concrete_args` is only for functions: a call is found in all branches"
        )
    if where is not None:
        if not callable(where):
            raise errors.BadArgument(f"`where` is a function of a call, not {where!r}")
        return find_calls(scopes_for(nodes, sources), lambda _, site: bool(where(site)))
    if isinstance(wanted, str):
        return _by_path(wanted, nodes, sources)
    pattern = pattern_for(wanted, sources)
    by_path = {node.path: node for node in nodes}
    return known_branches.find(pattern, scopes_for(nodes, sources), by_path, sources, given)


def _by_path(regex: str, nodes: list[Node], sources: Sources) -> Matches:
    """Calls of submodules by their path below each selected module."""
    try:
        compiled = re.compile(regex)
    except re.error as error:
        raise errors.BadArgument(f"`{regex}` is not a regular expression: {error}") from None
    matches = [
        match
        for node in nodes
        for match in find_calls(
            scopes_for((inner for inner in node.walk() if inner.children), sources),
            path_predicate(compiled, node.path),
        )
    ]
    return Matches(tuple(dict.fromkeys(matches)), (), "0")


def _check_original(call: Call, node: Node) -> None:
    """Refuses a module that was replaced by one whose source is not known."""
    for above in node.outwards():
        state = call.states.get(above.path)
        new = state.replacement if state is not None else None
        if new is not None and above.cls.__name__ != new.target.name:
            raise errors.Unsupported(
                f"{above.shown} was replaced by a module whose source cannot be searched",
                cause=new.cause,
                hint="search for the pattern before the module is replaced",
            )
