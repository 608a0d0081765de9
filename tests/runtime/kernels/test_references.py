"""The references that run without a GPU: bit for bit the PyTorch operations of the models."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rotary
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5LayerNorm

from slapo_rewrite.runtime.kernels.bias_gelu import bias_gelu
from slapo_rewrite.runtime.kernels.cross_entropy import cross_entropy, flat_labels
from slapo_rewrite.runtime.kernels.gated import geglu, swiglu
from slapo_rewrite.runtime.kernels.launch import rows_of
from slapo_rewrite.runtime.kernels.layer_norm import add_layer_norm, layer_norm, residual_layer_norm
from slapo_rewrite.runtime.kernels.linear_cross_entropy import linear_cross_entropy
from slapo_rewrite.runtime.kernels.rms_norm import residual_rms_norm, rms_norm
from slapo_rewrite.runtime.kernels.rotary import rotary
from slapo_rewrite.runtime.kernels.softmax import masked_softmax
from tests.runtime.kernels.cases import CASES
from tests.runtime.kernels.compare import DTYPES, Maker, results

dtypes = st.sampled_from(DTYPES)
lengths = st.integers(0, 5)
widths = st.sampled_from((1, 2, 7, 16))
few = settings(max_examples=15, deadline=None)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_passes_for_the_kernel(name):
    CASES[name]("cpu")


def same(ours, theirs, *inputs):
    """Outputs and gradients are equal to the last bit."""
    seeds = [torch.ones(())] * 2
    for a, b in zip(results(ours, inputs, seeds), results(theirs, inputs, seeds), strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def laid_out(make: Maker, shape: tuple[int, ...], way: int) -> torch.Tensor:
    """A tensor of the shape, packed or strided."""
    return make(*shape) if way == 0 else make.strided(*shape)[way - 1]


@few
@given(dtypes, dtypes, lengths, widths, st.integers(0, 4))
def test_norms(dtype, other, tokens, width, way):
    make = Maker("cpu", dtype)
    x, weight = laid_out(make, (2, tokens, width), way), make(width, dtype=other)
    for module, options in (
        (LlamaRMSNorm(width, eps=1e-5), {}),
        (GemmaRMSNorm(width, eps=1e-5), {"offset": 1.0, "cast": "output"}),
        (T5LayerNorm(width, eps=1e-5), {"cast": "weight"}),
    ):

        def original(x, weight, module=module):
            return torch.func.functional_call(module, {"weight": weight}, (x,))

        same(lambda x, w, o=options: rms_norm(x, w, 1e-5, **o), original, x, weight)
    norm = LlamaRMSNorm(width)
    with torch.no_grad():
        norm.weight = nn.Parameter(weight)
        y, total = residual_rms_norm(x, x.flip(0), weight)
        assert torch.equal(total, x.flip(0) + x)
        assert torch.equal(y, norm(total))


@few
@given(dtypes, lengths, widths, st.integers(0, 4))
def test_elementwise(dtype, tokens, width, way):
    make = Maker("cpu", dtype)
    x, other = laid_out(make, (2, tokens, width), way), make(2, tokens, width)
    weight, bias = make(width), make(width)
    same(swiglu, lambda g, u: F.silu(g) * u, x, other)
    same(geglu, lambda g, u: F.gelu(g) * u, x, other)
    same(bias_gelu, lambda x, b: F.gelu(x + b), x, bias)
    wide = x.float()
    torch.testing.assert_close(bias_gelu(wide, None, "tanh"), NewGELUActivation()(wide))
    same(layer_norm, lambda x, w, b: F.layer_norm(x, (width,), w, b), x, weight, bias)
    linear = nn.Linear(width, width, dtype=dtype)
    torch.manual_seed(0)
    ours = residual_layer_norm(x, other, weight, bias, linear=linear, dropout=0.5)
    torch.manual_seed(0)
    total = F.dropout(linear(x), 0.5) + other
    assert torch.equal(ours[1], total)
    assert torch.equal(ours[0], F.layer_norm(total, (width,), weight, bias))
    same(
        add_layer_norm,
        lambda x, r, w, b: F.layer_norm(x + r, (width,), w, b),
        *(x, other, weight, bias),
    )


@few
@given(dtypes, st.integers(1, 5), st.sampled_from((2, 6, 8)), st.integers(0, 4))
def test_positions(dtype, tokens, size, rest):
    make = Maker("cpu", dtype)
    q, k = make(2, tokens, 4, size + rest).transpose(1, 2), make(2, 1, tokens, size + rest)
    cos, sin = make(2, tokens, size), make(2, tokens, size)
    same(rotary, neox_rotary, q, k, cos, sin)
    if not rest:
        same(rotary, apply_rotary_pos_emb, q, k, cos, sin)
        turned = q.transpose(1, 2), k.transpose(1, 2), cos, sin
        same(
            lambda *a: rotary(*a, unsqueeze_dim=2),
            lambda *a: apply_rotary_pos_emb(*a, unsqueeze_dim=2),
            *turned,
        )


@few
@given(dtypes, st.integers(2, 5), widths, st.sampled_from((None, 3, "tensor")))
def test_losses(dtype, tokens, width, items):
    make = Maker("cpu", dtype)
    items = torch.tensor(5) if items == "tensor" else items
    hidden, weight = make(2, tokens, width), make(11, width)
    labels = make.labels(2, tokens, below=11)
    labels[0, 1] = -100
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]

    def original(logits):
        return ForCausalLMLoss(logits, labels, 11, num_items_in_batch=items)

    same(
        lambda x: cross_entropy(x, shifted, num_items=items, upcast=True),
        original,
        make(2, tokens, 11),
    )
    same(
        lambda h, w: linear_cross_entropy(h, w, shifted, num_items=items, upcast=True),
        lambda h, w: original(F.linear(h, w)),
        hidden,
        weight,
    )


def test_attention_weights():
    make = Maker("cpu", torch.bfloat16)
    x, mask = make(2, 3, 4, 5), make(2, 1, 4, 5)

    def original(x, mask):
        return (x * 0.5 + mask).softmax(-1, dtype=torch.float32).to(x.dtype)

    same(lambda x, mask: masked_softmax(x, mask, 0.5), original, x, mask)


@few
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.permutations(range(4)))
def test_rows_are_found_in_any_layout(shape, order):
    order = [axis for axis in order if axis < len(shape)]
    x = torch.randn([shape[axis] for axis in order])
    x = x.permute([order.index(axis) for axis in range(len(shape))])
    if x.shape[-1]:
        rows = rows_of(x)
        assert rows.stride(-1) == 1 or rows.shape[-1] == 1
        assert torch.equal(rows, x.reshape(-1, x.shape[-1]))


def test_meta_and_fake_tensors_take_the_reference():
    x, weight = torch.empty(3, 8, device="meta"), torch.empty(8, device="meta")
    assert rms_norm(x, weight).shape == x.shape
    assert linear_cross_entropy(x, torch.empty(20, 8, device="meta"), x[:, 0].long()).shape == ()


def test_as_many_labels_as_predictions():
    """A kernel would read past the end, or leave some out."""
    labels = torch.arange(6).view(2, 3)
    assert flat_labels(labels, torch.empty(2, 3, 7), 7, -100).tolist() == [*range(6)]
    with pytest.raises(ValueError, match="6 labels for 4 predictions"):
        flat_labels(labels, torch.empty(2, 2, 7), 7, -100)
