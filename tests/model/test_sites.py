"""Construction sites, one way of writing them at a time."""

import importlib.util
import itertools
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.join import Sources, find_parameter_site, known_site
from slapo_rewrite.model.tree import Tree

HEAD = """import copy
from collections import OrderedDict
import torch
from torch import nn


class A(nn.Module):
    def __init__(self, *given):
        super().__init__()


class B(A): pass
class C(A): pass
class D(A): pass


"""
CONFIG = SimpleNamespace(a=True, b=False, act="gelu", types=["p", "q"], names=["u", "v"])
numbers = itertools.count()


def built(
    tmp_path: Path, body: str, base: str = "nn.Module", more: str = ""
) -> tuple[Tree, Sources]:
    """A model whose constructor has this body, and its sources."""
    init = textwrap.indent(textwrap.dedent(body), " " * 8)
    start = "" if "super().__init__" in body else "        super().__init__()\n"
    head = f"class M({base}):\n    def __init__(self, config, n=2):\n{start}"
    name = f"sites_{next(numbers)}"
    path = tmp_path / f"{name}.py"
    path.write_text(f"{HEAD}{textwrap.dedent(more)}\n\n{head}{init}\n")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.device("meta"), construction_calls.recorded():
        tree = Tree(module.M(CONFIG))
    return tree, Sources(SourceFile.read(path, name))


def find(tmp_path: Path, body: str, base: str = "nn.Module", more: str = "") -> dict[str, Site]:
    """The sites of the modules of such a model, by their paths."""
    tree, sources = built(tmp_path, body, base, more)
    return {path: known_site(sources, node) for path, node in tree.nodes.items() if path}


def shown(sites: dict[str, Site]) -> dict[str, str]:
    """What makes them, by the patterns of their paths."""
    return {s.path: f"{s.kind} {s.file.segment(s.value)}" for s in sites.values()}


