"""Construction sites, one way of writing them at a time."""

import textwrap
from pathlib import Path

import pytest

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.construction_sites import Site, find_later_sites, find_sites

HEAD = "import copy\nfrom collections import OrderedDict\nimport torch\nfrom torch import nn\n\n\n"


def find(
    tmp_path: Path, body: str, base: str = "nn.Module", more: str = ""
) -> dict[str, list[Site]]:
    """The sites of a class whose constructor has this body."""
    init = textwrap.indent(textwrap.dedent(body), " " * 8)
    head = f"class M({base}):\n    def __init__(self, config, n=2):\n"
    text = f"{HEAD}{textwrap.dedent(more)}\n\n{head}{init}"
    path = tmp_path / "model.py"
    path.write_text(text)
    return find_sites(SourceFile.read(path, "model"), "M")


def shown(sites: dict[str, list[Site]]) -> dict[str, list[str]]:
    return {p: [f"{s.kind} {s.file.segment(s.value)}" for s in v] for p, v in sites.items()}


CASES = {
    "assign": ("self.a = A(1)", {"a": ["assign A(1)"]}),
    "annotated": ("self.a: nn.Module = A()", {"a": ["assign A()"]}),
    "chained": ("self.a = self.b = A()", {"a": ["assign A()"], "b": ["assign A()"]}),
    "tuple": ("self.a, self.b = A(), B()", {"a": ["assign A()"], "b": ["assign B()"]}),
    "tuple of one call": (
        "self.a, (self.b, self.c) = make()",
        {"a": ["assign make()"], "b": ["assign make()"], "c": ["assign make()"]},
    ),
    "walrus": ("if (a := A()):\n    self.a = a", {"a": ["assign A()"]}),
    "local variable": ("a = A()\nself.a = a", {"a": ["assign A()"]}),
    "local variable rebound": ("a = A()\na = B()\nself.a = a", {"a": ["assign B()"]}),
    "conditional expression": ("self.a = A() if n else B()", {"a": ["assign A()", "assign B()"]}),
    "or": ("self.a = n or A()", {"a": ["argument n", "assign A()"]}),
    "comprehension": (
        "self.x = nn.ModuleList([A(i) for i in range(n)])",
        {"x": ["assign nn.ModuleList([A(i) for i in range(n)])"], "x.*": ["comprehension A(i)"]},
    ),
    "generator": (
        "self.x = nn.ModuleList(A() for _ in range(n))",
        {"x": ["assign nn.ModuleList(A() for _ in range(n))"], "x.*": ["comprehension A()"]},
    ),
    "list": (
        "self.x = nn.ModuleList([A(), B()])",
        {"x": ["assign nn.ModuleList([A(), B()])"], "x.0": ["list A()"], "x.1": ["list B()"]},
    ),
    "list and comprehension": (
        "self.x = nn.ModuleList([A()] + [B() for _ in range(2)] + [C()])",
        {
            "x": ["assign nn.ModuleList([A()] + [B() for _ in range(2)] + [C()])"],
            "x.0": ["list A()"],
            "x.*": ["comprehension B()"],
            "x.3": ["list C()"],
        },
    ),
    "starred": (
        "self.x = nn.Sequential(A(), *[B() for _ in range(n)], C())",
        {
            "x": ["assign nn.Sequential(A(), *[B() for _ in range(n)], C())"],
            "x.0": ["sequential A()"],
            "x.*": ["comprehension B()", "sequential C()"],
        },
    ),
    "append to a local list": (
        "xs = []\nfor i in range(n):\n    xs.append(A(i))\nself.x = nn.ModuleList(xs)",
        {"x": ["assign nn.ModuleList(xs)"], "x.*": ["append A(i)"]},
    ),
    "unpacked local list": (
        "xs = [A()]\nxs += [B()]\nxs.extend([C(), D()])\nself.x = nn.Sequential(*xs)",
        {
            "x": ["assign nn.Sequential(*xs)"],
            "x.0": ["list A()"],
            "x.1": ["list B()"],
            "x.2": ["list C()"],
            "x.3": ["list D()"],
        },
    ),
    "append to a container": (
        "self.x = nn.ModuleList()\nself.x.append(A())\nif n:\n    self.x.append(B())\n"
        "self.x.append(C())",
        {
            "x": ["assign nn.ModuleList()"],
            "x.0": ["append A()"],
            "x.1": ["append B()"],
            "x.*": ["append C()"],
        },
    ),
    "one or the other": (
        "self.x = nn.ModuleList()\nif n:\n    self.x.append(A())\nelse:\n    self.x.append(B())\n"
        "self.x.append(C())",
        {
            "x": ["assign nn.ModuleList()"],
            "x.0": ["append A()", "append B()"],
            "x.1": ["append C()"],
        },
    ),
    "append in a loop": (
        "self.x = nn.ModuleList([])\nfor i in range(n):\n    self.x.append(A(i))",
        {"x": ["assign nn.ModuleList([])"], "x.*": ["append A(i)"]},
    ),
    "list of lists": (
        "self.x = nn.ModuleList([nn.ModuleList([A(i, j) for j in range(3)]) for i in range(n)])",
        {
            "x": [
                "assign nn.ModuleList([nn.ModuleList([A(i, j) for j in range(3)])"
                " for i in range(n)])"
            ],
            "x.*": ["comprehension nn.ModuleList([A(i, j) for j in range(3)])"],
            "x.*.*": ["comprehension A(i, j)"],
        },
    ),
    "a list of its own each turn": (
        "self.x = nn.ModuleList()\nfor i in range(n):\n    xs = []\n    xs.append(A())\n"
        "    xs.append(B())\n    self.x.append(nn.Sequential(*xs))",
        {
            "x": ["assign nn.ModuleList()"],
            "x.*": ["append nn.Sequential(*xs)"],
            "x.*.0": ["append A()"],
            "x.*.1": ["append B()"],
        },
    ),
    "ordered dict": (
        "self.x = nn.Sequential(OrderedDict([('fc', A()), ('act', B())]))",
        {
            "x": ["assign nn.Sequential(OrderedDict([('fc', A()), ('act', B())]))"],
            "x.fc": ["dict A()"],
            "x.act": ["dict B()"],
        },
    ),
    "module dict": (
        "self.x = nn.ModuleDict({'a': A(), 'b': nn.ModuleDict(dict(c=C()))})",
        {
            "x": ["assign nn.ModuleDict({'a': A(), 'b': nn.ModuleDict(dict(c=C()))})"],
            "x.a": ["dict A()"],
            "x.b": ["dict nn.ModuleDict(dict(c=C()))"],
            "x.b.c": ["dict C()"],
        },
    ),
    "dict comprehension": (
        "self.x = nn.ModuleDict({f'k{i}': A() for i in range(n)})",
        {
            "x": ["assign nn.ModuleDict({f'k{i}': A() for i in range(n)})"],
            "x.k*": ["comprehension A()"],
        },
    ),
    "item of a dict": (
        "self.x = nn.ModuleDict()\nself.x['a'] = A()",
        {"x": ["assign nn.ModuleDict()"], "x.a": ["assign A()"]},
    ),
    "dict in a variable": (
        "parts = {}\nparts['a'] = A()\nfor t in config.types:\n    parts[t] = B()\n"
        "self.x = nn.ModuleDict(parts)",
        {"x": ["assign nn.ModuleDict(parts)"], "x.a": ["dict A()"], "x.*": ["dict B()"]},
    ),
    "module in a variable": (
        "self.x = nn.ModuleList()\nfor i in range(n):\n    block = nn.Module()\n"
        "    block.fc = A()\n    self.x.append(block)",
        {
            "x": ["assign nn.ModuleList()"],
            "x.*": ["append nn.Module()"],
            "x.*.fc": ["assign A()"],
        },
    ),
    "list entered under its numbers": (
        "self.layers = [A(), B()]\nfor i, layer in enumerate(self.layers):\n"
        "    self.add_module(str(i), layer)",
        {
            "layers.0": ["list A()"],
            "layers.1": ["list B()"],
            "0": ["add_module A()"],
            "1": ["add_module B()"],
        },
    ),
    "setattr": (
        "for i in range(n):\n    setattr(self, f'layer{i}', A(i))",
        {"layer*": ["setattr A(i)"]},
    ),
    "setattr over names": (
        "for name in ('q', 'k'):\n    setattr(self, name, A())",
        {"q": ["setattr A()"], "k": ["setattr A()"]},
    ),
    "add_module": (
        "self.add_module('a', A())\nself.register_module('b_%d' % n, B())",
        {"a": ["add_module A()"], "b_*": ["add_module B()"]},
    ),
    "parameters": (
        "self.w = nn.Parameter(torch.zeros(2))\nself.b = torch.nn.Buffer(x)\n"
        "self.register_parameter('p', None)\nself.register_buffer('i', torch.arange(2), False)",
        {
            "w": ["parameter nn.Parameter(torch.zeros(2))"],
            "b": ["buffer torch.nn.Buffer(x)"],
            "i": ["buffer torch.arange(2)"],
        },
    ),
    "arithmetic": (
        "self.register_buffer('i', 1 / 2 ** torch.arange(2))\nm = torch.ones(2) * n\n"
        "self.register_buffer('m', m)\nself.register_parameter('p', None)\nself.n = 2 * n",
        {"i": ["buffer 1 / 2 ** torch.arange(2)"], "m": ["buffer torch.ones(2) * n"]},
    ),
    "parameter list": (
        "self.x = nn.ParameterList([nn.Parameter(z) for z in range(n)])",
        {
            "x": ["assign nn.ParameterList([nn.Parameter(z) for z in range(n)])"],
            "x.*": ["comprehension nn.Parameter(z)"],
        },
    ),
    "factory": (
        "self.act = ACT2FN[config.act]\nself.m = AutoModel.from_config(config)",
        {"act": ["factory ACT2FN[config.act]"], "m": ["factory AutoModel.from_config(config)"]},
    ),
    "argument": ("self.a = config", {"a": ["argument config"]}),
    "chained calls": ("self.a = A().to('cpu').eval()", {"a": ["assign A()"]}),
    "inside another module": (
        "self.a = A()\nself.a.b = B()\nfor x in self.layers:\n    x.c = C()",
        {"a": ["assign A()"], "a.b": ["assign B()"], "layers.*.c": ["assign C()"]},
    ),
    "with and try": (
        "with torch.device('cpu'):\n    self.a = A()\ntry:\n    self.b = B()\nexcept Exception:\n"
        "    self.b = C()",
        {"a": ["assign A()"], "b": ["assign B()", "assign C()"]},
    ),
    "match": (
        "match n:\n    case 1:\n        self.a = A()\n    case _:\n        self.a = B()",
        {"a": ["assign A()", "assign B()"]},
    ),
    # Look-alikes: nothing is made here, or it is given to something else.
    "constants": ("self.a = 1\nself.b = n + 1\nself.c = [1, 2]\nself.d = f'{n}'", {}),
    "another object's attribute": ("other.a = A()\nsetattr(other, 'b', B())", {}),
    "a local variable only": ("a = A()\nxs = [A() for _ in range(n)]", {}),
    "a plain list": ("self.x = [A() for _ in range(n)]", {"x.*": ["comprehension A()"]}),
    "append elsewhere": ("names = []\nnames.append(A())\nself.x = nn.ModuleList()", None),
    "inside a nested class": ("class Inner:\n    def __init__(self):\n        self.a = A()", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_sites(tmp_path, case):
    body, expected = CASES[case]
    if expected is None:
        expected = {"x": ["assign nn.ModuleList()"]}
    assert shown(find(tmp_path, body)) == expected


def test_guards_are_the_tests_around_a_site(tmp_path):
    sites = find(
        tmp_path,
        """
        if config.a:
            self.a = A() if n > 1 else B()
        elif config.b:
            self.a = C()
        if config.c:
            return
        self.d = D()
        e = E()
        self.e = e if config.e else None
        """,
    )

    def guards(site: Site) -> list[tuple[str, bool]]:
        return [(site.file.segment(test), sense) for test, sense in site.guards]

    assert [guards(s) for s in sites["a"]] == [
        [("config.a", True), ("n > 1", True)],
        [("config.a", True), ("n > 1", False)],
        [("config.a", False), ("config.b", True)],
    ]
    assert guards(sites["d"][0]) == [("config.c", False)]
    assert guards(sites["e"][0]) == [("config.c", False), ("config.e", True)]


@pytest.mark.parametrize(
    ("body", "path", "index"),
    [
        ("self.x = nn.ModuleList([A(i) for i in range(n)])", "x.*", "i"),
        ("self.x = nn.ModuleList([A(i) for i in range(0, n)])", "x.*", "i"),
        ("self.x = nn.ModuleList([A(t) for k, t in enumerate(config.types)])", "x.*", "k"),
        ("self.x = nn.ModuleList([A() for k, t in zip(range(n), config.types)])", "x.*", "k"),
        ("xs = []\nfor i in range(n):\n    xs.append(A())\nself.x = nn.ModuleList(xs)", "x.*", "i"),
        ("for i in range(n):\n    setattr(self, f'x{i}', A())", "x*", "i"),
        ("self.x = nn.ModuleDict({str(i): A() for i in range(n)})", "x.*", "i"),
        # The variable does not count the elements.
        ("self.x = nn.ModuleList([A(i) for i in range(1, n)])", "x.*", None),
        ("self.x = nn.ModuleList([A(i) for i in range(0, n, 2)])", "x.*", None),
        ("self.x = nn.ModuleList([A(i) for i in config.types])", "x.*", None),
        ("self.x = nn.ModuleList([A(i) for i in range(n) if i])", "x.*", None),
        ("self.x = nn.ModuleList([A(i) for j in range(n) for i in range(n)])", "x.*", None),
        ("self.x = nn.ModuleList([A(t) for k, t in enumerate(config.types, 1)])", "x.*", None),
        (
            "xs = [B()]\nfor i in range(n):\n    xs.append(A())\nself.x = nn.ModuleList(xs)",
            "x.*",
            None,
        ),
        ("for i in range(n):\n    setattr(self, f'x{i + 1}', A())", "x*", None),
        ("self.x = nn.ModuleDict({config.names[i]: A() for i in range(n)})", "x.*", None),
    ],
)
def test_the_variable_that_counts_the_elements(tmp_path, body, path, index):
    (site,) = find(tmp_path, body)[path]
    assert site.index == index
    assert (site.loop.index if site.loop else None) == index


def test_several_elements_a_turn_are_told_apart(tmp_path):
    sites = find(
        tmp_path,
        """
        xs = [A()]
        for i in range(n):
            xs.append(B())
            xs.append(C())
        self.x = nn.Sequential(*xs)
        """,
    )
    b, c = (s.loop for s in sites["x.*"])
    assert [b.iteration(k) for k in range(1, 5)] == [0, None, 1, None]
    assert [c.iteration(k) for k in range(1, 5)] == [None, 0, None, 1]
    assert b.index is None


def test_the_assignments_of_a_class_in_a_variable(tmp_path):
    sites = find(tmp_path, "cls = A if n else B\nself.a = cls(config)\nself.b = C(config)")
    assert [s.file.segment(v) for s in sites["a"] for v in s.variable] == ["cls = A if n else B"]
    assert sites["b"][0].variable == ()
    assert sites["a"][0].file.segment(sites["a"][0].callee) == "cls"


def test_helpers_of_the_same_file(tmp_path):
    sites = find(
        tmp_path,
        "self.a = make(config)\nself.b = self._build(n)\nself._later()",
        more="""
        def make(config):
            if config.x:
                return A(config)
            return nn.Sequential(B(), C())
        """,
    )
    (site,) = sites["a"]
    assert (site.kind, site.file.segment(site.value)) == ("helper", "make(config)")
    inner = [(s.kind, s.file.segment(s.value), s.function.name) for s in site.inner]
    assert inner == [
        ("helper", "A(config)", "make"),
        ("helper", "nn.Sequential(B(), C())", "make"),
    ]
    assert shown(sites)["a.0"] == ["sequential B()"]
    assert shown(sites)["b"] == ["assign self._build(n)"]


def test_methods_that_the_constructor_calls(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        HEAD + "class M(nn.Module):\n"
        "    def __init__(self, config):\n"
        "        self.a = A()\n"
        "        if config.b:\n            self._build(config)\n"
        "    def _build(self, config):\n"
        "        self.b = B()\n"
        "        self._build(config)\n"
        "    def set_input_embeddings(self, value):\n"
        "        self.a = value\n"
        "        self.late = C()\n"
    )
    file = SourceFile.read(path, "model")
    sites = find_sites(file, "M")
    assert shown(sites) == {"a": ["assign A()"], "b": ["assign B()"]}
    assert [file.segment(t) for t, _ in sites["b"][0].guards] == ["config.b"]
    assert sites["b"][0].function.name == "_build"
    assert shown(find_later_sites(file, "M")) == {"a": ["argument value"], "late": ["assign C()"]}
    assert find_sites(file, "M") is sites


def test_a_class_derived_from_a_container(tmp_path):
    sites = find(tmp_path, "super().__init__(A(), nn.ReLU())", base="nn.Sequential")
    assert shown(sites) == {"0": ["sequential A()"], "1": ["sequential nn.ReLU()"]}
    sites = find(
        tmp_path,
        "super().__init__()\nfor i in range(n):\n    self.append(A(i))",
        base="nn.ModuleList",
    )
    assert shown(sites) == {"*": ["append A(i)"]}
    assert sites["*"][0].index == "i"


def test_a_container_of_the_same_file(tmp_path):
    more = "class Stack(nn.Sequential):\n    def forward(self, x): return x\n"
    sites = find(tmp_path, "self.x = Stack(A(), B())", more=more)
    assert list(sites) == ["x", "x.0", "x.1"]
    own = "class Stack(nn.Sequential):\n    def __init__(self, a, b): super().__init__(a, b)\n"
    assert list(find(tmp_path, "self.x = Stack(A(), B())", more=own)) == ["x"]


def test_a_name_that_only_looks_like_a_container(tmp_path):
    sites = find(tmp_path, "self.x = ModuleList([A()])", more="class ModuleList: pass\n")
    assert list(sites) == ["x"]


def test_the_statement_is_the_innermost(tmp_path):
    sites = find(tmp_path, "if n:\n    with torch.device('cpu'):\n        self.a = A()")
    (site,) = sites["a"]
    assert site.file.segment(site.statement) == "self.a = A()"


def test_a_class_without_a_constructor_has_no_sites(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("class M:\n    a = 1\n")
    assert find_sites(SourceFile.read(path), "M") == {}
    assert find_sites(SourceFile.read(path), "Nothing") == {}


def test_recursion_ends(tmp_path):
    sites = find(
        tmp_path,
        "self.a = make(n)\nxs = xs + [xs]\nself.b = nn.ModuleList(xs)",
        more="def make(n):\n    return make(n - 1) if n else A()\n",
    )
    assert "a" in sites


def test_lists_that_a_loop_makes_are_counted_by_it(tmp_path):
    text = """from torch import nn


class Net(nn.Module):
    def __init__(self, depth, w):
        super().__init__()
        layers = []
        for i in range(depth):
            layers.append(nn.ModuleList([nn.Linear(w, w), nn.ReLU()]))
        self.layers = nn.ModuleList(layers)
        self.more = nn.ModuleList(nn.ModuleList([nn.ReLU()]) for j in range(depth))
"""
    path = tmp_path / "net.py"
    path.write_text(text)
    found = find_sites(SourceFile.read(path, "net"), "Net")
    counted = {p: [site.index for site in sites] for p, sites in found.items()}
    assert counted["layers.*.0"] == counted["layers.*.1"] == ["i"]
    assert counted["more.*.0"] == ["j"]
    assert all(len(site.loops) == 1 for site in found["layers.*.1"])
