"""Checks of two models in one process: rounding, buffers, and the rewritten one's modules."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slapo_rewrite.directive import REDIRECTED
from slapo_rewrite.model import small_model
from slapo_rewrite.verify.checks import Checks
from slapo_rewrite.verify.engines import RATES
from slapo_rewrite.verify.figures import Check, settle
from slapo_rewrite.verify.original import Rewritten
from slapo_rewrite.verify.pair import Pair
from slapo_rewrite.verify.report import Directive
from slapo_rewrite.verify.run import rewritten_classes
from slapo_rewrite.verify.staged import Staged, _digest


class Decoder(nn.Module):
    """A norm of what is almost zero: rounding shows a thousand times larger."""

    def __init__(self, summed=torch.sum, wide=False, first=0.0):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 4096), nn.LayerNorm(8, eps=1e-12)
        self.down = nn.Linear(4096, 8)
        self.summed, self.wide, self.first = summed, wide, first

    def forward(self, x):
        h = self.up(x)
        if self.wide:
            h = h.float()
        y = self.summed(h[..., None] * self.down.weight.T, -2)
        y = y - (h @ self.down.weight.T).detach() * (1 - 1e-6)
        return {"loss": self.norm(y + self.first).square().sum(-1).mean() + y.sum(), "y": y}


def backwards(x, axis):
    return x.flip(axis).cumsum(axis).select(axis, -1)


def wrong(x, axis):
    return x.sum(axis) * (1 + 3e-4)


def checks(original, rewritten, classes=(), rates=()):
    """The checks of two models in this process."""

    class Hand(Pair):
        def load(self):
            self.twin, self.loading = small_model, None
            self.schedule = SimpleNamespace(
                model=lambda m: m.build(), inputs=lambda m: {"x": torch.randn(2, 3, 8)}
            )
            self.blocker = SimpleNamespace(tried=[])
            self.original_module = SimpleNamespace(build=original)
            self.rewritten_module = SimpleNamespace(build=rewritten)
            self.build_original()
            self.rewritten = self.built(self.rewritten_module, 1000)
            self.rates = dict.fromkeys(rates, 0.0)
            self.classes = list(classes)

    pair = Hand({"world": 1, "absent": [], "depth": 2, "half": None}, 0, lambda stage: None)
    pair.load()
    found = Checks(pair)
    found.run()
    return found, pair


@pytest.mark.parametrize("wide", [False, True])
def test_float64_decides_what_may_be_rounding(wide):
    found, pair = checks(lambda: Decoder(wide=wide), lambda: Decoder(summed=backwards, wide=wide))
    assert all(check.ok for check in found.done), found.done
    assert any("in float64, so it is rounding" in check.detail for check in found.done)
    assert not pair.notes


def test_float64_finds_what_is_no_rounding():
    found, _ = checks(Decoder, lambda: Decoder(summed=wrong))
    assert not all(check.ok for check in found.done)


class Stubborn(Decoder):
    """Not in float64."""

    def forward(self, x):
        if x.dtype == torch.float64:
            raise TypeError("only float32")
        return super().forward(x)


def test_where_float64_does_not_run_the_own_error_decides():
    found, pair = checks(Stubborn, lambda: Stubborn(summed=backwards))
    assert all(check.own is not None for check in found.done if check.name == "gradients")
    assert ["does not run in float64 (only float32)" in note for note in pair.notes] == [True]

    check = Check("loss", False, 3e-3, 1e-5, own=2e-3)
    settle(check, 2e-3, None)
    assert check.ok
    check = Check("loss", False, 3e-3, 1e-5, own=2e-4)
    settle(check, 2e-3, None)
    assert not check.ok


def test_an_original_that_is_all_rounding_tells_nothing():
    check = Check("loss", False, 0.3, 1e-5, own=0.2)
    settle(check, 0.2, None)
    assert not check.ok and "nothing can be concluded" in check.detail


class Sparing(nn.Module):
    """Has no layer for a dropout that it was built without."""

    def __init__(self):
        super().__init__()
        self.down, self.drop, self.dropout_ratio = nn.Linear(8, 8), nn.Dropout(0.0), 0.0
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.drop(self.norm(self.down(x)))
        if self.dropout_ratio > 0:
            y = self.dropout(y)
        return {"loss": y.exp().mean(), "y": y}


def test_dropout_that_the_original_was_built_without_stays_off():
    found, _ = checks(Sparing, Sparing, rates=["drop"])
    (check,) = [check for check in found.done if check.name == "gradients with dropout"]
    assert check.ok and "not comparable" not in check.detail
    assert all(check.ok for check in found.done), found.done


class Drawing(Sparing):
    """Draws before it drops, as a layer does that works on a part: another mask is its own."""

    def forward(self, x):
        torch.rand(3) if self.training and self.drop.p else None
        y = self.norm(self.drop(self.down(x)))
        return {"loss": y.exp().mean(), "y": y}


class Dropping(Sparing):
    def forward(self, x):
        y = self.norm(self.drop(self.down(x)))
        return {"loss": y.exp().mean(), "y": y}


def test_other_masks_leave_no_running_means_behind():
    found, _ = checks(Dropping, Drawing, rates=["drop"])
    (check,) = [check for check in found.done if check.name == "gradients with dropout"]
    assert "not comparable" in check.detail
    assert all(check.ok for check in found.done), found.done


def counting():
    """A class of the same text, again."""

    class Counting(nn.Module):
        """Counts its steps, `by` how much."""

        def __init__(self, by=1):
            super().__init__()
            self.by, self.down = by, nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.count += self.by
            return {"loss": self.down(x).square().mean()}

    return Counting


Counting, Rewrote = counting(), counting()


def test_buffers_are_compared():
    found, _ = checks(Counting, lambda: Counting(by=2))
    assert {c.name for c in found.done if not c.ok} == {"buffers", "weights after 3 steps"}


def test_what_was_rewritten_is_built():
    line = 's.py:7: s["a"].checkpoint()'
    now = [Rewritten(Counting, Rewrote, (line,))]
    found, _ = checks(Counting, Rewrote, now)
    assert all(check.ok for check in found.done), found.done
    found, _ = checks(Counting, Counting, now)
    (check,) = [check for check in found.done if not check.ok]
    assert check.detail == (f"the model: the original's Counting, not the rewritten one\n  {line}")
    found, _ = checks(Decoder, Decoder, [Rewritten(Counting, Rewrote, (line,))])
    (check,) = [check for check in found.done if not check.ok]
    assert check.detail == f"no Counting is built, so nothing of it was compared\n  {line}"


class Taking(nn.Module):
    """Takes a part of what it makes, which it does not keep."""

    def __init__(self, kind):
        super().__init__()
        self.down = kind().down

    def forward(self, x):
        return {"loss": self.down(x).square().mean()}


def test_what_was_rewritten_may_be_made_for_its_parts():
    now = [Rewritten(Counting, Rewrote, ("s.py:7: ...",))]
    found, _ = checks(lambda: Taking(Counting), lambda: Taking(Rewrote), now)
    assert all(check.ok for check in found.done), found.done
    found, _ = checks(lambda: Taking(Counting), lambda: Taking(Counting), now)
    assert [check.name for check in found.done if not check.ok] == ["builds what was rewritten"]


def test_classes_that_a_record_tells_of(tmp_path):
    (tmp_path / "m.py").write_text("import a\n\n\nclass A:\n    x = 1\n\n\nclass B:\n    x = 1\n")
    changes = [{"file": "m.py", "lines": [5, 5], "directives": [1]}]
    changes += [{"file": "m.py", "lines": [1, 1], "directives": [0]}]
    changes += [{"file": "m.py", "lines": [9, 9], "directives": [0], "why": REDIRECTED}]
    changes += [{"file": "helper.py", "lines": None, "directives": [0]}]
    record = {"source": {"file": "m.py"}, "changes": changes}
    directives = [Directive("s.py:1", "s.a()", ()), Directive("s.py:2", "s.b()", ())]
    assert rewritten_classes(tmp_path, record, directives) == [
        {"name": "A", "stem": "m", "module": None, "lines": ["s.py:2: s.b()"]}
    ]


def test_parameters_without_axes_have_digests():
    one, other = torch.tensor(1.0), torch.tensor(2.0)
    assert _digest(one) == _digest(one.clone()) != _digest(other)


@pytest.mark.parametrize(
    ("steepness", "rounding", "rate"),
    [(1.0, 0.0, RATES[0]), (4.0, 0.0, RATES[1]), (1.0, 0.1, RATES[1])],
)
def test_what_training_does_not_tell_is_trained_more_slowly(steepness, rounding, rate):
    """A model that diverges, and one whose rounding grows with the steps."""
    staged = object.__new__(Staged)
    staged.original, staged.exact, staged.nudged = nn.Linear(1, 1), nn.Linear(1, 1), False
    staged.full = {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}
    for model in (staged.original, staged.exact):
        model.load_state_dict(staged.full)
    staged.engine = SimpleNamespace(rate=RATES[0])
    staged.training, staged.doubled = SimpleNamespace(clipping=0, bf16=False), False
    staged.steps = [[torch.ones(1)]] * 5

    def loss(model, x):
        off = rounding * staged.engine.rate / RATES[0] * (model is staged.exact)
        return ((steepness + off) * model(x)).pow(4).sum()

    staged._loss, staged.evaluate = loss, lambda model: None
    (_, want), (_, exact) = staged.train_original(), staged.train_exactly()
    if rounding:
        assert staged.may_train_more_slowly(want, exact)
        (_, want), (_, exact) = staged.train_original(), staged.train_exactly()
    assert staged.engine.rate == rate
    assert not staged.may_train_more_slowly(want, exact)
    assert want.is_finite() and want.is_like(exact)
    assert want.losses[0] == steepness**4
