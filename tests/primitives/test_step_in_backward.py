"""`step_in_backward`, on source: a method by which `backward` updates the parameters."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

from slapo_rewrite.primitives.checkpoint import MODEL, STACK
from slapo_rewrite.verify.run import verify
from tests.processes import run
from tests.rewriting import imported, refused, rewritten, written

STEPPING = MODEL + "def schedule(s):\n    s.step_in_backward()\n"


def made(path: Path) -> torch.nn.Module:
    torch.manual_seed(1)
    return imported(path).Stack(8, depth=4)


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def adam(parameters) -> AdamW:
    return AdamW(parameters, lr=0.01)


def test_gradients_are_used_where_they_are_complete(tmp_path):
    output = rewritten(tmp_path, STACK, STEPPING)
    path, original = written(tmp_path, output), made(tmp_path / "source_0.py")
    model = made(path)
    model.blocks[3].linear.bias.requires_grad_(False)  # a frozen one
    original.blocks[3].linear.bias.requires_grad_(False)
    optimizers = model.step_in_backward(lambda name, parameter: adam([parameter]))
    assert list(optimizers) == [n for n, p in model.named_parameters() if p.requires_grad]
    alive = []
    for parameter in model.parameters():
        if parameter.requires_grad:  # after the one that steps
            parameter.register_post_accumulate_grad_hook(
                lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
            )
    optimizer = adam(original.parameters())
    for number in range(3):
        original.zero_grad()
        original(batch(number)).square().mean().backward()
        optimizer.step()
        model(batch(number)).square().mean().backward()
    assert alive == [0] * 3 * 7
    for one, other in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(one, other)


def accumulated(model, optimizers) -> None:
    for number in range(2):
        (model(batch(number)).square().mean() / 2).backward()
    for optimizer in optimizers.values():
        optimizer.step()


def scaled(model, optimizers) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0)).square().mean()).backward()
    for optimizer in optimizers.values():
        scaler.step(optimizer)


def clipped(model, optimizers) -> None:
    model(batch(0)).square().mean().backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0  # there are none
    for optimizer in optimizers.values():
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", [accumulated, scaled, clipped])
def test_a_loop_that_needs_gradients_later(tmp_path, way, fused):
    """Its own steps, after `backward`, would do nothing, and its model would be another."""
    model = made(written(tmp_path, rewritten(tmp_path, STACK, STEPPING)))
    optimizers = model.step_in_backward(lambda _, p: AdamW([p], lr=0.01, fused=fused))
    words = "gradient of `.*` was used in the backward pass"
    if way is scaled and not fused:
        words = "No inf checks were recorded"  # torch's own
    with pytest.raises((RuntimeError, AssertionError), match=words):
        way(model, optimizers)


def test_values_are_clipped_as_they_come(tmp_path):
    path = written(tmp_path, rewritten(tmp_path, STACK, STEPPING))
    model, original = made(path), made(tmp_path / "source_0.py")
    model.step_in_backward(lambda _, p: torch.optim.SGD([p], lr=1.0))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    optimizer = torch.optim.SGD(original.parameters(), lr=1.0)
    for number in range(2):
        model(batch(number)).square().mean().backward()
        original.zero_grad()
        original(batch(number)).square().mean().backward()
        torch.nn.utils.clip_grad_value_(original.parameters(), 1e-3)
        optimizer.step()
    for one, other in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(one, other)


def test_asked_for_twice(tmp_path):
    """Each gradient would be used by the first and be gone for the second."""
    model = made(written(tmp_path, rewritten(tmp_path, STACK, STEPPING)))
    outer = type(model)(1, 1)  # holds the other's parameters, too
    outer.blocks = model.blocks
    model.step_in_backward(lambda _, p: adam([p]))
    for again in (model, outer):
        with pytest.raises(RuntimeError, match=r"`blocks\..*` is already updated"):
            again.step_in_backward(lambda _, p: adam([p]))
    copied = copy.deepcopy(model)  # is updated by nothing yet
    copied.step_in_backward(lambda _, p: adam([p]))
    assert not copied(batch(0)).square().mean().backward()


def replica(path: Path, original: Path) -> list[bool]:
    """Trains on this process's half of each batch; whether the weights are those of the whole."""
    model, whole, half = made(path), made(original), dist.get_rank()
    model.step_in_backward(lambda _, p: adam([p]), replicas=dist.group.WORLD)
    optimizer = adam(whole.parameters())
    for number in range(3):
        model(batch(number).chunk(2)[half]).square().mean().backward()
        whole.zero_grad()
        whole(batch(number)).square().mean().backward()
        optimizer.step()
    return [
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(model.parameters(), whole.parameters(), strict=True)
    ]


@pytest.mark.processes
def test_gradients_of_replicas_are_averaged(tmp_path):
    path = written(tmp_path, rewritten(tmp_path, STACK, STEPPING))
    assert run(replica, 2, path, tmp_path / "source_0.py") == [[True] * 8] * 2


def chosen(path: Path) -> str:
    """What is said where each replica runs a block of its own beside one that both run."""
    model = made(path)
    model.step_in_backward(lambda _, p: adam([p]), replicas=dist.group.WORLD)
    own = model.blocks[dist.get_rank()]
    with pytest.raises(RuntimeError) as raised:
        model.blocks[3](own(batch(0))).square().mean().backward()
    return str(raised.value)


@pytest.mark.processes
def test_replicas_that_use_other_parameters(tmp_path):
    """Their gradients would be averaged with those of others, of the same shape, and no word."""
    path = written(tmp_path, rewritten(tmp_path, STACK, STEPPING))
    for number, said in enumerate(run(chosen, 2, path)):
        assert (
            f"`blocks.{number}.linear." in said and "the replicas use different parameters" in said
        )


@pytest.mark.processes
def test_verification_trains_by_it(tmp_path):
    path = written(tmp_path, rewritten(tmp_path, STACK, STEPPING))
    assert verify(path.parent, [1]).ok
    helper = path.with_name("backward_steps.py")
    text = helper.read_text()
    assert "optimizer.step()" in text
    helper.write_text(text.replace("optimizer.step()", "pass"))
    report = verify(path.parent, [1])
    assert not report.ok and "weights after 3 steps" in report.render()


@pytest.mark.parametrize("spelled", ["weight.data", "weight.detach()"])
def test_a_weight_that_no_gradient_comes_from_is_read_after_its_update(tmp_path, spelled):
    call = f"x = block(x) @ self.blocks[-1].linear.{spelled}"
    text = refused(tmp_path, STACK.replace("x = block(x)", call), STEPPING, "SR106")
    assert "remove `step_in_backward`" in text


def test_a_method_of_that_name(tmp_path):
    taken = STACK + "\n    def step_in_backward(self):\n        pass\n"
    assert "already defines `step_in_backward`" in refused(tmp_path, taken, STEPPING, "SR305")


def test_a_model_of_another_file(tmp_path):
    torchs = MODEL.replace("m.Stack(8, depth=4)", "torch.nn.Sequential(m.Block(8), m.Block(8))")
    text = refused(tmp_path, STACK, STEPPING.replace(MODEL, torchs), "SR305")
    assert "no class of a file that is rewritten" in text


def test_twice(tmp_path):
    text = refused(tmp_path, STACK, STEPPING + "    s.step_in_backward()\n", "SR305")
    assert "already" in text
