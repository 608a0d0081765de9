"""The vocabulary-parallel loss against `cross_entropy` of whole logits, on real gloo groups."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss import loss_utils

from slapo_rewrite.runtime import tensor_parallel as tp
from slapo_rewrite.runtime.vocab_parallel_loss import (
    causal_lm_loss,
    masked_lm_loss,
    vocab_parallel_criterion,
    vocab_parallel_cross_entropy,
    whole_logits,
)
from tests.processes import run

VOCABULARY = 203  # no world size divides it
HEAD = nn.Linear(2, VOCABULARY)


def divided(axis: int = -1) -> tp.Shard:
    """How logits are divided over the ranks that there are."""
    return tp.Shard(axis, VOCABULARY)


def seeded(*shape: int) -> torch.Tensor:
    """The same random logits on every rank, some of them large."""
    generator = torch.Generator().manual_seed(sum(shape))
    return 30 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(*shape: int) -> torch.Tensor:
    """Targets: first and last classes, of ranks as well, and some that are ignored among them."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(VOCABULARY, shape, generator=generator)
    found.view(-1)[:6] = torch.tensor([0, -100, VOCABULARY - 1, -100, 101, 102])
    return found


def agree(whole, shard, function, parallel, exactness=1e-12):
    """Loss and gradient of this rank's part, for a gradient that differs from row to row."""
    whole, local = whole.requires_grad_(), shard.cut(whole.detach()).requires_grad_()
    want, got = function(whole), parallel(local)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=exactness, atol=exactness)
    weights = torch.linspace(0.5, 1.5, want.numel(), dtype=want.dtype).view_as(want)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    torch.testing.assert_close(
        local.grad, shard.cut(whole.grad), rtol=exactness, atol=exactness / 10
    )


def check_settings():
    uneven = torch.linspace(0, 2, VOCABULARY, dtype=torch.float64)  # the first does not count
    for reduction, smoothing, shape, weight in product(
        ("mean", "sum", "none"), (0.0, 0.1), ((8,), (2, 5), ()), (None, uneven)
    ):
        logits = seeded(*shape[:1], VOCABULARY, *shape[1:])
        targets = classes(*shape) if shape else torch.tensor(7)
        options = {"reduction": reduction, "label_smoothing": smoothing}
        shard = divided(1 if shape else -1)
        agree(
            logits,
            shard,
            lambda x, t=targets, w=weight, o=options: F.cross_entropy(x, t, w, **o),
            lambda x, t=targets, w=weight, o=options: vocab_parallel_cross_entropy(
                x, t, w, head=HEAD, **o
            ),
        )
    targets = classes(8).masked_fill(classes(8) == -100, 5)
    criterion = nn.CrossEntropyLoss(uneven, ignore_index=5, label_smoothing=0.2)
    agree(
        seeded(8, VOCABULARY),
        divided(),
        lambda x: criterion(x, targets),
        lambda x: vocab_parallel_criterion(criterion, x, targets, head=HEAD),
    )
    agree(
        seeded(8, VOCABULARY).bfloat16(),
        divided(),
        lambda x: F.cross_entropy(x, targets),
        lambda x: vocab_parallel_cross_entropy(x, targets, head=HEAD),
        exactness=1e-2,
    )


def check_transformers():
    logits, labels = seeded(4, 6, VOCABULARY).float(), classes(4, 6)
    for items in (None, 7, torch.tensor(7)):
        for theirs, ours in (
            (loss_utils.ForCausalLMLoss, causal_lm_loss),
            (loss_utils.ForMaskedLMLoss, masked_lm_loss),
        ):
            agree(
                logits.clone(),
                divided(),
                lambda x, f=theirs, n=items: f(x, labels, VOCABULARY, n, unknown=1),
                lambda x, f=ours, n=items: f(x, labels, VOCABULARY, n, unknown=1),
                exactness=1e-5,
            )
    agree(
        logits.clone(),
        divided(),
        lambda x: loss_utils.ForCausalLMLoss(x, None, VOCABULARY, shift_labels=labels),
        lambda x: causal_lm_loss(x, None, VOCABULARY, shift_labels=labels),
        exactness=1e-5,
    )
    # Gradients accumulated over batches of unequal numbers of labels are those of one batch.
    count = (labels[:, 1:] != -100).sum()
    batch = divided().cut(logits).requires_grad_()
    one = causal_lm_loss(batch, labels, VOCABULARY)
    one.backward()
    batches = divided().cut(logits).requires_grad_()
    two = [
        causal_lm_loss(batches[rows], labels[rows], VOCABULARY, num_items_in_batch=count)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    sum(two).backward()
    torch.testing.assert_close(sum(two), one)
    torch.testing.assert_close(batches.grad, batch.grad)


def check_refusals():
    logits, targets = seeded(8, VOCABULARY), classes(8)
    part = divided().cut(logits)

    def loss(x, t):
        return vocab_parallel_cross_entropy(x, t, head=HEAD)

    assert torch.equal(whole_logits(part, HEAD), logits)
    assert whole_logits(logits, HEAD) is logits
    assert torch.equal(loss(logits, targets), F.cross_entropy(logits, targets))
    with pytest.raises(RuntimeError, match="has replaced this rank's part"):
        causal_lm_loss(torch.cat([part, part], -1), targets, VOCABULARY)
    with pytest.raises(TypeError, match="not probabilities"):
        loss(part, logits.softmax(-1))
    with pytest.raises(RuntimeError, match="which create_graph=True needs: gather the"):
        trained = part.detach().requires_grad_()
        torch.autograd.grad(loss(trained, targets), trained, create_graph=True)
    for wrong in (VOCABULARY, -1):
        with pytest.raises((IndexError, RuntimeError)):
            loss(part, targets.masked_fill(targets == -100, wrong))


def check_all():
    check_settings()
    check_transformers()
    check_refusals()


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_as_of_whole_logits(world):
    run(check_all, world)


def test_in_a_world_of_one():
    check_settings()
    check_transformers()
