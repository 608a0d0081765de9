"""What every kernel must do, on any device and under Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.runtime.kernels.cases [--device cuda] [--only NAME]

Prints one JSON object: each case's traceback, or null where it passed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
import traceback
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slapo_rewrite.runtime.kernels import layer_norm as layer_norms
from slapo_rewrite.runtime.kernels import linear_cross_entropy as chunked
from slapo_rewrite.runtime.kernels.bias_gelu import (
    bias_activation,
    bias_gelu,
    linear_activation,
    linear_gelu,
)
from slapo_rewrite.runtime.kernels.cross_entropy import cross_entropy, whole_vectors
from slapo_rewrite.runtime.kernels.dropout_residual import dropout_residual
from slapo_rewrite.runtime.kernels.gated import gated, geglu, reglu, swiglu
from slapo_rewrite.runtime.kernels.launch import jit, runs_triton, tl
from slapo_rewrite.runtime.kernels.layer_norm import (
    layer_norm,
    norm_before,
    residual_layer_norm,
)
from slapo_rewrite.runtime.kernels.linear_cross_entropy import linear_cross_entropy
from slapo_rewrite.runtime.kernels.linear_each import linear_each
from slapo_rewrite.runtime.kernels.rms_norm import residual_rms_norm, rms_norm
from slapo_rewrite.runtime.kernels.rotary import rotary
from slapo_rewrite.runtime.kernels.softmax import masked_softmax
from tests.runtime.kernels.compare import DTYPES, Maker, compare, float64_or_32

CASES: dict[str, Callable[[str], None]] = {}


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    CASES[function.__name__] = function
    return function


def makers(device: str) -> list[Maker]:
    return [Maker(device, dtype) for dtype in DTYPES]


# The originals, as Hugging Face writes them.


def llama_norm(x, weight, eps=1e-6):
    hidden = x.to(float64_or_32(x))
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.to(x.dtype)


def gemma_norm(x, weight, eps=1e-6):
    hidden = x.to(float64_or_32(x))
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return (hidden * (1.0 + weight.to(hidden.dtype))).type_as(x)


def t5_norm(x, weight, eps=1e-6):
    variance = x.to(float64_or_32(x)).pow(2).mean(-1, keepdim=True)
    hidden = x * torch.rsqrt(variance + eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        hidden = hidden.to(weight.dtype)
    return weight * hidden


def gelu_new(x):
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def neox_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    size = cos.shape[-1]
    rotated = [
        torch.cat((x[..., :size] * cos + rotate_half(x[..., :size]) * sin, x[..., size:]), -1)
        for x in (q, k)
    ]
    return rotated[0], rotated[1]


def cast(loss):
    """A kernel's loss as of logits that are cast first, as `causal_loss` casts them."""
    return functools.partial(loss, upcast=True)


def causal_loss(logits, labels, **options):
    softcap, num_items = options.pop("softcap", None), options.pop("num_items", None)
    logits = logits.to(float64_or_32(logits)).view(-1, logits.shape[-1])
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    reduction = "mean" if num_items is None else "sum"
    loss = F.cross_entropy(logits, labels.reshape(-1), reduction=reduction, **options)
    return loss if num_items is None else loss / num_items


def eager_softmax(x, mask, scale):
    scores = x * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=float64_or_32(scores)).to(x.dtype)


# Normalisation.


@case
def rms_norm_like_llama(device):
    for make in makers(device):
        for size in make.sizes:
            # A row of one is its own root mean square, and its gradient nothing but rounding.
            least = 1.0 if size == 1 else 0.0
            compare(rms_norm, llama_norm, make(2, 3, size), make(size), least=least)


@case
def rms_norm_of_any_strides(device):
    for make in makers(device):
        for x in make.strided(4, 5, 24):
            compare(rms_norm, llama_norm, x, make(2 * 24)[::2])


@case
def rms_norm_like_gemma_and_t5(device):
    for make in makers(device):
        for dtype in (make.dtype, torch.float32):
            x, weight = make(5, 3, 100), make(100, dtype=dtype)
            compare(lambda x, w: rms_norm(x, w, offset=1.0, cast="output"), gemma_norm, x, weight)
            compare(lambda x, w: rms_norm(x, w, cast="weight"), t5_norm, x, weight)
            compare(rms_norm, llama_norm, x, weight)


@case
def rms_norm_with_a_weight_for_each_head(device):
    for make in makers(device):
        for shape in ((3, 16), (1,)):
            compare(rms_norm, llama_norm, make(5, 3, 16), make(*shape))


@case
def rms_norm_without_a_weight(device):
    def plain(x):
        wide = x.to(float64_or_32(x))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    for make in makers(device):
        compare(lambda x: rms_norm(x, None), plain, make(3, 100))


@case
def residual_rms_norm_gives_both(device):
    def original(x, residual, weight):
        total = residual + x
        return llama_norm(total, weight), total

    for make in makers(device):
        for size in make.sizes[-4:]:
            compare(residual_rms_norm, original, make(3, size), make(3, size), make(size))
        for x in make.strided(4, 5, 24):
            compare(residual_rms_norm, original, x, make(24, 5, 4).transpose(0, 2), make(24))
    make = Maker(device, torch.bfloat16)  # the stream in float32, as under autocast
    residual = make(3, 40, dtype=torch.float32)
    compare(residual_rms_norm, original, make(3, 40), residual, make(40, dtype=torch.float32))


@case
def one_output_may_go_unused(device):
    make = Maker(device, torch.float32)
    x, residual, weight = (t.requires_grad_() for t in (make(3, 8), make(3, 8), make(8)))
    for function in (
        lambda: residual_rms_norm(x, residual, weight),
        lambda: residual_layer_norm(x, residual, weight, weight, dropout=0.5),
    ):
        total = function()[1]
        dx, dresidual, dweight = torch.autograd.grad(
            total.sum(), (x, residual, weight), allow_unused=True
        )
        assert torch.equal(dresidual, torch.ones_like(residual))
        assert dx.shape == x.shape
        assert dweight is None or not dweight.any()
        normalised = function()[0]
        assert torch.autograd.grad(normalised.sum(), weight)[0].any()