CASES = {
    "assign": ("self.a = A(1)", {"a": "assign A(1)"}),
    "annotated": ("self.a: nn.Module = A()", {"a": "assign A()"}),
    "tuple": ("self.a, self.b = A(), B()", {"a": "assign A()", "b": "assign B()"}),
    "walrus": ("if (a := A()):\n    self.a = a", {"a": "assign A()"}),
    "local variable": ("a = A()\nself.a = a", {"a": "assign A()"}),
    "local variable rebound": ("a = A()\na = B()\nself.a = a", {"a": "assign B()"}),
    "conditional expression": ("self.a = A() if n > 2 else B()", {"a": "assign B()"}),
    "comprehension": (
        "self.x = nn.ModuleList([A(i) for i in range(n)])",
        {"x": "assign nn.ModuleList([A(i) for i in range(n)])", "x.*": "assign A(i)"},
    ),
    "generator": (
        "self.x = nn.ModuleList(A() for _ in range(n))",
        {"x": "assign nn.ModuleList(A() for _ in range(n))", "x.*": "assign A()"},
    ),
    "list": (
        "self.x = nn.ModuleList([A(), B()])",
        {"x": "assign nn.ModuleList([A(), B()])", "x.0": "assign A()", "x.1": "assign B()"},
    ),
    "list and comprehension": (
        "self.x = nn.ModuleList([A()] + [B() for _ in range(2)] + [C()])",
        {
            "x": "assign nn.ModuleList([A()] + [B() for _ in range(2)] + [C()])",
            "x.0": "assign A()",
            "x.*": "assign B()",
            "x.3": "assign C()",
        },
    ),
    "starred": (
        "self.x = nn.Sequential(A(), *[B() for _ in range(n)], C())",
        {
            "x": "assign nn.Sequential(A(), *[B() for _ in range(n)], C())",
            "x.0": "assign A()",
            "x.*": "assign B()",
            "x.3": "assign C()",
        },
    ),
    "append to a local list": (
        "xs = []\nfor i in range(n):\n    xs.append(A(i))\nself.x = nn.ModuleList(xs)",
        {"x": "assign nn.ModuleList(xs)", "x.*": "assign A(i)"},
    ),
    "unpacked local list": (
        "xs = [A()]\nxs += [B()]\nxs.extend([C(), D()])\nself.x = nn.Sequential(*xs)",
        {
            "x": "assign nn.Sequential(*xs)",
            "x.0": "assign A()",
            "x.1": "assign B()",
            "x.2": "assign C()",
            "x.3": "assign D()",
        },
    ),
    "append to a container": (
        "self.x = nn.ModuleList()\nself.x.append(A())\nif n:\n    self.x.append(B())\n"
        "self.x.append(C())",
        {
            "x": "assign nn.ModuleList()",
            "x.0": "assign A()",
            "x.1": "assign B()",
            "x.2": "assign C()",
        },
    ),
    "list of lists": (
        "self.x = nn.ModuleList([nn.ModuleList([A(i, j) for j in range(3)]) for i in range(n)])",
        {
            "x": "assign nn.ModuleList([nn.ModuleList([A(i, j) for j in range(3)])"
            " for i in range(n)])",
            "x.*": "assign nn.ModuleList([A(i, j) for j in range(3)])",
            "x.*.*": "assign A(i, j)",
        },
    ),
    "a list of its own each turn": (
        "self.x = nn.ModuleList()\nfor i in range(n):\n    xs = []\n    xs.append(A())\n"
        "    xs.append(B())\n    self.x.append(nn.Sequential(*xs))",
        {
            "x": "assign nn.ModuleList()",
            "x.*": "assign nn.Sequential(*xs)",
            "x.*.0": "assign A()",
            "x.*.1": "assign B()",
        },
    ),
    "ordered dict": (
        "self.x = nn.Sequential(OrderedDict([('fc', A()), ('act', B())]))",
        {
            "x": "assign nn.Sequential(OrderedDict([('fc', A()), ('act', B())]))",
            "x.fc": "assign A()",
            "x.act": "assign B()",
        },
    ),
    "dict comprehension": (
        "self.x = nn.ModuleDict({f'k{i}': A() for i in range(n)})",
        {
            "x": "assign nn.ModuleDict({f'k{i}': A() for i in range(n)})",
            "x.k0": "assign A()",
            "x.k1": "assign A()",
        },
    ),
    "item of a dict": (
        "self.x = nn.ModuleDict()\nself.x['a'] = A()",
        {"x": "assign nn.ModuleDict()", "x.a": "assign A()"},
    ),
    "module in a variable": (
        "self.x = nn.ModuleList()\nfor i in range(n):\n    block = nn.Module()\n"
        "    block.fc = A()\n    self.x.append(block)",
        {"x": "assign nn.ModuleList()", "x.*": "assign nn.Module()", "x.*.fc": "argument A()"},
    ),
    "list entered under its numbers": (
        "self.layers = [A(), B()]\nfor i, layer in enumerate(self.layers):\n"
        "    self.add_module(str(i), layer)",
        {"0": "assign A()", "1": "assign B()"},
    ),
    "setattr over names": (
        "for name in ('q', 'k'):\n    setattr(self, name, A())",
        {"q": "assign A()", "k": "assign A()"},
    ),
    "add_module": (
        "self.add_module('a', A())\nself.register_module('b_%d' % n, B())",
        {"a": "assign A()", "b_2": "assign B()"},
    ),
    "chained calls": ("self.a = A().to('cpu').eval()", {"a": "assign A()"}),
    "inside another module": (
        "self.a = A()\nself.a.b = B()",
        {"a": "assign A()", "a.b": "argument B()"},
    ),
    "with and try": (
        "with torch.device('cpu'):\n    self.a = A()\ntry:\n    self.b = B(1 / 0)\n"
        "except Exception:\n    self.b = C()",
        {"a": "assign A()", "b": "assign C()"},
    ),
    "match": (
        "match n:\n    case 1:\n        self.a = A()\n    case _:\n        self.a = B()",
        {"a": "assign B()"},
    ),
    "another name": ("self.a = A()\nself.b = self.a", {"a": "assign A()"}),
    "two names at once": ("self.a = self.b = A()", {"a": "assign A()"}),
}


@pytest.mark.parametrize("case", CASES)
def test_sites(tmp_path, case):
    body, expected = CASES[case]
    assert shown(find(tmp_path, body)) == expected


def test_classes_that_are_looked_up(tmp_path):
    more = """
    class Kinds(dict):
        def __getitem__(self, name):
            cls, argument = super().__getitem__(name)
            return cls(argument)

    def of(cls):
        return cls()

    KINDS = Kinds(gelu=(A, 1))
    """
    sites = find(tmp_path, "self.a = KINDS[config.act]\nself.b = of(B)", more=more)
    assert shown(sites) == {"a": "factory KINDS[config.act]", "b": "factory of(B)"}


