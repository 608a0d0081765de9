"""Modules are joined to the expressions that made them, as the running constructors show."""

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.join import (
    Sources,
    find_parameter_site,
    find_site,
    resolve,
)
from slapo_rewrite.model.tree import Tree, build_model

HERE = Path(__file__).parent
numbers = itertools.count()


class Joined:
    """A model, its tree and its sources."""

    def __init__(self, module: ModuleType, make):
        with torch.device("meta"), construction_calls.recorded():
            self.tree = Tree(make(module))
        self.sources = Sources(SourceFile.read(Path(module.__file__), module.__name__))

    def site(self, path):
        return find_site(self.sources, self.tree.nodes[path])

    def text(self, path):
        site = self.site(path)
        return site.file.segment(site.value)

    def check(self, path):
        """Whether the site is where Python made the module."""
        site, stack = self.site(path), construction_calls.stack_of(self.tree.nodes[path].live)
        return construction_calls.depth(site.file, site.value, stack) is not None

    def check_all(self):
        paths = [p for p in self.tree.nodes if p]
        assert [p for p in paths if not self.check(p)] == []


def join(tmp_path: Path, text: str, more: str = "") -> Joined:
    """The class `M` of this text."""
    name = f"joined_{next(numbers)}"
    path = tmp_path / f"{name}.py"
    path.write_text(f"import copy\nimport random\nimport torch\nfrom torch import nn\n\n{text}\n")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return Joined(module, lambda m: m.M())