@case
def weights_gradients_are_the_same_at_every_run(device):
    make = Maker(device, torch.bfloat16)
    x, weight = make(71, 96).requires_grad_(), make(96).requires_grad_()
    for function in (
        lambda: rms_norm(x, weight),
        lambda: layer_norm(x, weight, weight),
        lambda: bias_gelu(x, weight),
    ):
        first, second = (torch.autograd.grad(function().sum(), weight)[0] for _ in range(2))
        assert torch.equal(first, second)


@case
def layer_norm_of_any_size(device):
    def original(x, weight, bias):
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    for make in makers(device):
        for size in make.sizes[-4:]:
            compare(layer_norm, original, make(2, 3, size), make(size), make(size))
        for x in make.strided(4, 5, 24):
            compare(layer_norm, original, x, make(24), make(2 * 24)[::2])
        x = make(5, 40)
        compare(lambda x, w: layer_norm(x, w, None), lambda x, w: original(x, w, None), x, make(40))
        compare(lambda x: layer_norm(x, None, None), lambda x: original(x, None, None), x)
        far = make(5, 40) + 100  # a mean that drowns the rest if variances are differences
        compare(layer_norm, original, far, make(40), make(40))


@case
def layer_norm_of_one_column_is_its_bias(device):
    make = Maker(device, torch.float32)
    x, weight, bias = make(3, 1), make(1), make(1)
    assert torch.equal(layer_norm(x, weight, bias), bias.expand(3, 1))


@case
def residual_layer_norm_without_dropout(device):
    def original(x, residual, weight, bias, added):
        total = x + added + residual
        return F.layer_norm(total, total.shape[-1:], weight, bias, 1e-5), total

    def ours(x, residual, weight, bias, added):
        return residual_layer_norm(x, residual, weight, bias, linear=Conv1D(added))

    for make in makers(device):
        for size in make.sizes[-4:]:
            vectors = make(size), make(size), make(size)
            compare(ours, original, make(3, size), make(3, size), *vectors)
        for x in make.strided(4, 5, 24):
            compare(ours, original, x, make(24, 5, 4).transpose(0, 2), *make(3, 24))
        x, residual = make(5, 40), make(5, 40)
        for dropout in (0.0, torch.nn.Dropout(0.5).eval()):
            total = residual_layer_norm(x, residual, make(40), make(40), dropout=dropout)[1]
            assert torch.equal(total, x + residual)


