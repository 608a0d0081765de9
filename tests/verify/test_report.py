"""The text of the report, without processes."""

import math
from types import SimpleNamespace

import pytest
import torch

from slapo_rewrite.verify.figures import compare, difference, tensors_in
from slapo_rewrite.verify.launch import PEER_LOST
from slapo_rewrite.verify.report import Directive, Failure, Report, Row, merge, power_of_ten


def row(name="gradients", *, ok=True, error=1e-7, own=2e-7, world=2, **more):
    more = {"place": "a.weight", "world": world, "rank": 0, **more}
    return Row(name, ok, error, 1e-3, own, **more)


def test_directives_cover_modules_below_their_paths_and_number_for_number():
    line = Directive("s.py:3", "...", ("model.layers.*.mlp", "head"))
    assert line.covers("model.layers.11.mlp") == 0
    assert line.covers("model.layers.0.mlp.down.0") == 2
    assert line.covers("model.layers.0.mlpx") is None
    assert line.covers("model.layers.0") is None
    assert line.covers("head") == 0
    assert Directive("s.py:3", "...", ("",)).covers("head") == 1


def test_nearest_schedule_line_comes_first():
    report = Report((2,), [row(ok=False, error=0.5, differs=(("m.0.up.weight", 0.5),))])
    report.directives = [
        Directive("s.py:1", "s['m.*'].checkpoint()", ("m.*",)),
        Directive("s.py:2", "s['m.*.up'].shard('weight', axis=0)", ("m.*.up",)),
    ]
    text = report.render()
    assert text.index("s.py:2: s['m.*.up']") < text.index("s.py:1: s['m.*'].checkpoint()")
    assert "of one parameter wrong in `gradients`" in text


def test_verdict_needs_every_world_size():
    report = Report((1, 2), [row(world=1)])
    assert not report.ok
    report.rows.append(row(world=2))
    assert report.ok
    report.failures.append(Failure(2, "rank 1 at world size 2 fails during: x", "E: y", "x"))
    assert not report.ok
    assert "NOT verified: rank 1 at world size 2 fails" in report.render()
    assert not Report((1,)).ok


def test_worst_rank_of_each_check_is_kept():
    def check(name, ok, error):
        known = {"limit": 1e-3, "own": None, "reference": None, "place": "", "detail": ""}
        return {"name": name, "ok": ok, "error": error, "differs": [], "after": "", **known}

    results = {
        0: {"checks": [check("a", True, 1e-9), check("b", True, None)]},
        1: {"checks": [check("a", True, 1e-5), check("b", False, None)]},
        2: {"checks": [check("a", True, 1e-7)]},
        3: {},
    }
    assert [(r.name, r.rank, r.ok) for r in merge(4, results)] == [("a", 1, True), ("b", 1, False)]


@pytest.mark.parametrize(
    ("value", "power"),
    [(0.0, 0.0), (3e-7, 1e-6), (1e-6, 1e-6), (1.1e-6, 1e-5), (0.5, 1.0), (math.inf, "inf")],
)
def test_recorded_figures_are_powers_of_ten(value, power):
    assert power_of_ten(value) == power


def test_record_is_made_of_plain_values():
    report = Report((2,), [row(error=3.3e-7)], shares={2: 0.5378})
    assert report.record() == {
        "verdict": "equal",
        "worlds": [2],
        "changed": [],
        "parameters_on_a_rank": {"2": 0.54},
        "checks": [
            {"world": 2, "check": "gradients", "ok": True, "error": 1e-06, "limit": 0.001},
        ],
        "failures": [],
    }


def test_differences():
    t = torch.tensor
    assert difference(t([1.0, 2.0]), t([1.0, 4.0])) == 0.5
    assert difference(t([1e-9]), t([0.0])) == pytest.approx(1e-3)
    assert difference(t([1.0]), t([1.0, 1.0])) == math.inf
    assert difference(t([math.nan]), t([1.0])) == math.inf
    assert difference(t([1.0]), t([math.nan])) == math.inf
    assert difference(t([math.nan, -math.inf, 1.0]), t([math.nan, -math.inf, 1.0])) == 0
    assert difference(t([1]), t([2])) == 0.5
    assert difference(torch.empty(0), torch.empty(0)) == 0


def test_comparison_names_the_worst_and_all_beyond_the_limit():
    want = {n: torch.ones(2) for n in "abcd"}
    got = {"a": torch.ones(2), "b": torch.full((2,), 1.1), "c": torch.full((2,), 1.5)}
    got["d"] = want["d"]
    exact = {"c": torch.full((2,), 1.25, dtype=torch.float64)}
    check = compare("gradients", 1e-3, got, want, exact)
    assert (check.ok, check.place, check.error, check.after) == (False, "c", 0.5, "d")
    assert [name for name, _ in check.differs] == ["b", "c"]
    assert (check.own, check.reference) == (0.2, 0.2)
    assert not compare("gradients", 1e-3, {}, want, {}).ok


def test_outputs_are_found_by_name_without_caches():
    t = torch.zeros(1)
    found = tensors_in({"loss": t, "past_key_values": (t,), "hidden": (t, None, [t]), "n": 3})
    assert list(found) == ["loss", "hidden.0", "hidden.2.0"]
    assert list(tensors_in(t)) == ["output"]
    assert list(tensors_in([SimpleNamespace(loss=t, cls=int, n=3)])) == ["0.loss"]


def test_lost_peers_are_recognised():
    assert PEER_LOST.search("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1")
    assert not PEER_LOST.search("mat1 and mat2 shapes cannot be multiplied")