MODELS = {
    "BertForMaskedLM": {"num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 3},
    "GPT2LMHeadModel": {"n_layer": 3, "n_embd": 24, "n_head": 3, "add_cross_attention": True},
    "LlamaForCausalLM": {"num_hidden_layers": 3},
    "T5ForConditionalGeneration": {"num_layers": 3, "num_decoder_layers": 2},
    "GPTNeoForCausalLM": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "OPTForCausalLM": {"num_hidden_layers": 2, "word_embed_proj_dim": 16, "hidden_size": 24},
    "AlbertForMaskedLM": {"num_hidden_groups": 2, "inner_group_num": 2},
    "BartForConditionalGeneration": {"encoder_layers": 2, "decoder_layers": 2},
    "DeepseekV3ForCausalLM": {"num_hidden_layers": 5, "n_routed_experts": 8},
    "ZambaForCausalLM": {},
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_module_of_a_hugging_face_model(name):
    cls = getattr(transformers, name)
    config = cls.config_class(vocab_size=99, **MODELS[name])
    joined = Joined(sys.modules[cls.__module__], lambda _: cls(config))
    joined.check_all()
    for path, node in joined.tree.nodes.items():
        site = joined.site(path) if path else None
        if site and site.kind == "assign" and not node.name.isdecimal():
            assert node.name in site.file.segment(site.statement)


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
)
def test_every_parameter_of_a_hugging_face_model(name):
    cls = getattr(transformers, name)
    joined = Joined(sys.modules[cls.__module__], lambda _: cls(cls.config_class(**MODELS[name])))
    for node in joined.tree.nodes.values():
        of_torch = node.cls.__module__.startswith("torch.")
        for parameter in [*node.parameters, *node.buffers] if not of_torch else ():
            site = find_parameter_site(joined.sources, node, parameter)
            assert parameter in site.file.segment(site.statement)


SNIPPETS = {
    "arguments decide": """
class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        if index % 2 == 0:
            self.norm = nn.LayerNorm(4)
        else:
            self.norm = nn.LayerNorm(4, bias=False)
        self.mlp = nn.Linear(4, 4) if index in config["wide"] else nn.Identity()

class M(nn.Module):
    def __init__(self):
        super().__init__()
        config = {"wide": [1, 3]}
        self.config = config
        self.blocks = nn.ModuleList([Block(config, i) for i in range(5)])
        self.more = nn.ModuleList()
        for number in range(1, 3):
            self.more.append(Block(config, number))
        self.last = Block(index=2, config=config)
""",
    "local variables decide": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part(3)

class Part(nn.Module):
    def __init__(self, n):
        super().__init__()
        wide = n > 2
        width = 2 if wide else 1
        width = width * 2
        if width == 4:
            self.a = nn.Linear(2, 2)
        elif width == 2:
            self.a = nn.Linear(2, 2)
        else:
            self.a = nn.Linear(2, 2)
        kinds = ["x", "y"]
        if "y" in kinds and len(kinds) == 2:
            self.b = nn.Linear(2, 2)
        else:
            self.b = nn.Linear(2, 2)
""",
    "base classes": """
class Base(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        if bias:
            self.c = nn.Linear(width, width)
        else:
            self.c = nn.Linear(width, width, bias=False)
        self.built()

    def built(self):
        self.d = nn.Linear(2, 2)

class Middle(Base):
    def __init__(self, width):
        super().__init__(width, bias=False)
        self.b = nn.Linear(width, width, bias=False)

class Other(Base):
    def __init__(self):
        nn.Module.__init__(self)
        self.a = nn.Linear(3, 3)

class Skips(Middle):
    def __init__(self):
        super(Middle, self).__init__(4)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.middle = Middle(2)
        self.other = Other()
        self.skips = Skips()
        self.base = Base(2)
""",
    "classes out of variables": """
class A(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.lin = nn.Linear(n, n)

class B(A): pass

KINDS = {"a": A, "b": B}

class M(nn.Module):
    kind = B
    def __init__(self, which="b"):
        super().__init__()
        self.which = which
        self.a = KINDS[which](2)
        cls = A if which == "a" else B
        self.b = cls(2)
        self.c = self.kind(2)
        make = {"b": lambda n: A(n)}[which]
        self.d = make(2)
""",
    "containers": """
class Stack(nn.Sequential):
    def __init__(self, n):
        layers = []
        for i in range(n):
            layers.append(nn.Linear(2, 2))
            if i < n - 1:
                layers.append(nn.ReLU())
        super().__init__(*layers)

class M(nn.Module):
    def __init__(self, n=3, norm=True):
        super().__init__()
        self.n = n
        self.stack = Stack(n)
        steps = [nn.Linear(2, 2), nn.ReLU()]
        for _ in range(n):
            steps.extend([nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.ReLU()])
        self.steps = nn.Sequential(*steps)
        self.grid = nn.ModuleList(
            [nn.ModuleList([nn.Linear(2, 2) for _ in range(2)]) for _ in range(n)]
        )
        self.by_name = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("x", "y")})
        self.by_name["z"] = nn.Linear(2, 2)
        parts = [nn.Linear(2, 2)]
        if norm:
            parts.append(nn.LayerNorm(2))
        parts.append(nn.Linear(2, 2, bias=False))
        self.parts = nn.Sequential(*parts)
        for i in range(n):
            setattr(self, f"layer{i}", nn.Linear(2, 2))
            self.add_module("norm%d" % i, nn.LayerNorm(2))
""",
    "helpers": """
def make(width, act=None):
    layers = [nn.Linear(width, width)]
    if act == "relu":
        return nn.Sequential(*layers, nn.ReLU())
    return nn.Sequential(*layers, nn.GELU())

def either(flag):
    if flag:
        return nn.Linear(2, 2)
    return nn.Linear(2, 2, bias=False)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = make(2, act="relu")
        self.b = make(2)
        self.c = self.one(True)
        self.d = either(False)
        self.blocks = self.several(3)

    def one(self, flag):
        return nn.Linear(2, 2) if flag else nn.Linear(2, 2)

    @staticmethod
    def several(n):
        return nn.ModuleList([nn.Linear(2, 2) for _ in range(n)])
""",
    "modules given to others": """
class Holder(nn.Module):
    def __init__(self, inner, again=None):
        super().__init__()
        self.inner = inner
        if again is not None:
            self.again = again

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Holder(nn.Linear(2, 2))
        shared = nn.Linear(2, 2)
        self.b = Holder(shared, again=nn.ReLU())
        self.c = Holder(inner=self.a.inner)
        self.d = self.a.inner
        self.e = self.f = nn.Linear(2, 2)
""",
    "lists given to others": """
class All(nn.Module):
    def __init__(self, *inner, more=()):
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.more = nn.Sequential(*more)

class M(nn.Module):
    def __init__(self, n=2):
        super().__init__()
        self.a = All(nn.Linear(2, 2), nn.ReLU())
        self.b = All(*[nn.Linear(2, 2) for _ in range(n)])
        self.c = nn.ModuleList([All(*(nn.Linear(2, 2) for _ in range(i + 1))) for i in range(n)])
        layers = [nn.Linear(2, 2), nn.Tanh()]
        self.d = All(*layers, more=[nn.Linear(2, 2)])
        others = [nn.Tanh() for _ in range(n)]
        self.e = All(nn.Linear(2, 2), more=others)
""",
    "torch's own": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, batch_first=True)
        self.one = layer
        self.attention = nn.MultiheadAttention(4, 2)
        self.rnn = nn.LSTM(2, 2)
""",
    "put into another module": """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.inner.act = nn.ReLU(inplace=True)
        self.inner.extra = nn.GELU()
        self.list = nn.ModuleList([Inner() for _ in range(2)])
        for inner in self.list:
            inner.act = nn.GELU()
""",
    "set later": """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
    def add(self):
        self.b = nn.Linear(2, 2)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.inner.add()
""",
    "replaced": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

class Part(nn.Module):
    def __init__(self, small=False):
        super().__init__()
        self.a = nn.Linear(2, 2)
        if not small:
            self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        if small:
            self.b = nn.Linear(2, 2)
        if not hasattr(self, "c"):
            self.c = nn.Linear(2, 2)
""",
    "imports and classes in odd places": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        from torch.nn import Linear as L
        self.a = L(2, 2)
        self.b = torch.nn.modules.linear.Linear(2, 2)
        self.c = (
            nn
            .Linear(2, 2)
        )
        with torch.device("meta"):
            self.d: nn.Module = nn.Linear(2, 2).requires_grad_(False)
        if (act := nn.ReLU()) is not None: self.e = act
""",
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_every_module_is_found_where_python_made_it(tmp_path, name):
    join(tmp_path, SNIPPETS[name]).check_all()


def test_kinds_and_paths(tmp_path):
    joined = join(tmp_path, SNIPPETS["helpers"])
    assert joined.site("c").kind == "assign"
    assert joined.site("c").function.name == "one"
    assert joined.site("blocks.1").path == "blocks.*"
    given = join(tmp_path, SNIPPETS["modules given to others"])
    assert given.site("a.inner").kind == "argument"
    assert (given.site("a.inner").class_name, given.site("a.inner").path) == ("M", "a.inner")
    lists = join(tmp_path, SNIPPETS["lists given to others"])
    assert [lists.site(p).path for p in ("a.inner.1", "b.inner.1")] == ["a.inner.1", "b.inner.*"]
    assert len(lists.site("c.1.inner.0").loops) == 2
    assert given.site("c.inner").kind == "alias"
    assert given.site("c.inner").alias == "a.inner"
    deep = join(tmp_path, SNIPPETS["put into another module"])
    assert (deep.site("inner.extra").class_name, deep.site("inner.extra").path) == (
        "M",
        "inner.extra",
    )


@pytest.mark.parametrize(
    "given",
    [
        "*[nn.Linear(2, 2)][::-1], nn.ReLU()",
        "*few, nn.Linear(2, 2)",
        "*[nn.Linear(2, 2) for i in range(3) if i]",
        "*(few + [nn.Linear(2, 2)])",
        "*both",
        "*[few[0] for _ in range(1)], *[nn.Linear(2, 2)]",
    ],
)
def test_what_numbers_in_a_list_do_not_tell_is_known(given, tmp_path):
    joined = join(
        tmp_path,
        SNIPPETS["lists given to others"].partition("class M")[0]
        + f"""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        few, both = [nn.ReLU()], [nn.Linear(2, 2), nn.Linear(2, 2)]
        self.a = All({given})
""",
    )
    joined.check_all()


@pytest.mark.parametrize(
    "line",
    [
        "xs.reverse()",
        "xs.insert(0, nn.Linear(2, 2))",
        "xs[0], xs[1] = xs[1], xs[0]",
        "random.Random(1).shuffle(xs)",
        "xs += [nn.Linear(2, 2)]",
        "del xs[0]",
        "ys = xs; ys.reverse()",
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_elements_of_a_list_that_is_changed_before_it_is_used(inside, line, tmp_path):
    lines = (line, "pass") if inside else ("pass", line)
    joined = join(
        tmp_path,
        """
class All(nn.Module):
    def __init__(self, xs):
        super().__init__()
        {}
        self.inner = nn.ModuleList(xs)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        xs = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
        {}
        self.a = All(xs)
""".format(*lines),
    )
    joined.check_all()


def test_elements_of_a_loop_share_one_site(tmp_path):
    joined = join(tmp_path, SNIPPETS["containers"])
    assert joined.site("grid.0.1") is joined.site("grid.2.0")
    assert joined.site("grid.0.1").path == "grid.*.*"


def test_every_module_is_found_where_python_is_known_to_have_made_it(tmp_path):
    joined = join(
        tmp_path,
        """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        if random.random() < 0.5:
            self.a = nn.Linear(2, 2)
        else:
            self.a = nn.Linear(2, 2)
        if random.random() < 0.5:
            self.a = nn.Linear(2, 2)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(20)])
""",
    )
    module = sys.modules[joined.tree.root.cls.__module__]
    random.seed(0)
    joined.tree = Tree(build_model(lambda m: m.M(), module))
    lines = set()
    for number in range(20):
        node = joined.tree.nodes[f"parts.{number}.a"]
        site = find_site(joined.sources, node)
        assert (
            construction_calls.depth(site.file, site.value, construction_calls.stack_of(node.live))
            == 0
        )
        lines.add(site.value.lineno)
    assert len(lines) == 3


def test_a_module_of_the_right_class_made_elsewhere_is_not_mistaken(tmp_path):
    joined = join(
        tmp_path,
        """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        swap(self)

def swap(model):
    for name in list(model._modules):
        model._modules[name] = nn.Linear(3, 3)
""",
    )
    module = sys.modules[joined.tree.root.cls.__module__]
    joined.tree = Tree(build_model(lambda m: m.M(), module))
    assert joined.text("a") == "nn.Linear(3, 3)"


def test_copies_are_found_at_the_call_that_copies(tmp_path):
    joined = join(
        tmp_path,
        """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.Sequential(nn.Linear(2, 2))
        self.x = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2)
""",
    )
    assert joined.text("x.1") == "nn.Sequential(nn.Linear(2, 2))"
    assert joined.site("x.1").kind == "assign"
    assert joined.text("x.1.0") == "nn.Linear(2, 2)"
    layer = "nn.TransformerEncoderLayer(4, 2, batch_first=True)"
    assert joined.text("encoder.layers.1") == layer  # torch copies what it is given
    assert joined.text("encoder.layers.1.linear1").startswith("Linear(")


def test_copies_of_what_a_constructor_is_given_are_found_where_it_is_called(tmp_path):
    joined = join(
        tmp_path,
        """
def clones(module, number):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(number)])

class Stack(nn.Module):
    def __init__(self, layer, number):
        super().__init__()
        self.layers = clones(layer, number)
        self.last = copy.deepcopy(layer)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.Linear(3, 2)
        self.x = Stack(layer, 2)
        self.y = Stack(number=1, layer=nn.Linear(2, 2))
""",
    )
    assert joined.text("x.layers.1") == joined.text("x.last") == "nn.Linear(3, 2)"
    assert joined.text("y.layers.0") == joined.text("y.last") == "nn.Linear(2, 2)"


def test_a_module_that_nothing_is_noted_of_is_refused_with_its_class(tmp_path):
    joined = join(
        tmp_path,
        """
HIDDEN = nn.Linear(2, 2)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self._modules["hidden"] = HIDDEN
""",
    )
    with pytest.raises(errors.UnfollowableConstruction, match="`hidden` \\(Linear\\)") as caught:
        joined.site("hidden")
    assert caught.value.at.text == "class M(nn.Module):"
    assert caught.value.hint


def test_guards_are_evaluated_without_calling_the_users_functions(tmp_path):
    joined = join(
        tmp_path,
        """
calls = []

def wide(n):
    calls.append(n)
    return n > 1

class M(nn.Module):
    def __init__(self, n=2):
        super().__init__()
        if wide(n):
            self.a = nn.Linear(2, 2)
        else:
            self.a = nn.ReLU()
""",
    )
    module = sys.modules[joined.tree.root.cls.__module__]
    before = list(module.calls)
    assert joined.text("a") == "nn.Linear(2, 2)"
    assert module.calls == before


def test_parameters(tmp_path):
    joined = join(
        tmp_path,
        """
class Base(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        if bias:
            self.bias = nn.Parameter(torch.zeros(2))
        else:
            self.register_parameter("bias", None)

class M(Base):
    def __init__(self):
        super().__init__(True)
        self.weight = nn.Parameter(torch.zeros(2))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])
        self.register_buffer("mask", torch.ones(2), persistent=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.ones(2))
        self.fc = nn.Linear(2, 2)
        self.fc.weight = self.weight
""",
    )
    nodes = joined.tree.nodes

    def found(path, name):
        site = find_parameter_site(joined.sources, nodes[path], name)
        return site.kind, site.file.segment(site.value), site.class_name

    assert found("", "weight") == ("parameter", "nn.Parameter(torch.zeros(2))", "M")
    assert found("", "bias") == ("parameter", "nn.Parameter(torch.zeros(2))", "Base")
    assert found("", "mask") == ("buffer", "torch.ones(2)", "M")
    assert found("", "sin") == ("buffer", "torch.ones(2)", "M")
    assert found("scales", "1")[::2] == ("parameter", "M")
    assert found("fc", "weight")[2] == "M"
    with pytest.raises(errors.UnfollowableConstruction, match=r"`fc\.bias`"):
        found("fc", "bias")  # torch makes it
    with pytest.raises(errors.UnfollowableConstruction, match="`nothing`"):
        find_parameter_site(joined.sources, nodes[""], "nothing")


def test_sources_read_each_file_once(tmp_path):
    joined = join(tmp_path, SNIPPETS["base classes"])
    cls = joined.tree.nodes["middle"].cls
    assert joined.sources.file_of(cls) is joined.sources.main
    assert [n for _, n in joined.sources.classes(cls)] == ["Middle", "Base"]
    assert joined.sources.classes(torch.nn.Linear) == []
    linear = joined.sources.file_of(torch.nn.Linear)
    assert linear is joined.sources.file_of(torch.nn.Bilinear)
    assert linear.path.name == "linear.py"
    assert joined.sources.file_of(dict) is None


def test_what_is_called_is_resolved_for_one_instance(tmp_path):
    joined = join(tmp_path, SNIPPETS["classes out of variables"])
    for path in ("a", "b", "c"):
        node, site = joined.tree.nodes[path], joined.site(path)
        assert site.callee is not None
        assert resolve(site.callee, site, node) is node.cls