@case
def a_residual_hands_its_gradient_to_the_norm_before(device):
    """Where nobody sees it; every gradient is the original's whatever is asked for."""

    def gradients(how, norm):
        make = Maker(device, torch.float32)
        x, matrix, weights = make(5, 24), make(24, 24), [make(24) for _ in range(3)]
        inputs = [t.requires_grad_() for t in (x, matrix, *weights)]
        handed, between, seen = [], [], []

        def layer(y, weight):
            return norm(torch.tanh(y @ matrix), y, weight)

        def spy(ctx):
            found = norm_before(ctx)
            handed.append(found is not None)
            return found

        with mock.patch.object(layer_norms, "norm_before", spy):
            y = x
            for weight in weights:
                y = (
                    checkpoint(layer, y, weight, use_reentrant=False)
                    if how == "checkpoint"
                    else (layer(y, weight))
                )
                between.append(y)
            if how == "hook":
                between[0].register_hook(seen.append)
            if how == "retain_grad":
                between[0].retain_grad()
            loss = (y * make(5, 24)).sum()
            if how == "grad":
                return handed, torch.autograd.grad(loss, [*inputs, *between[:2]])
            if how == "inputs":
                loss.backward(inputs=[*inputs, between[0]])
            elif how == "twice":
                loss.backward(retain_graph=True)
            if how != "inputs":
                loss.backward()
        seen += [between[0].grad] if how in ("retain_grad", "inputs") else []
        return handed, [t.grad for t in (*inputs, *seen)]

    def ours(x, residual, weight):
        return residual_layer_norm(x, residual, weight, weight)[0]

    def original(x, residual, weight):
        return F.layer_norm(x + residual, (24,), weight, weight)

    for how, expected in {
        "plain": [True, True, False],
        "twice": [True, True, False] * 2,
        "hook": [True, False, False],
        "retain_grad": [True, False, False],
        "inputs": [True, False, False],
        "grad": [False] * 3,
        "checkpoint": [True, True, False],
    }.items():
        handed, found = gradients(how, ours)
        assert handed == (expected if runs_triton(torch.empty(1, device=device)) else []), how
        for one, other in zip(found, gradients(how, original)[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@case
def linear_each_adds_up_in_the_products(device):
    def called(x, *layers):
        return tuple(layer(x) for layer in layers)

    for make in makers(device):
        sizes = (24, True), (8, False), (8, True)
        layers = [torch.nn.Linear(40, f, b, device, make.dtype) for f, b in sizes]
        parameters = [p for layer in layers for p in layer.parameters()]
        rough = make.dtype != torch.float32
        near = {"rtol": 0.05, "atol": 0.2} if rough else {"rtol": 1e-4, "atol": 1e-4}
        for x in make.strided(4, 5, 40):
            for read in ((0, 1, 2), (1,), (2, 0)):
                gradients = []
                for function in (linear_each, called):
                    given = x.detach().requires_grad_()
                    outputs = function(given, *layers)
                    loss = sum((outputs[i].float().sin() * (i + 1)).sum() for i in read)
                    wanted = (given, *parameters)
                    gradients.append(torch.autograd.grad(loss, wanted, allow_unused=True))
                for one, other in zip(*gradients, strict=True):
                    assert (one is None) == (other is None)
                    if one is not None:
                        torch.testing.assert_close(one, other, **near)
        names = {y.grad_fn.name() for y in linear_each(x, *layers)}
        assert not runs_triton(x) or names == {"LinearEachFunctionBackward"}


@case
def layers_that_do_more_are_called(device):
    """A layer that is given with its parameters changes nothing, until it gets a hook."""
    make = Maker(device, torch.float32)
    x, residual, labels = make(3, 4, 40), make(3, 4, 40), torch.arange(12, device=device).view(3, 4)
    norm, rms = torch.nn.LayerNorm(40).to(device), torch.nn.RMSNorm(40, eps=1e-6).to(device)
    head = torch.nn.Linear(40, 20).to(device)
    of_norm, of_rms = (x, residual, norm.weight, norm.bias), (x, residual, rms.weight)
    of_head = (x, head.weight, labels)
    given = {
        norm: lambda **layer: residual_layer_norm(*of_norm, **layer, dropout=0.0),
        rms: lambda **layer: residual_rms_norm(*of_rms, **layer),
    }
    for layer, kernel in given.items():
        alone = kernel()
        assert all(map(torch.equal, kernel(norm=layer), alone))
        assert type(kernel(norm=layer)[0].grad_fn) is type(alone[0].grad_fn)
        layer.register_forward_hook(lambda module, args, output: 2 * output)
        normed, total = kernel(norm=layer)
        torch.testing.assert_close((normed, total), (2 * alone[0], alone[1]))
    loss = linear_cross_entropy(*of_head, bias=head.bias)
    assert torch.equal(linear_cross_entropy(*of_head, bias=head.bias, layer=head), loss)
    head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    doubled = linear_cross_entropy(2 * x, *of_head[1:], bias=head.bias)
    called = linear_cross_entropy(*of_head, bias=head.bias, layer=head)
    torch.testing.assert_close(called, doubled)


@case
def modules_that_do_more_are_called(device):
    """A linear layer, an activation and a dropout: each gets a hook, or an adapter, in turn."""

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return 3 * self.base(x)

    def ours(x, linear, activation, dropout):
        kinds = {"kind": "relu", "activation": activation, "dropout": dropout}
        x = linear_activation(x, linear, **kinds) + bias_activation(x, None, **kinds)
        x = gated(x, x, **kinds) + residual_rms_norm(x, x, None, dropout=dropout)[1]
        given = {"linear": linear, "dropout": dropout}
        return dropout_residual(x, x, **given) + residual_layer_norm(x, x, None, None, **given)[1]

    def original(x, linear, activation, dropout):
        x = dropout(activation(linear(x))) + dropout(activation(x))
        x = dropout(activation(x) * x) + dropout(x) + x
        return 2 * (dropout(linear(x)) + x)

    later = {
        "nothing": lambda layer: layer,
        "hook": lambda layer: layer.register_forward_hook(lambda m, a, y: 2 * y),
        "hook before": lambda layer: layer.register_forward_pre_hook(lambda m, a: (2 * a[0],)),
        "a forward": lambda layer: setattr(layer, "forward", lambda x: 2 * x),
        "an adapter": Adapter,
    }
    x = (0.1 * Maker(device, torch.float32)(5, 24)).requires_grad_()
    for name in ("linear", "activation", "dropout"):
        for what, put in later.items():
            linear, dropout = torch.nn.Linear(24, 24, device=device), torch.nn.Dropout(0.0)
            given = {"linear": linear, "activation": torch.nn.ReLU(), "dropout": dropout}
            if isinstance(new := put(given[name]), torch.nn.Module):
                given[name] = new
            wanted = (x, *linear.parameters())
            found = []
            for function in (ours, original):
                y = function(x, **given)
                more = torch.autograd.grad(y.sum(), wanted, allow_unused=True)
                found.append([y, *(x.new_zeros(()) if t is None else t for t in more)])
            for one, other in zip(*found, strict=True):
                note = f"{what} of {name}: {{}}".format
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=note)


@case
def linear_each_calls_layers_that_do_more(device):
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layers = [torch.nn.Linear(8, 8, device=device) for _ in range(2)]
    x, scaled = Maker(device, torch.float32)(3, 8), Scaled(8, 8, device=device)
    assert torch.equal(linear_each(x, *layers, scaled)[2], scaled(x))
    with torch.autocast(device, torch.bfloat16):
        assert linear_each(x, *layers)[0].dtype == torch.bfloat16
    layers[0].register_forward_hook(lambda module, inputs, output: output + 1)
    assert torch.equal(linear_each(x, *layers)[0], layers[0](x))


@case
def dropout_residual_without_dropout(device):
    def original(x, residual, added):
        return x + added + residual

    def ours(x, residual, added):
        return dropout_residual(x, residual, linear=Conv1D(added))

    for make in makers(device):
        for size in make.sizes[-4:]:
            compare(ours, original, make(3, size), make(3, size), make(size))
            compare(dropout_residual, torch.add, make(3, size), make(3, size))
        for x in make.strided(4, 5, 24):
            compare(ours, original, x, make(24, 5, 4).transpose(0, 2), make(24))
        x, residual = make(5, 40), make(5, 40)
        for dropout in (0.0, torch.nn.Dropout(0.5).eval()):
            assert torch.equal(dropout_residual(x, residual, dropout=dropout), x + residual)


class Conv1D(torch.nn.Module):
    """A layer whose product is its input, and to which a bias is added."""

    class Weight:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return args[0]

    def __init__(self, bias):
        super().__init__()
        self.bias, self.weight = bias, self.Weight()

    def forward(self, x):
        return x + self.bias


def dropouts(x, p):
    """Ones with some dropped out, by every kernel that drops: their names and results."""
    zero = torch.zeros_like(x)
    return {
        "residual_layer_norm": lambda: residual_layer_norm(x, zero, None, None, dropout=p)[1],
        "residual_rms_norm": lambda: residual_rms_norm(x, zero, None, dropout=p)[1],
        "dropout_residual": lambda: dropout_residual(x, zero, dropout=p),
        "bias_activation": lambda: bias_activation(x, None, "relu", dropout=p),
        "gated": lambda: reglu(x, torch.ones_like(x), dropout=p),
        "gated up": lambda: reglu(torch.ones_like(x), x, dropout=p),
    }


@case
def dropout_keeps_its_share(device):
    for p, name in (
        (0.1, "residual_layer_norm"),
        (0.5, "residual_layer_norm"),
        (0.1, "residual_rms_norm"),
        (0.3, "dropout_residual"),
        (0.1, "bias_activation"),
        (0.1, "gated"),
    ):
        # Several blocks of columns, where a kernel takes some at a time.
        x = torch.ones(96, 1100 if name == "dropout_residual" else 250, device=device)
        torch.manual_seed(3)
        total = dropouts(x, p)[name]()
        kept = total != 0
        wanted = torch.tensor(1 / (1 - p), device=device)
        assert torch.equal(total, torch.where(kept, wanted, 0.0))
        deviation = math.sqrt(p * (1 - p) / kept.numel())
        assert abs(kept.double().mean().item() - (1 - p)) < 4 * deviation
        for axis in (0, 1):  # no row or column is favoured, neighbours are independent
            share = kept.double().mean(axis)
            spread = math.sqrt(p * (1 - p) / kept.shape[axis])
            assert (share - (1 - p)).abs().max() < 5 * spread
            ahead = kept.narrow(axis, 1, kept.shape[axis] - 1)
            behind = kept.narrow(axis, 0, kept.shape[axis] - 1)
            assert abs((ahead & behind).double().mean().item() - (1 - p) ** 2) < 0.015
    for function in dropouts(x, 1.0).values():
        assert not function().any()


@case
def dropout_goes_back_by_the_same_mask(device):
    for make in makers(device):
        x = torch.ones(6, 250, device=device, dtype=make.dtype, requires_grad=True)
        zero, bias = torch.zeros_like(x), torch.zeros_like(x[0]).requires_grad_()
        torch.manual_seed(3)
        total = residual_layer_norm(x, zero, None, None, dropout=0.3)[1]
        assert torch.equal(torch.autograd.grad(total.sum(), x)[0], total)
        torch.manual_seed(3)
        assert torch.equal(residual_layer_norm(x, zero, None, None, dropout=0.3)[1], total)
        assert not torch.equal(residual_layer_norm(x, zero, None, None, dropout=0.3)[1], total)
        torch.manual_seed(3)
        both = residual_layer_norm(x, zero, None, None, linear=Conv1D(bias), dropout=0.3)
        dx, dbias = torch.autograd.grad(both, (x, bias), (make(6, 250), zero + 1))
        assert not dx[total == 0].any()
        error = (dbias.double() - dx.double().sum(0)).abs().max()
        assert error < 8 * torch.finfo(make.dtype).eps * dx.double().abs().sum(0).max()


@case
def every_dropout_goes_back_by_its_own_mask(device):
    for make in makers(device):
        x = torch.ones(2, 1250, device=device, dtype=make.dtype, requires_grad=True)
        for name, function in dropouts(x, 0.3).items():
            torch.manual_seed(3)
            y = function()
            assert 0 < (y != 0).double().mean() < 1, name
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y), name
            torch.manual_seed(3)
            assert torch.equal(function(), y), name
            assert not torch.equal(function(), y), name


