"""Functions with their own `backward` run on parts where that is right, and only there."""

from __future__ import annotations

import pytest

from tests.marks import long
from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import refused
from tests.zoo.test_flow import BACKWARD, FORWARD, SCHEDULE, SOURCE

STATED = SCHEDULE + "    up" + BACKWARD + "    down" + FORWARD


def source(forward: str, backward: str, call: str = "Act.apply(h)", given: str = "h") -> str:
    """The model with a function in the place of its activation; bodies line by line, by `;`."""

    def method(head: str, body: str) -> str:
        lines = "".join(f"        {line.strip()}\n" for line in body.split(";"))
        return f"    @staticmethod\n    def {head}:\n{lines}\n"

    own = method(f"forward(ctx, {given})", forward)
    top = f"class Act(torch.autograd.Function):\n{own}{method('backward(ctx, g)', backward)}\n"
    called = f"h = self.up(x)\n        return self.down({call})"
    text = SOURCE.replace("class MLP", f"{top}class MLP")
    return text.replace("return self.down(torch.relu(self.up(x)))", called)


NEW_STYLE = source("return h.tanh()", "(y,) = ctx.saved_tensors; return g * (1 - y * y)").replace(
    "forward(ctx, h):\n        return h.tanh()\n",
    "forward(h):\n        return h.tanh()\n\n    @staticmethod\n"
    "    def setup_context(ctx, inputs, output):\n        ctx.save_for_backward(output)\n",
)
KEEP = "ctx.save_for_backward(h)"
RIGHT = {
    "silu": source(
        f"{KEEP}; return h * h.sigmoid()",
        "(h,) = ctx.saved_tensors; s = h.sigmoid(); return g * (s + h * s * (1 - s))",
    ),
    "straight through": source("return h.round()", "return g"),
    "a number kept": source(
        "ctx.k = k; return h * k", "return g * ctx.k, None", "Act.apply(h, 3.0)", "h, k"
    ),
    "two parts": source(
        "ctx.save_for_backward(h, z); return h * z",
        "h, z = ctx.saved_tensors; return g * z, g * h",
        "Act.apply(h, h.sigmoid())",
        "h, z",
    ),
    "two results": source(
        f"{KEEP}; return h.sin(), h.cos()",
        "(h,) = ctx.saved_tensors; return g * h.cos() - more * h.sin()",
        "sum(Act.apply(h))",
    ).replace("backward(ctx, g)", "backward(ctx, g, more)"),
    "by what is needed": source(
        "return h * z", "return (2.0 * g if ctx.needs_input_grad[0] else None), None",
        "Act.apply(h, 2.0)", "h, z",
    ),
    "once": source("return h * 2.0", "return g * 2.0").replace(
        "    @staticmethod\n    def backward",
        "    @staticmethod\n    @torch.autograd.function.once_differentiable\n    def backward",
    ),
    "set up apart": NEW_STYLE,
}  # fmt: skip
WRONG = {
    # The gradient needs all of an axis of which a rank has its part.
    source("return h * 2.0", "return 2.0 * g / g.norm(dim=-1, keepdim=True)"): "`norm`",
    source("return h * 2.0", "return 2.0 * g - g.mean()"): "",
    source("return h * 2.0", "return (2.0 * g).flip(-1)"): "`flip`",
    source("return h * 2.0", "return (2.0 * g).cumsum(-1)"): "`cumsum`",
    # So does the value.
    source("return h.softmax(-1)", "return g"): "`softmax`",
    # A number that depends on how many ranks there are.
    source("ctx.n = h.shape[-1]; return h * 1.0", "return g / ctx.n"): "",
    source("ctx.n = h.numel(); return h * 1.0", "return g * ctx.n"): "",
    # Another way for a part.
    source("return h * 1.0", "return g if g.numel() > 40 else g * 2.0"): "another branch",
    source("return h * 1.0", "return g * (1.0 if g.numel() > 40 else 2.0)"): "",
    source("return h * 1.0", "return g * 2.0 if g.numel() > 40 else g"): "something else",
    # A gradient of something whole that is a summand on each rank.
    source(
        "ctx.save_for_backward(h, k); return h * k",
        "h, k = ctx.saved_tensors; return g * k, (g * h).sum()",
        "Act.apply(h, self.down.bias.sum())",
        "h, k",
    ): "the gradient of its argument 2",
    source(  # by what is not seen
        "ctx.save_for_backward(h, k); return h * k",
        "h, k = ctx.saved_tensors; return g * k, nn.Parameter((g * h).sum(), False)",
        "Act.apply(h, self.down.bias.sum())",
        "h, k",
    ): "the gradient of its argument 2",
    # What is not read: other code, torch's own gradients, random numbers, changes in place.
    source(
        "ctx.f = f; return f(h)", "return g, None", "Act.apply(h, torch.relu)", "h, f"
    ): "not only tensors and constants",
    source(
        f"{KEEP}; return h.relu()",
        "h = ctx.saved_tensors[0].detach().requires_grad_(); t = torch.enable_grad(); "
        "t.__enter__(); y = h.relu(); t.__exit__(None, None, None); "
        "return torch.autograd.grad(y, h, g)[0]",
    ): "calls autograd",
    source("return h * 1.0", "return g + 0.1 * torch.randn_like(g)"): "random numbers",
    source("ctx.mark_dirty(h); return h.mul_(2.0)", "return 2.0 * g"): "changes its inputs",
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    found = {name: Case(text, STATED) for name, text in RIGHT.items()}
    prepare(folder, found)
    return folder, found


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, long(3)])
def test_numbers(cases, world):
    run(compare, world, *cases)


@pytest.mark.parametrize(("text", "why"), WRONG.items())
def test_what_is_not_right_on_a_part_is_refused(tmp_path, text, why):
    said = refused(tmp_path, text, STATED, "SR104")
    assert "`Act` works on a part, and its `backward` is not known to be right" in said
    assert why in said


def test_a_partial_sum_is_added_up_first(tmp_path):
    text = source("return h * 2.0", "return 2.0 * g").replace(
        "return x + self.mlp(x)", "return x + Act.apply(self.mlp(x))"
    )
    said = refused(tmp_path, text, SCHEDULE + "    up" + BACKWARD, "SR104")
    assert "`Act` works on a partial sum" in said
