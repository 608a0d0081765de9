"""Cached results of operations on the meta device."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_rewrite.model import meta_device
from slapo_rewrite.model.meta_device import KnownOperators, KnownResults, NeedsGraph
from tests.rewriting import refused, rewritten

X = torch.empty(2, 6, 8, device="meta", requires_grad=True)
Y = torch.empty(8, 6, 2, device="meta", dtype=torch.bfloat16).permute(2, 1, 0)
W = torch.nn.Parameter(torch.empty(5, 8, device="meta"))


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    """What other tests had worked out is not known."""
    monkeypatch.setattr(KnownResults, "_known", {})


class Watch(TorchDispatchMode):
    """Notes what is worked out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


CALLS = [
    (torch.add, (X, Y), {}),
    (torch.Tensor.mul, (X, 2), {}),
    (torch.Tensor.mul, (X, 2.0), {}),
    (torch.Tensor.mul, (Y, 2), {}),
    (torch.Tensor.pow, (X.transpose(0, 1), 2), {}),
    (torch.Tensor.mean, (X, -1), {"keepdim": True}),
    (torch.rsqrt, (Y,), {}),
    (torch.cat, ((X, X),), {"dim": -1}),
    (F.linear, (X, W), {}),
    (F.layer_norm, (X, (8,)), {}),
    (F.gelu, (X,), {"approximate": "tanh"}),
    (F.dropout, (X, 0.5), {"training": True}),
    (F.scaled_dot_product_attention, (X, X, X), {"is_causal": True}),
    (torch.eq, (X, 0), {}),
    (torch.where, (X > 0, X, 0.0), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS)
@pytest.mark.parametrize("trained", [True, False])
def test_a_known_result_is_the_operations_own(func, args, kwargs, trained):
    results = KnownResults()
    with torch.set_grad_enabled(trained):
        first, second = (results.carry_out(func, args, kwargs) for _ in range(2))
        with Watch() as watch:
            third = results.carry_out(func, args, kwargs)
    assert set(watch.names) <= {"aten::empty_strided"}
    for known in (second, third):
        assert known is not first and known.is_meta and not known._is_view()
        for about in ("shape", "dtype", "requires_grad", "is_leaf"):
            assert getattr(known, about) == getattr(first, about)
        assert known.stride() == first.stride()
    assert third is not second
    third += 1 if third.dtype != torch.bool else True  # as what was worked out lets itself be


def test_what_differs_is_worked_out():
    results = KnownResults()
    results.carry_out(torch.mul, (X, 2), {})
    for args in ((X, 2.0), (X, True), (X.detach(), 2), (X.transpose(0, 1), 2), (X.half(), 2)):
        with Watch() as watch:
            have = results.carry_out(torch.mul, args, {})
        assert watch.names != ["aten::empty_strided"]
        want = torch.mul(*args)
        assert (have.dtype, have.stride()) == (want.dtype, want.stride())
        assert have.requires_grad == want.requires_grad


def test_what_one_run_has_worked_out_the_next_one_knows():
    KnownResults().carry_out(torch.mul, (X, 2), {})
    with Watch() as watch:
        KnownResults().carry_out(torch.mul, (X, 2), {})
    assert set(watch.names) <= {"aten::empty_strided"}


def test_few_results_are_kept(monkeypatch):
    monkeypatch.setattr(meta_device, "MOST_KNOWN", 2)
    for factor in range(9):
        KnownResults().carry_out(torch.mul, (X, factor), {})
    assert len(KnownResults._known) <= 2


def test_what_is_no_new_tensor_is_not_known():
    results = KnownResults()
    for _ in range(2):
        assert results.carry_out(F.dropout, (X, 0.5, False), {}) is X
        out = torch.empty_like(X, requires_grad=False)
        assert results.carry_out(torch.add, (Y, 1), {"out": out}) is out
        assert results.carry_out(torch.Tensor.view, (X, -1), {})._is_view()
        assert results.carry_out(torch.add, (torch.ones(2), 1), {}).tolist() == [2, 2]


SOURCE = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, x):
        y = x + x
        y = y * y
        slope, = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return self.down(torch.tanh(self.up(y + slope)))
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    torch.manual_seed(0)
    return {"x": torch.randn(2, 6, requires_grad=True)}


def schedule(s):
    s["up"].shard("weight", axis=0)
    s["down"].shard("weight", axis=1)
    s["down"].sync("fwd_post", "all_reduce")
    s["up"].sync("bwd_post", "all_reduce")
"""


def test_a_model_that_goes_backwards_has_everything_worked_out(tmp_path):
    with pytest.raises(NeedsGraph):
        KnownResults().carry_out(torch.autograd.grad, (X.sum(), X), {})
    output = rewritten(tmp_path, SOURCE, SCHEDULE)
    assert "ColumnParallelLinear(6, 8, bias=False)" in output.files[output.model_file]


@pytest.mark.parametrize("until", ["while x.abs().amax() >= 1:", "while not (x.abs() < 1).all():"])
def test_a_loop_that_values_end_ends(until, tmp_path, monkeypatch):
    monkeypatch.setattr(meta_device, "MOST_ASKED", 50)
    step = f"{until}\n            x = x / 2\n        return self.down(self.up(x))"
    source = f"{SOURCE.partition('        y = x + x')[0]}        {step}\n"
    output = rewritten(tmp_path, source, SCHEDULE)
    assert "RowParallelLinear(" in output.files[output.model_file]


def test_initialisation_without_memory_is_seen(tmp_path):
    """It returns at once on the meta device, and ranks would draw equal numbers for their parts."""
    step = "h = self.up(x)\n        n = nn.init.trunc_normal_(torch.empty_like(h))"
    source = f"{SOURCE.partition('        y = x + x')[0]}        {step}\n"
    text = refused(tmp_path, f"{source}        return self.down(h + n)\n", SCHEDULE, "SR104")
    assert "`any` needs the whole axis" in text and "nn.init.trunc_normal_" in text


@pytest.mark.parametrize(
    "called, is_known",
    [
        (lambda ops, x: ops.mm.default(x, x), True),
        (lambda ops, x: ops.mm.default(x.T, x), True),
        (lambda ops, x: ops._to_copy.default(x, dtype=torch.bfloat16), True),
        (lambda ops, x: ops.native_dropout.default(x, 0.1, True), True),
        (lambda ops, x: ops.empty_like.default(x.T), True),
        (lambda ops, x: ops._unsafe_view.default(x, [16]), False),
        (lambda ops, x: ops.t.default(x), False),
        (lambda ops, x: ops.add_.Tensor(x, x), False),
        (lambda ops, x: ops.add.Tensor(x, torch.ones(())), False),
    ],
)
def test_an_operator_gives_the_same_when_it_is_known(called, is_known):
    known = KnownOperators()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return known.carry_out(func, args, kwargs or {})

    def about(results):
        results = results if isinstance(results, tuple) else (results,)
        x_memory = x.untyped_storage()._cdata
        return [
            (t.shape, t.stride(), t.dtype, t.device, t.untyped_storage().nbytes(),
             t.untyped_storage()._cdata == x_memory)
            for t in results
        ]  # fmt: skip

    x = torch.empty(4, 4, device="meta")
    want = about(called(torch.ops.aten, x))
    with Mode():
        found = [about(called(torch.ops.aten, x)) for _ in range(2)]
    assert found == [want, want]
    assert len(known._known) == is_known