@case
def normalising_after_dropout_goes_back_right(device):
    make = Maker(device, torch.float32)
    weight, residual = make(40).requires_grad_(), make(6, 40).requires_grad_()
    x = make(6, 40).requires_grad_()
    seeds = make(6, 40), make(6, 40)
    for function, original in (
        (residual_rms_norm, lambda t: llama_norm(t, weight)),
        (
            lambda *a, **k: residual_layer_norm(*a, None, **k),
            lambda t: F.layer_norm(t, (40,), weight, None, 1e-5),
        ),
    ):
        y, total = function(x, residual, weight, dropout=0.3)
        found = torch.autograd.grad((y, total), (x, residual, weight), seeds)
        scale = ((total - residual) / x).detach()  # what each element was multiplied by
        expected = residual + scale * x
        wanted = torch.autograd.grad((original(expected), expected), (x, residual, weight), seeds)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@case
def dropout_recomputed_is_the_same(device):
    make = Maker(device, torch.float32)
    weight, residual = make(40).requires_grad_(), make(6, 40)

    def block(x):
        x = residual_layer_norm(x, residual, weight, weight, dropout=0.3)[0].sin()
        total = dropout_residual(x, residual, dropout=0.2)
        x = residual_rms_norm(x, total, weight, dropout=0.1)[0]
        return bias_activation(x, weight, "gelu", dropout=0.3) + swiglu(x, x, dropout=0.3)

    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        x = make.__class__(device, torch.float32)(6, 40).requires_grad_()
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(run(x).sum(), (x, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# Activations.


@case
def gated_units(device):
    pairs = [
        (swiglu, lambda gate, up: F.silu(gate) * up),
        (geglu, lambda gate, up: F.gelu(gate) * up),
        (lambda g, u: geglu(g, u, "tanh"), lambda g, u: F.gelu(g, approximate="tanh") * u),
        (lambda g, u: geglu(g, u, "tanh"), lambda g, u: gelu_new(g) * u),
        (reglu, lambda g, u: F.relu(g) * u),
        (lambda g, u: gated(g, u, "quick_gelu"), lambda g, u: g * torch.sigmoid(1.702 * g) * u),
    ]
    for make in makers(device):
        for kernel, original in pairs:
            for size in make.sizes if kernel is swiglu else (127,):
                compare(kernel, original, make(2, 3, size), make(2, 3, size))
        packed = make(4, 5, 48)
        for gate in make.strided(4, 5, 24):
            compare(swiglu, pairs[0][1], gate, packed.chunk(2, -1)[1])
        large = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], device=device)
        for kernel, original in (*pairs[:3], *pairs[4:]):
            compare(kernel, original, large.to(make.dtype), torch.ones_like(large).to(make.dtype))


