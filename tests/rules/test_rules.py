"""Every rule's worked examples and refusals are run exactly as in its file, with numbers."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slapo_rewrite import errors
from slapo_rewrite.emit.kernels import libraries
from slapo_rewrite.emit.rewrite import Output
from slapo_rewrite.fusion import Numerics, Rule, Twice
from slapo_rewrite.fusion.match_rules import compiled
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.patterns.pattern import named_operations
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.verify.figures import tensors_in
from tests.rewriting import changed_lines, imported, refused, rewritten, written

ALL = rules()
EXAMPLES = [(rule, number) for rule in ALL.values() for number in range(len(rule.examples))]
REFUSALS = [(rule, number) for rule in ALL.values() for number in range(len(rule.refusals))]


def named(value: object) -> object:
    return value.name if isinstance(value, Rule) else value


@pytest.mark.parametrize("rule", ALL.values(), ids=named)
def test_documented(rule: Rule):
    doc = inspect.getdoc(type(rule)) or ""
    for section in ("Rewrite:", "Shapes:", "Numerics:", "State:", "Raises:", "Source:"):
        assert section in doc, section
    said = doc.partition("Numerics:")[2].split()[0].strip(":;,.").lower()
    assert said == rule.numerics.value
    assert (rule.numerics is Numerics.APPROXIMATE) == bool(rule.bound)
    known = {c.code for c in vars(errors).values() if isinstance(c, type) and hasattr(c, "code")}
    assert set(re.findall(r"SR\d{3}", doc)) <= known
    assert rule.examples and rule.refusals


@pytest.mark.parametrize("rule", ALL.values(), ids=named)
def test_its_kernels_exist(rule: Rule):
    for kernel in rule.kernels:
        module, _, name = kernel.partition(".")
        assert name in libraries()[module].defined


@pytest.fixture(scope="module")
def rewritten_example(tmp_path_factory) -> Callable[[Rule, int], tuple[Path, Output, Path]]:
    """Rewrites an example, once for all tests: where it lies, the output, and its model file."""

    @functools.cache
    def of(name: str, number: int) -> tuple[Path, Output, Path]:
        example, folder = ALL[name].examples[number], tmp_path_factory.mktemp(name)
        output = rewritten(folder, example.source, example.schedule)
        return folder, output, written(folder, output)

    return lambda rule, number: of(rule.name, number)


@pytest.mark.parametrize(("rule", "number"), EXAMPLES, ids=named)
def test_example(rule: Rule, number: int, rewritten_example):
    folder, output, path = rewritten_example(rule, number)
    assert changed_lines(output) == rule.examples[number].diff
    for name, text in output.files.items():
        if name.endswith(".py"):
            ast.parse(text)
    compare(rule, folder, output, path)


def recorded(output) -> list[dict]:
    """What the record says of the rules that were applied."""
    return json.loads(output.files["rewrite.json"]).get("rules", [])


def compare(rule: Rule, folder: Path, output: Output, path: Path | None = None) -> None:
    """Outputs and every gradient of the original and of the rewritten model, on a CPU."""
    schedule = ScheduleFile.load(str(folder / "s.py")).module
    original = imported(next(folder.glob("source_*.py")))
    found = []
    weights = None
    for module in (original, imported(path or written(folder, output))):
        torch.manual_seed(0)
        model = schedule.model(module).double()
        weights = model.state_dict() if weights is None else weights
        model.load_state_dict(weights)
        torch.manual_seed(2)
        given = {
            n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
            for n, v in schedule.inputs(model).items()
        }
        torch.manual_seed(1)
        outputs = model(**given)
        schedule.loss(outputs).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for path, inner in model.named_modules():
            if hasattr(inner, "weight_map"):
                gradients = inner.weight_map.to_original(gradients, f"{path}.")
        found.append((outputs, gradients))
    (expected, expected_gradients), (outputs, actual_gradients) = found
    assert actual_gradients.keys() == expected_gradients.keys()
    # On a CPU, what is reseeded draws the numbers that it drew before.
    limit = 0.0 if rule.numerics is Numerics.EXACT else rule.bound or 2e-6
    if absent := {n for note in recorded(output) for n in note.get("none in training", ())}:
        outputs, expected = (tensors_in(each) for each in (outputs, expected))
        assert absent.isdisjoint(outputs), "these are left out"
        expected = {name: tensor for name, tensor in expected.items() if name not in absent}
    pairs = [(outputs, expected)]
    pairs += [(actual_gradients[n], g) for n, g in expected_gradients.items()]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


# A condition: the type of the model, and whether autocast is on.
CONDITIONS = {
    "double backward": (torch.float64, False),
    "autocast": (torch.float32, True),
    "half precision": (torch.bfloat16, False),
    "empty batches": (torch.float64, False),
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize(("rule", "number"), EXAMPLES, ids=named)
def test_conditions(rule: Rule, number: int, condition: str, rewritten_example):
    """What a rule's page says of a condition holds of its examples, on a CPU."""
    assert condition in "\n".join(rule.conditions.lines())
    folder, output, path = rewritten_example(rule, number)
    schedule = ScheduleFile.load(str(folder / "s.py")).module
    modules = [imported(next(folder.glob("source_*.py"))), imported(path)]
    torch.manual_seed(0)
    state = schedule.model(modules[0]).state_dict()
    try:
        wanted = under(condition, schedule, modules[0], state)
    except RuntimeError:  # the example itself has no second derivative, or no empty view
        modules, wanted = modules[1:], None
    twice = rule.conditions.double_backward
    if wanted is None or (condition == "double backward" and twice is Twice.NEVER):
        with pytest.raises(RuntimeError):
            under(condition, schedule, modules[-1], state)
        return
    found = under(condition, schedule, modules[1], state)
    absent = {n for note in recorded(output) for n in note.get("none in training", ())}
    assert wanted.keys() - absent == found.keys()
    limit = 3e-6 if CONDITIONS[condition][0] == torch.float64 else 5e-2
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        torch.testing.assert_close(tensor, wanted[name], rtol=limit, atol=limit, equal_nan=True)


