"""`inline`: writes a submodule's `forward` into the module that calls it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.changes.state import ModuleRequests, Wish
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.inlining import inline_edits
from slapo_rewrite.code.names import module_paths
from slapo_rewrite.code.splice import Edit
from slapo_rewrite.code.text import listed
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.groups import grouped
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import check_uncalled
from slapo_rewrite.model.watched_functions import made_by
from slapo_rewrite.primitives.base import Call, Rewriting

BLOCK = """\
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = self.up(x)
        # Half of the features are off.
        x = torch.relu(x)
        x = self.down(x)
        return x


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        y = self.mlp(self.norm(x))
        return x + y
"""
SAMPLE = Sample(BLOCK, setting("Block(8)"))


class Inline(Rewriting):
    """Write a submodule's `forward` where the selected module calls it.

    Later calls in the schedule see the changed source: a pattern can match code of both modules,
    and another `inline` can continue. The constructor still makes the submodule, so its parameters
    keep their names, and its own submodules can be scheduled as before. A local variable is renamed
    if the caller still needs its own variable of that name.

    Rewrite:
        y = self.mlp(self.norm(x))
        -->
        x = self.mlp.up(self.norm(x))
        y = self.mlp.down(x)

    Shapes: Unchanged.
    Numerics: Exact.
    State: Unchanged.

    Raises:
        SR202 no such submodule; SR305 a submodule with hooks or a `forward` of its own, a class
        whose `forward` is decorated, returns early, calls `super()` or is in another file, a call
        with `*`, in a condition or after other calls, modules of the class that are not selected;
        SR306 the submodule itself was scheduled.

    Source: Slapo, arXiv 2302.08005, section 3.3 (`trace` with `flatten`).
    """

    name = "inline"
    examples = (
        SAMPLE.example(
            's.inline("mlp")',
            """\
-        y = self.mlp(self.norm(x))
+        mlp_x = self.mlp.up(self.norm(x))
+        # Half of the features are off.
+        mlp_x = torch.relu(mlp_x)
+        y = self.mlp.down(mlp_x)
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR202", 's.inline("mpl")'),
        SAMPLE.refused("SR305", 's.inline("norm")'),
        SAMPLE.refused("SR306", 's.inline("mlp")', 's["mlp"].checkpoint()'),
    )

    @staticmethod
    def takes(child: str) -> None:
        """`inline(child)`."""

    def targets(self, call: Call, nodes: list[Node]) -> Iterable[Node]:
        """The submodules."""
        return [self._child(call, node) for node in nodes]

    def _child(self, call: Call, node: Node) -> Node:
        path, found = call.arguments["child"], node
        for name in filter(None, path.split(".")):
            if name not in found.children:
                raise errors.UnknownPath(
                    f"{node.shown} holds no `{path}`",
                    hint=errors.did_you_mean(path, found.children),
                )
            found = found.children[name]
        check_uncalled(found.path, found.live)
        if found is node:
            raise errors.BadArgument(f"`inline` takes the path of a submodule, not {path!r}")
        return found

    def rewrites(self, call: Call, nodes: list[Node]) -> Rewrite:
        """The edits that write the child's `forward` into the methods of the selected modules."""
        by_class = grouped((node.cls, node) for node in nodes)
        edits: dict[tuple[int, int], Edit] = {}
        path, cause = call.arguments["child"], call.directive
        for cls, same in by_class.items():
            children = {self._child(call, node).cls for node in same}
            if len(children) > 1:
                names = listed(sorted(c.__name__ for c in children))
                raise errors.Unsupported(f"`{path}` is a {names} in different modules")
            file, methods = self._methods(call, cls)
            forward = self._forward(call, self._child(call, same[0]), file)
            calling = [m for m in methods if _calls(m, path)]
            self._check_all(call, cls, calling, nodes)
            for edit in inline_edits(file, methods, path, forward, cause):
                edits[edit.start, edit.end] = edit
        return Rewrite(list(edits.values()))

    def _methods(self, call: Call, cls: type) -> tuple[SourceFile, list[ast.FunctionDef]]:
        main = call.sources.main
        own = [c for c in cls.__mro__ if call.sources.file_of(c) is main]
        methods = [m for c in own for m in main.methods(c.__name__) if m.name != "__init__"]
        return main, methods

    def _forward(self, call: Call, child: Node, file: SourceFile) -> ast.FunctionDef:
        at = None
        for cls in child.cls.__mro__:
            if "forward" in vars(cls) or "__call__" in vars(cls):
                method = file.method(cls.__name__, "forward")
                if "__call__" in vars(cls) or not method or call.sources.file_of(cls) is not file:
                    break
                if method.decorator_list or made_by(method, vars(cls)["forward"], depth=1):
                    return method
                at = file.at(method)
                break
        raise errors.Unsupported(
            f"{child.shown} is a {child.cls.__name__}: its `forward` is not in {file.path.name}, "
            "or a call does more than `forward`",
            at=at,
            hint=f"define class `{child.cls.__name__}` in {file.path.name}, with all of its code "
            "in `forward`",
        )

    def _check_all(
        self, call: Call, cls: type, methods: list[ast.FunctionDef], same: list[Node]
    ) -> None:
        """Refuses if other modules that are not selected share these methods."""
        main = call.sources.main
        homes = {
            c
            for c in cls.__mro__
            if call.sources.file_of(c) is main
            and any(m in main.methods(c.__name__) for m in methods)
        }
        selected = {node.path for node in same}
        for node in call.tree.nodes.values():
            if node.path not in selected and homes & set(node.cls.__mro__):
                raise errors.Unsupported(
                    f"{node.shown} is a {node.cls.__name__}, which shares the methods of "
                    f"`{same[0].path}`, but is not selected",
                    hint="select all modules that share these methods",
                )

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Records that the submodule is no longer called."""
        if state.inlined is None and not replace(state, shards=(), shares=()).is_plain():
            raise errors.ConflictingEdits(
                f"{node.shown} cannot be inlined after it was scheduled",
                hint="inline first, then schedule its submodules",
            )
        return replace(state, inlined=Wish(call.directive))


def _calls(method: ast.FunctionDef, path: str) -> bool:
    """Whether a method calls the module at a path, also through local names."""
    calls = (n for n in ast.walk(method) if isinstance(n, ast.Call))
    return any(path in module_paths(call.func, method) for call in calls)