@case
def bias_and_gelu(device):
    pairs = [
        (bias_gelu, lambda x, bias: F.gelu(x + bias)),
        (lambda x, b: bias_gelu(x, b, "tanh"), lambda x, b: F.gelu(x + b, approximate="tanh")),
        (lambda x, b: bias_gelu(x, b, "tanh"), lambda x, b: gelu_new(x + b)),
        (lambda x, b: bias_activation(x, b, "relu"), lambda x, b: F.relu(x + b)),
        (
            lambda x, b: bias_activation(x, b, "quick_gelu"),
            lambda x, b: (x + b) * torch.sigmoid(1.702 * (x + b)),
        ),
    ]
    for make in makers(device):
        for kernel, original in pairs:
            for size in make.sizes if kernel is bias_gelu else (127,):
                compare(kernel, original, make(2, 3, size), make(size))
        for x in make.strided(4, 5, 24):
            compare(*pairs[0], x, make(2 * 24)[::2])
        compare(*pairs[0], make(40, 1500), make(1500))  # several blocks both ways
        compare(lambda x: bias_gelu(x, None), F.gelu, make(5, 40))


@case
def gelu_is_as_near_as_it_says(device):
    """Also far to the left, where 1 + erf(x) has no digits left."""
    x = torch.linspace(-12, 12, 4001, device=device)
    if not runs_triton(x):
        return
    exact = x.double() * torch.erfc(-x.double() / math.sqrt(2)) / 2
    error = (bias_gelu(x, None).double() - exact).abs()
    near = x.abs() < 4
    assert (error[near] <= 1e-6 * exact[near].abs()).all()
    # There the power's argument, up to 104, is rounded.
    assert (error <= 1e-5 * exact.abs()).all()


# Positions.


def tables(make, batch, tokens, size):
    position = torch.arange(tokens, dtype=torch.float64)
    rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.cat((position[:, None] * rates,) * 2, -1).expand(batch, -1, -1)
    return angle.cos().to(make.device, make.dtype), angle.sin().to(make.device, make.dtype)


def without_table_gradients(function):
    return lambda q, k, cos, sin, **kw: function(q, k, cos.detach(), sin.detach(), **kw)


def compare_rotary(q, k, cos, sin, **options):
    compare(
        lambda q, k: rotary(q, k, cos, sin, **options),
        lambda q, k: neox_rotary(q, k, cos.to(q.dtype), sin.to(q.dtype), **options),
        q,
        k,
    )


@case
def rotary_of_whole_and_partial_heads(device):
    for make in makers(device):
        sizes = [(7, 10, 10)]
        if make.dtype == torch.float32:
            sizes += [(1, 2, 2), (3, 128, 128), (5, 80, 20)]
        for tokens, size, rotated in sizes:
            cos, sin = tables(make, 2, tokens, rotated)
            q, k = make(2, 4, tokens, size), make(2, 1, tokens, size)
            compare_rotary(q, k, cos, sin)
            compare_rotary(q, k, cos[:1], sin[:1])
            q = make(2, tokens, 3, size).transpose(1, 2)  # as after a projection
            k = make(2, tokens, 3, 2 * size)[..., size:].transpose(1, 2)
            compare_rotary(q, k, cos, sin)
            compare_rotary(make(2, size, tokens, 3).transpose(1, 3), k, cos.contiguous(), sin)


@case
def rotary_with_heads_behind_tokens(device):
    make = Maker(device, torch.bfloat16)
    cos, sin = tables(make, 2, 5, 16)
    q, k = make(2, 5, 3, 16), make(2, 5, 1, 16)
    compare_rotary(q, k, cos, sin, unsqueeze_dim=2)


@case
def rotary_tables_may_have_gradients_and_halves_of_their_own(device):
    make = Maker(device, torch.float32)
    compare(rotary, neox_rotary, make(2, 3, 5, 8), make(2, 1, 5, 8), make(2, 5, 8), make(2, 5, 8))
    cos, sin = make(2, 5, 8), make(2, 5, 8)
    compare_rotary(make(2, 3, 5, 8), make(2, 1, 5, 8), cos, sin)


@case
def rotary_keeps_the_layout(device):
    make = Maker(device, torch.float32)
    cos, sin = tables(make, 1, 5, 16)
    q = make(2, 5, 3, 16).transpose(1, 2)
    assert rotary(q, q, cos, sin)[0].stride() == q.stride()


# Losses.


@case
def cross_entropy_of_any_size(device):
    for make in makers(device):
        for size in (*(make.sizes if make.dtype == torch.float32 else (7,)), 9001):
            labels = make.labels(2, 2, below=size)
            labels[0, 1] = -100
            compare(cast(cross_entropy), causal_loss, make(2, 2, size), labels)
        for logits in make.strided(4, 5, 24):
            compare(
                cast(cross_entropy),
                lambda x, labels: causal_loss(x.contiguous(), labels),
                logits,
                make.labels(5, 8, below=24).t()[::2],
            )


@jit
def ask_whole_vectors(firsts, many, v, stride):
    row = tl.program_id(0).to(tl.int64)
    found = whole_vectors(row, stride, v)
    tl.store(firsts + row, found[0])
    tl.store(many + row, found[1])