def under(condition: str, schedule, module, state) -> dict[str, torch.Tensor]:
    """The outputs and gradients of a model under a condition, by name."""
    (dtype, mixed), empty = CONDITIONS[condition], condition == "empty batches"
    model = schedule.model(module)
    model.load_state_dict(state)
    model.to(dtype)
    for inner in model.modules():
        if isinstance(inner, torch.nn.Dropout):
            inner.p = 0.0
    torch.manual_seed(2)
    given = {
        n: v.to(dtype).requires_grad_() if torch.is_tensor(v) and v.is_floating_point() else v
        for n, v in schedule.inputs(model).items()
    }
    if empty:  # masks without a batch stay as they are
        given = {n: v[:0] if v.dim() > 2 or n == "labels" else v for n, v in given.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        outputs = model(**given)
        loss = schedule.loss(outputs)
    leaves = {n: v for n, v in given.items() if torch.is_tensor(v) and v.requires_grad}
    inputs = [*leaves.values()]
    if condition == "double backward":
        first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        loss = sum(g.square().sum() for g in first if g is not None)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for path, inner in model.named_modules():
        if hasattr(inner, "weight_map"):
            gradients = inner.weight_map.to_original(gradients, f"{path}.")
    return dict(tensors_in(outputs)) | gradients


@pytest.mark.parametrize(("rule", "number"), REFUSALS, ids=named)
def test_refusal(rule: Rule, number: int, tmp_path):
    refusal = rule.refusals[number]
    text = refused(tmp_path, refusal.source, refusal.schedule, refusal.code)
    assert re.search(r"s\.py:\d+:\d+", text), "the schedule's line is shown"


@pytest.mark.parametrize("rule", ALL.values(), ids=named)
def test_what_a_pattern_names_stands_in_it(rule: Rule):
    for alternative in rule.alternatives:
        needs = compiled(alternative).needs
        assert named_operations(alternative.pattern) <= needs, alternative.pattern.__qualname__


@pytest.mark.parametrize("rule", ALL.values(), ids=named)
def test_what_has_no_replacement_is_written_as_a_call(rule: Rule):
    every = (*rule.alternatives, *rule.calls)
    if any(alternative.replacement is None for alternative in every):
        assert rule.functions and type(rule).expression is not Rule.expression
