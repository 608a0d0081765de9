"""A primitive is one file with its change, its inputs and its refusals. This is such a file."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import libcst as cst
import pytest
import torch
from torch.profiler import profile

from slapo_rewrite import errors, primitives
from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.placement import Placement, Requested
from slapo_rewrite.changes.places import Place
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.build import parsed
from slapo_rewrite.directive import Directive
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive, check_called
from slapo_rewrite.primitives.checkpoint import MODEL, STACK
from tests.rewriting import changed_lines, imported, refused, rewritten, written


@dataclass(frozen=True)
class OnForward(Place):
    """The decorators of `forward`."""

    def methods(self, classes: ClassHierarchy, class_name: str) -> list[ast.FunctionDef] | None:
        return [m for m in classes.methods(class_name) if m.name == "forward"][:1]


@dataclass(frozen=True)
class ProfileForward(Requested):
    """`forward` is a range of its own in torch's profiler."""

    label: str

    prefix = "Profiled"
    says = "that is a range of its own in a profile"
    is_parallel = False

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        to.home(node).changes.add(node.path, OnForward(), self, (cause,))

    def write_at(self, text: ClassText, place: OnForward) -> None:
        forward = text.forward()
        function = text.imports.outside("torch.profiler", "record_function", text.causes)
        decorator = cst.Decorator(parsed(f'{function}("{self.label}")'))

        def make(made: cst.FunctionDef) -> cst.FunctionDef:
            return made.with_changes(decorators=[*made.decorators, decorator])

        text.replace(forward, make, "profiled")


class Profile(Primitive):
    """Have a module's `forward` be a range of its own in torch's profiler."""

    name = "profile"

    @staticmethod
    def takes(label: str) -> None: ...

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        check_called(call, node)
        if earlier := [cause for _, cause in state.asks(ProfileForward)]:
            raise errors.ConflictingEdits(
                f"`{node.path}` is profiled already", at=call.directive.at, cause=earlier
            )
        return state.asking(ProfileForward(call.arguments["label"]), call.directive)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(primitives.registry(), Profile.name, Profile())


def ranges(stack):
    with profile() as found:
        stack(torch.randn(3, 4)).sum().backward()
    return [event.name for event in found.events() if event.name in ("block", "last")]


def test_in_place_where_all_modules_have_it(tmp_path):
    output = rewritten(
        tmp_path, STACK, MODEL + 'def schedule(s):\n    s["blocks.*"].profile("block")\n'
    )
    assert changed_lines(output) == (
        '+from torch.profiler import record_function\n+    @record_function("block")\n'
    )
    assert ranges(imported(written(tmp_path, output)).Stack(4, depth=2)) == ["block", "block"]


def test_in_a_subclass_where_some_have_it(tmp_path):
    output = rewritten(
        tmp_path, STACK, MODEL + 'def schedule(s):\n    s["blocks"][-1].profile("last")\n'
    )
    lines = changed_lines(output)
    assert "+class ProfiledBlock(Block):\n" in lines
    assert '+    """A `Block` that is a range of its own in a profile."""\n' in lines
    assert ranges(imported(written(tmp_path, output)).Stack(4, depth=4)) == ["last"]


def test_beside_other_primitives(tmp_path):
    text = (
        'def schedule(s):\n    s["blocks.*"].profile("block")\n    s["blocks"][:2].checkpoint()\n'
    )
    stack = imported(written(tmp_path, rewritten(tmp_path, STACK, MODEL + text))).Stack(4, depth=4)
    assert ranges(stack) == ["block"] * 6  # two of four are computed again


def test_what_it_refuses_is_told_with_both_lines(tmp_path):
    text = 'def schedule(s):\n    s["blocks.*"].profile("a")\n    s["blocks"][0].profile("b")\n'
    error = refused(tmp_path, STACK, MODEL + text, "SR306")
    assert "`blocks.0` is profiled already" in error
    assert 's["blocks"][0].profile("b")' in error and 's["blocks.*"].profile("a")' in error