@case
def cross_entropy_of_rows_that_begin_anywhere(device):
    """16 bytes are read at a time from where they are aligned, which differs from row to row."""
    for make in makers(device)[:2]:
        for size, stride, first in ((1003, 1003, 0), (1003, 1008, 0), (1003, 1010, 5), (11, 13, 1)):
            wide = make(9, stride)
            labels = torch.arange(9, device=device) + size - 9  # the first columns, and the last
            labels[:4] = torch.arange(4, device=device)
            compare(
                lambda x, y, a=first, b=first + size: cross_entropy(x[:, a:b], y, upcast=True),
                lambda x, y, a=first, b=first + size: causal_loss(x[:, a:b].contiguous(), y),
                wide,
                labels,
            )
    if runs_triton(wide):
        for size, stride in ((1003, 1003), (1003, 1008), (11, 13), (5, 5), (30522, 30522)):
            found = torch.zeros(2, 9, dtype=torch.int64, device=device)
            ask_whole_vectors[(9,)](*found, size, stride)
            begin, many = found
            assert ((torch.arange(9, device=device) * stride + begin) % 8 == 0).all()
            assert (many % 8 == 0).all() and ((size - many < 16) & (begin < 8)).all()
        logits, labels = make(9, 1003).requires_grad_(), make.labels(9, below=1003)
        for x in (logits, logits[:1].expand(9, -1)):
            found = [
                torch.autograd.grad(f(x, labels), logits)[0]
                for f in (cross_entropy, F.cross_entropy)
            ]
            torch.testing.assert_close(*found, atol=1e-3, rtol=1e-2)


@case
def cross_entropy_with_every_option(device):
    for make in makers(device):
        labels = make.labels(4, below=9001)
        labels[2] = 1
        for options in (
            {"ignore_index": 1},
            {"label_smoothing": 0.1},
            {"softcap": 5.0, "label_smoothing": 0.2, "ignore_index": 1},
            {"num_items": 3},
            {"softcap": 30, "label_smoothing": 0},
            {"num_items": torch.tensor(11, device=device)},
        ):
            compare(
                lambda x, labels, o=options: cast(cross_entropy)(x, labels, **o),
                lambda x, labels, o=options: causal_loss(x, labels, **o),
                3 * make(4, 9001),
                labels,
            )


@case
def cross_entropy_at_the_edges(device):
    make = Maker(device, torch.float32)
    logits, labels = make(3, 20).requires_grad_(), make.labels(3, below=20)
    assert cross_entropy(logits, torch.full_like(labels, -100)).isnan()
    assert cross_entropy(logits, torch.full_like(labels, -100), num_items=4) == 0
    assert cross_entropy(logits[:0], labels[:0]).isnan()
    if runs_triton(logits):
        assert cross_entropy(logits, labels, num_items=0).isinf()
        # A row that does not count has no gradient, whatever its logits are.
        spoilt = torch.cat((logits.detach()[:2], torch.full_like(logits[:1], float("nan"))))
        labels[2] = -100
        loss = cross_entropy(spoilt.requires_grad_(), labels)
        gradient = torch.autograd.grad(loss, spoilt)[0]
        assert gradient[:2].all() and not gradient[2].any()
        for loss in (
            cross_entropy(logits, labels),
            linear_cross_entropy(logits, make(20, 20), labels),
            sum(y.sum() for y in linear_each(logits, torch.nn.Linear(20, 4, device=device))),
        ):
            with pytest.raises(RuntimeError, match="no gradient of its own, as create_graph=True"):
                torch.autograd.grad(loss, logits, create_graph=True)
    bound = torch.tensor(3.0, device=device, requires_grad=True)  # learned: it gets its gradient
    of_rows = cross_entropy(logits, labels, softcap=bound)  # type: ignore[arg-type]
    of_layer = linear_cross_entropy(logits, make(20, 20), labels, softcap=bound)  # type: ignore[arg-type]
    assert all(torch.autograd.grad(loss, bound)[0] for loss in (of_rows, of_layer))
    if device == "cpu":
        for beyond in (labels + 20, labels - 25):
            with pytest.raises((RuntimeError, IndexError)):
                cross_entropy(logits, beyond)
            with pytest.raises((RuntimeError, IndexError)):
                linear_cross_entropy(logits, make(20, 20), beyond)
    assert cross_entropy(logits.detach().bfloat16(), labels).dtype == torch.bfloat16
    assert cross_entropy(logits.detach().bfloat16(), labels, upcast=True).dtype == torch.float32
    extreme = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], device=device)
    compare(cast(cross_entropy), causal_loss, extreme, torch.tensor([1, 2], device=device))
    masked = make(2, 20)
    masked[:, 5:] = float("-inf")
    compare(cast(cross_entropy), causal_loss, masked, torch.tensor([1, 2], device=device))


@case
def cross_entropy_in_place(device):
    make = Maker(device, torch.bfloat16)
    labels = make.labels(4, below=50)
    first, second = (x.requires_grad_() for x in make(4, 50)[None].expand(2, -1, -1).clone())
    (wanted,) = torch.autograd.grad(cross_entropy(first, labels), first)
    before = first.detach().clone()
    (found,) = torch.autograd.grad(cross_entropy(second, labels, in_place=True), second)
    assert torch.equal(first.detach(), before)
    assert torch.equal(found, wanted)
    assert not runs_triton(second) or torch.equal(second.detach(), wanted)


@case
def nothing_to_learn_gives_no_gradient(device):
    make = Maker(device, torch.float32)
    hidden, weight = make(4, 8).requires_grad_(), make(20, 8).requires_grad_()
    ignored = torch.full((4,), -100, device=device)
    for loss in (
        linear_cross_entropy(hidden, weight, ignored),
        cross_entropy(F.linear(hidden, weight), ignored),
    ):
        assert loss.isnan()
        for gradient in torch.autograd.grad(loss, (hidden, weight)):
            assert torch.equal(gradient, torch.zeros_like(gradient))


