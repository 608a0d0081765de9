"""Shrinks a case that shows a defect, as long as it still shows the same one."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.soundness.pairs import Pair, Verdict


def shrunk(
    pair: Pair, verdict: Verdict, judge: Callable[[Pair], Verdict], seconds: float = 20
) -> Pair:
    """A smaller pair of the same verdict, by leaving out statements and lines of the schedule."""
    deadline = time.monotonic() + seconds
    going = True
    while going:
        going = False
        for smaller in [*_smaller(pair)]:
            if time.monotonic() > deadline:
                return pair
            found = judge(smaller)
            if (found.kind, found.code) == (verdict.kind, verdict.code):
                pair, going = smaller, True
                break
    return pair


def _smaller(pair: Pair) -> Iterator[Pair]:
    for text in _with_less(pair.schedule, "schedule"):
        yield replace(pair, schedule=text)
    for text in _with_less(pair.source, ""):
        yield replace(pair, source=text)


def _with_less(text: str, inside: str) -> Iterator[str]:
    """The text without one of its statements; with `inside`, one of that function's only."""
    lines = text.splitlines()
    tree = ast.parse(text)
    root = next((n for n in tree.body if getattr(n, "name", "") == inside), tree)
    for parent in ast.walk(root):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, [])
            for node in block if isinstance(block, list) else ():
                if isinstance(node, ast.Pass) or "super().__init__" in ast.unparse(node)[:25]:
                    continue
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                filler = [" " * node.col_offset + "pass"] if len(block) == 1 else []
                changed = lines[: first - 1] + filler + lines[node.end_lineno :]
                smaller = "\n".join(changed) + "\n"
                try:
                    ast.parse(smaller)
                except SyntaxError:
                    continue
                yield smaller
