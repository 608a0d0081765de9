"""The pages of primitives and rules match the definitions in their files."""

from __future__ import annotations

import inspect

import pytest

from slapo_rewrite import primitives
from slapo_rewrite.code.constants import Class, constants
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.primitives import page

ALL, RULES = primitives.registry(), rules()


@pytest.mark.parametrize("name", ALL)
def test_a_primitive(name):
    told = Class.named(f"slapo_rewrite.primitives.{name}", name)
    assert told.doc == inspect.getdoc(type(ALL[name]))
    assert told.get("examples") == ALL[name].examples
    own = inspect.signature(ALL[name].takes)
    assert told.stub("takes") == own.replace(
        parameters=[p.replace(annotation=p.empty) for p in own.parameters.values()],
        return_annotation=own.empty,
    )


@pytest.mark.parametrize("name", RULES)
def test_a_rule(name):
    told, rule = Class.named(f"{page.RULES}.{name}", name), RULES[name]
    assert told.doc == inspect.getdoc(type(rule))
    for fact, default in (("examples", ()), ("numerics", None), ("conditions", None), ("pays", "")):
        assert told.get(fact, default) == getattr(rule, fact)
    assert set(page.kernels_of(name)) == set(rule.kernels)


def test_all_of_them():
    assert page.rules() == sorted(RULES)
    assert set(ALL) == {each.name for each in ALL.values()}


def test_what_is_not_worked_out_is_said():
    with pytest.raises(NameError, match="`Tensor` of torch is only known after its import"):
        constants(f"{page.RULES}.swiglu")["Tensor"]