@case
def linear_cross_entropy_with_every_option(device):
    for make in makers(device):
        labels = make.labels(2, 4, below=1027)
        labels[1, 2] = -100
        arguments = make(2, 4, 24), make(1027, 24) / 5, labels
        for options in (
            {},
            {"label_smoothing": 0.1, "softcap": 8.0},
            {"num_items": 5, "ignore_index": -100},
            {"num_items": torch.tensor(5, device=device)},
        ):
            compare(
                lambda h, w, labels, o=options: cast(linear_cross_entropy)(h, w, labels, **o),
                lambda h, w, labels, o=options: causal_loss(F.linear(h, w), labels, **o),
                *arguments,
            )
        compare(
            lambda h, w, labels, b: cast(linear_cross_entropy)(h, w, labels, bias=b),
            lambda h, w, labels, b: causal_loss(F.linear(h, w, b), labels),
            *arguments,
            make(1027),
        )
        wide = make(2, 4, 48)[..., ::2], make(24, 1027).t() / 5, labels
        loss = cast(linear_cross_entropy)  # of terms as large as 1 that cancel in the gradients
        compare(loss, lambda h, w, t: causal_loss(F.linear(h, w), t), *wide, least=0.5)


@case
def linear_cross_entropy_in_chunks(device):
    make = Maker(device, torch.bfloat16)
    whole, chunked.chunk_rows = chunked.chunk_rows, lambda m, v: 3
    try:
        arguments = make(11, 24), make(60, 24) / 5, make.labels(11, below=60)
        compare(
            cast(linear_cross_entropy), lambda h, w, t: causal_loss(F.linear(h, w), t), *arguments
        )
    finally:
        chunked.chunk_rows = whole


@case
def linear_cross_entropy_keeps_to_what_is_asked(device):
    make = Maker(device, torch.float32)
    hidden, weight, labels = make(4, 8).requires_grad_(), make(20, 8), make.labels(4, below=20)
    loss = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden)[0])
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels), loss)
    assert linear_cross_entropy(hidden[:0], weight, labels[:0]).isnan()


@case
def what_kernels_would_read_otherwise_goes_by_operations(device):
    """Vectors that are not one number a feature, tables of other sizes, numbers on the device."""
    make = Maker(device, torch.float32)
    x, one, eps = make(2, 3, 8), make(1), torch.full((), 0.1, device=device)
    compare(bias_gelu, lambda x, b: F.gelu(x + b), x, one)
    compare(bias_gelu, lambda x, b: F.gelu(x + b), make(2, 1), make(8))
    compare(bias_gelu, lambda x, b: F.gelu(x + b), make(1)[0], make(1)[0])
    compare(lambda x, b: dropout_residual(x, x, linear=Conv1D(b)), lambda x, b: x + b + x, x, one)
    compare(
        lambda x, b: residual_layer_norm(x, x, None, None, linear=Conv1D(b)),
        lambda x, b: (F.layer_norm(x + b + x, (8,)), x + b + x),
        *(x, one),
    )
    compare(
        lambda x, e: rms_norm(x, None, e),
        lambda x, e: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e),
        *(x, eps),
    )
    q, k = make(2, 3, 4, 8), make(2, 1, 4, 8)
    for table in (make(1, 1, 8), make(1, 4, 8)):
        compare_rotary(q, k, table, table)


@case
def autocast_is_followed(device):
    make = Maker(device, torch.float32)
    hidden, weight, labels = make(4, 8), make(20, 8), make.labels(4, below=20)

    def original(hidden, weight, labels):
        return causal_loss(F.linear(hidden, weight), labels)

    with torch.autocast(device, torch.bfloat16):
        ours, theirs = (
            function(hidden.requires_grad_(), weight.requires_grad_(), labels)
            for function in (linear_cross_entropy, original)
        )
    assert (ours - theirs).abs() < 1e-5
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(theirs, (hidden, weight)),
        strict=True,
    ):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).abs().max() < 2e-2 * b.abs().max()


@case
def a_linear_layers_bias_is_cast_as_autocast_casts_it(device):
    make, layer = Maker(device, torch.float32), torch.nn.Linear(8, 16, device=device)
    x, zero = make(4, 8), make(4, 16, dtype=torch.bfloat16).zero_()
    with torch.autocast(device, torch.bfloat16):
        wanted = F.gelu(layer(x))
        for found in (
            linear_gelu(x, layer),
            dropout_residual(x, zero, linear=layer),
            residual_layer_norm(x, zero, None, None, linear=layer)[1],
        ):
            assert found.dtype == wanted.dtype == torch.bfloat16
        found = linear_gelu(x, layer)
        (gradient,) = torch.autograd.grad(found.sum(), layer.bias)
    assert (found - wanted).abs().max() < 0.05
    assert gradient.dtype == torch.float32


# Attention weights.


@case
def softmax_with_every_mask(device):
    for make in makers(device):
        for size in make.sizes:
            x = make(2, 3, 2, size)
            low = torch.finfo(make.dtype).min
            keep = make(2, 1, 2, size) > 0
            keep[..., 0] = True
            added = torch.zeros_like(keep, dtype=make.dtype).masked_fill(~keep, low)
            masks = [None, keep, added]
            if size == 7:
                masks += [keep[:, :, :1], keep[0, 0], added[:1].expand(2, 3, 2, size)]
                masks += [make(1, 3, 2, size), make(2, 3, 2, 1)]
                masks += [make(2, 1, 1, size, dtype=torch.float32)]
            for mask in masks:
                kept = mask is not None and mask.dtype == torch.bool
                name = "keep" if kept else "mask"
                compare(
                    lambda x, mask, name=name: masked_softmax(x, scale=0.3, **{name: mask}),
                    lambda x, mask: eager_softmax(x, mask, 0.3),
                    x,
                    mask,
                    # A row's gradients cancel, and one number for the row gets their sum.
                    least=1.0 if mask is not None and mask.shape[-1] == 1 else 0.0,
                )
        for x in make.strided(2, 3, 5, 24):
            compare(masked_softmax, lambda x: eager_softmax(x, None, 1.0), x)
        compare(masked_softmax, lambda x: eager_softmax(x, None, 1.0), make(5, 24))