@pytest.mark.parametrize(
    ("body", "path", "index"),
    [
        ("self.x = nn.ModuleList([A(i) for i in range(n)])", "x.*", "i"),
        ("self.x = nn.ModuleList([A(i) for i in range(0, n)])", "x.*", "i"),
        ("self.x = nn.ModuleList([A(t) for k, t in enumerate(config.types)])", "x.*", "k"),
        ("self.x = nn.ModuleList([A() for k, t in zip(range(n), config.types)])", "x.*", "k"),
        ("xs = []\nfor i in range(n):\n    xs.append(A())\nself.x = nn.ModuleList(xs)", "x.*", "i"),
        # The variable does not count the elements.
        ("self.x = nn.ModuleList([A(i) for i in range(1, n + 1)])", "x.*", None),
        ("self.x = nn.ModuleList([A(i) for i in range(0, n + 1, 2)])", "x.*", None),
        ("self.x = nn.ModuleList([A(i) for i in config.types])", "x.*", None),
        ("self.x = nn.ModuleList([A(i) for i in range(n + 1) if i])", "x.*", None),
        ("self.x = nn.ModuleList([A(i) for j in range(n) for i in range(n)])", "x.*", None),
        ("self.x = nn.ModuleList([A(t) for k, t in enumerate(config.types, 1)])", "x.*", None),
        (
            "xs = [B()]\nfor i in range(n):\n    xs.append(A())\nself.x = nn.ModuleList(xs)",
            "x.*",
            None,
        ),
        ("for i in range(n):\n    setattr(self, f'x{i + 1}', A())", "x1", None),
    ],
)
def test_the_variable_that_counts_the_elements(tmp_path, body, path, index):
    made = {s.path: s for s in find(tmp_path, body).values()}[path]
    assert made.loops[-1].index == index


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ("[A(t) for t in config.types]", True),
        ("[A(t) for t in config.types] + [B()]", True),
        ("[A(t) for t in config.types][::-1]", False),
        ("[B()] + [A(t) for t in config.types]", False),
        ("[A(t) for _ in range(2) for t in config.types]", False),
        ("[A(t) for t in config.types if t]", False),
    ],
)
def test_turns_without_a_number_that_make_the_elements(tmp_path, given, counts):
    made = {s.path: s for s in find(tmp_path, f"self.x = nn.ModuleList({given})").values()}
    assert made["x.*"].loops[-1].counts is counts


def test_the_assignments_of_a_class_in_a_variable(tmp_path):
    sites = find(tmp_path, "cls = A if n else B\nself.a = cls(config)\nself.b = C(config)")
    assert [sites["a"].file.segment(v) for v in sites["a"].variable] == ["cls = A if n else B"]
    assert sites["b"].variable == ()
    assert sites["a"].file.segment(sites["a"].callee) == "cls"


def test_helpers_of_the_same_file(tmp_path):
    more = """
    def make(config):
        if config.b:
            return A(config)
        return nn.Sequential(B(), C())

    def written(config, *more):
        return A(config, 1)
    """
    sites = find(tmp_path, "self.a = make(config)\nself.b = written(config)", more=more)
    assert shown(sites) == {
        "a": "recorded nn.Sequential(B(), C())",
        "a.0": "recorded B()",
        "a.1": "recorded C()",
        "b": "assign written(config)",
    }
    assert [sites[path].function.name for path in ("a", "b")] == ["make", "__init__"]
    assert sites["b"].written_out is not None


def test_methods_that_the_constructor_calls(tmp_path):
    more = """
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self._build()

        def _build(self):
            self.b = B()
    """
    sites = find(tmp_path, "super().__init__()\nself.a = A()", base="Base", more=more)
    assert shown(sites) == {"a": "assign A()", "b": "assign B()"}
    assert (sites["b"].class_name, sites["b"].function.name) == ("Base", "_build")


def test_a_class_derived_from_a_container(tmp_path):
    sites = find(tmp_path, "super().__init__(A(), nn.ReLU())", base="nn.Sequential")
    assert shown(sites) == {"0": "assign A()", "1": "assign nn.ReLU()"}
    body = "super().__init__()\nfor i in range(n):\n    self.append(A(i))"
    sites = find(tmp_path, body, base="nn.ModuleList")
    assert shown(sites) == {"*": "assign A(i)"}
    assert sites["1"].loops[0].index == "i"


def test_the_statement_is_the_innermost(tmp_path):
    site = find(tmp_path, "if n:\n    with torch.device('cpu'):\n        self.a = A()")["a"]
    assert site.file.segment(site.statement) == "self.a = A()"


PARAMETERS = {
    "w": ("self.w = nn.Parameter(torch.zeros(2))", "parameter nn.Parameter(torch.zeros(2))"),
    "b": ("self.b = torch.nn.Buffer(torch.ones(n))", "buffer torch.nn.Buffer(torch.ones(n))"),
    "i": ("self.register_buffer('i', torch.arange(2), False)", "buffer torch.arange(2)"),
    "m": ("m = torch.ones(2) * n\nself.register_buffer('m', m)", "buffer torch.ones(2) * n"),
    "o": (
        "self.o = nn.Parameter(torch.ones(n)) if n else None",
        "parameter nn.Parameter(torch.ones(n))",
    ),
    "s": (
        "for k in 'rs':\n    setattr(self, k, nn.Parameter(torch.ones(1)))",
        "parameter nn.Parameter(torch.ones(1))",
    ),
    "t": (
        "self.t, self.u = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))",
        "parameter nn.Parameter(torch.ones(1))",
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(tmp_path, name):
    body, expected = PARAMETERS[name]
    tree, sources = built(tmp_path, body)
    site = find_parameter_site(sources, tree.root, name)
    assert (site.path, f"{site.kind} {site.file.segment(site.value)}") == (name, expected)