@case
def softmax_of_rows_masked_whole(device):
    for make in makers(device):
        x = make(2, 1, 3, 8).requires_grad_()
        low = torch.finfo(make.dtype).min
        none = torch.zeros(3, 8, dtype=torch.bool, device=device)
        lowest = torch.full((3, 8), low, dtype=make.dtype, device=device)
        y = masked_softmax(x, lowest, 0.5)
        assert torch.equal(y, torch.full_like(y, 1 / 8))
        y = masked_softmax(x, keep=none)
        assert y.isnan().all()
        assert not torch.autograd.grad(y.float().pow(2).sum() + y[..., 0].sum(), x)[0].any()
        nothing = masked_softmax(x, torch.full((3, 8), float("-inf"), device=device))
        assert nothing.isnan().all()


@case
def nothing_at_all(device):
    for make in makers(device):
        x, weight = make(0, 3, 24), make(24)
        compare(rms_norm, llama_norm, x, weight)
        compare(layer_norm, lambda x, w, b: F.layer_norm(x, (24,), w, b), x, weight, weight)
        compare(swiglu, lambda g, u: F.silu(g) * u, x, x)
        compare(bias_gelu, lambda x, b: F.gelu(x + b), x, weight)
        compare(masked_softmax, lambda x: eager_softmax(x, None, 1.0), x)
        cos = make(1, 0, 8)
        compare_rotary(make(2, 3, 0, 8), make(2, 1, 0, 8), cos, cos)
        y, total = residual_layer_norm(x, x, weight, weight, dropout=0.5)
        assert y.shape == total.shape == x.shape


@case
def the_same_tensor_twice(device):
    make = Maker(device, torch.float32)
    x, weight = make(3, 40), make(40)
    compare(lambda x: swiglu(x, x), lambda x: F.silu(x) * x, x)
    compare(lambda x: dropout_residual(x, x), lambda x: x + x, x)
    compare(
        lambda x, w: residual_rms_norm(x, x, w),
        lambda x, w: (llama_norm(x + x, w), x + x),
        x,
        weight,
    )
    compare(
        lambda x, w: residual_layer_norm(x, x, w, w),
        lambda x, w: (F.layer_norm(x + x, (40,), w, w), x + x),
        x,
        weight,
    )
    for function in (
        lambda x: residual_rms_norm(x, x, weight),
        lambda x: (dropout_residual(x, x),),
    ):
        leaf = x.clone().requires_grad_()
        sum(y.sum() for y in function(leaf)).backward()
        (again,) = torch.autograd.grad(sum(y.sum() for y in function(leaf)), leaf)
        assert torch.equal(leaf.grad, again)


@case
def repeated_rows_and_heads(device):
    make = Maker(device, torch.float32)
    row, weight = make(1, 40), make(40)
    compare(
        lambda x, w: rms_norm(x.expand(5, 40), w),
        lambda x, w: llama_norm(x.expand(5, 40), w),
        row,
        weight,
    )
    compare(
        lambda x, w: bias_gelu(x.expand(5, 40), w),
        lambda x, w: F.gelu(x.expand(5, 40) + w),
        row,
        weight,
    )
    cos, sin = tables(make, 1, 5, 16)
    q, k = make(2, 5, 4, 16).transpose(1, 2), make(2, 5, 1, 16).transpose(1, 2)
    compare(
        lambda q, k: rotary(q, k.expand(2, 4, 5, 16), cos, sin),
        lambda q, k: neox_rotary(q, k.expand(2, 4, 5, 16), cos.to(q.dtype), sin.to(q.dtype)),
        q,
        k,
    )


@case
def transforms_take_the_reference(device):
    make = Maker(device, torch.float32)
    x, weight = make(3, 4, 8), make(8)
    mapped = torch.vmap(lambda x: residual_rms_norm(x, x, weight)[0])(x)
    torch.testing.assert_close(mapped, llama_norm(x + x, weight))
    gradient = torch.func.grad(lambda w: layer_norm(x, w, w).pow(2).sum())(weight)
    assert gradient.shape == weight.shape


@case
def rows_of_nothing(device):
    x, weight = torch.ones(3, 0, device=device), torch.ones(0, device=device)
    for y in (
        rms_norm(x, weight),
        layer_norm(x, weight, weight),
        bias_gelu(x, weight),
        swiglu(x, x),
        dropout_residual(x, x, dropout=0.5),
    ):
        assert y.shape == (3, 0)


@case
def float64_takes_the_reference(device):
    make = Maker(device, torch.float64)
    x, weight = make(3, 8), make(8)
    assert not runs_triton(x)
    assert torch.equal(rms_norm(x, weight), llama_norm(x, weight))
    assert swiglu(x, x).dtype == torch.float64
    assert cross_entropy(x, make.labels(3, below=8)).dtype == torch.float64


def round_like_hardware() -> None:
    """Lets the interpreter round float32 to bfloat16 to the nearest, where it cuts off."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    truncating = interpreter._convert_float

    def convert(value, source, target, mode):
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.array(value.view(np.float32))).bfloat16()
            return rounded.view(torch.uint16).numpy()
        return truncating(value, source, target, mode)

    interpreter._convert_float = convert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=[*CASES])
    parser.add_argument("--but", nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        round_like_hardware()
    assert runs_triton(torch.ones(1, device=arguments.device)), "set TRITON_INTERPRET=1"
    found: dict[str, str | None] = {}
    seconds: dict[str, float] = {}
    for name, function in CASES.items():
        if name in arguments.only and name not in arguments.but:
            started = time.perf_counter()
            try:
                function(arguments.device)
                found[name] = None
            except Exception:
                found[name] = traceback.format_exc()
            seconds[name] = round(time.perf_counter() - started, 2)
    print(json.dumps({"found": found, "seconds": seconds}))


if __name__ == "__main__":
    main()
