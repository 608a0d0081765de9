"""A module of the user's own whose functions take the place of the tool's kernels."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.fusion.backends import Choice
from slapo_rewrite.fusion.kernel_forms import in_torch, kernel_function
from slapo_rewrite.fusion.rule import Rule, RuleMatch

# Of the largest value, in float32: sums in another order stay below it.
LIMIT = 1e-4
ROWS, WIDTH = 6, 8


@dataclass
class Plugged:
    """Functions of a module, each looked at before it is called for the first time."""

    module: types.ModuleType
    _checked: set[str] = field(default_factory=set)

    def choose(self, rule: Rule, kernel: str, found: RuleMatch) -> Choice:
        """The module, once its function is known to be another form of a kernel.

        Raises:
            BadArgument: It has none of this name, or with other parameters.
            OtherNumbers: It computes something else, or fails, on a CPU.
        """
        if kernel not in self._checked:
            self._check(kernel)
            self._checked.add(kernel)
        return Choice(self.module.__name__)

    def _check(self, kernel: str) -> None:
        home, name = self.module.__name__, kernel.rpartition(".")[2]
        function = getattr(self.module, name, None)
        if not callable(function):
            public = [each for each in vars(self.module) if not each.startswith("_")]
            raise errors.BadArgument(
                f"`{home}` has no function `{name}`, which the rule calls",
                hint=errors.did_you_mean(name, public)
                or f"define it there, or apply by it the rules that it has functions for: "
                f's.apply(..., backend="{home}")',
            )
        want, have = (_parameters(f) for f in (kernel_function(kernel), function))
        if want != have:
            raise errors.BadArgument(
                f"`{home}.{name}` does not take what `{name}` takes",
                hint=f"it has to be called so: {name}({', '.join(want)})",
            )
        self._check_numbers(kernel, function)

    def _check_numbers(self, kernel: str, function: Callable[..., Any]) -> None:
        from slapo_rewrite.model.kernel_samples import Maker, largest_error, samples

        home, name = self.module.__name__, kernel.rpartition(".")[2]
        reference = in_torch(kernel)
        assert reference is not None, f"{kernel} has no other form"
        for sample in samples(name, Maker(ROWS, WIDTH)):
            given = ", ".join([*(["..."] if sample.args else []), *sample.kwargs])
            try:
                error, what = largest_error(function, reference, sample)
            except Exception as failed:
                raise errors.OtherNumbers(
                    f"`{home}.{name}({given})` fails on a CPU: {type(failed).__name__}: {failed}",
                    hint="outputs are run on CPUs, too: have it call PyTorch's operations where "
                    f"its own kernel does not run, as `{kernel}` does",
                ) from failed
            if error > LIMIT:
                raise errors.OtherNumbers(
                    f"`{home}.{name}({given})` computes something else than `{name}`: {what} "
                    f"differs by {error:.1e} of the largest value",
                    hint="on small inputs in float32, on a CPU; what it should compute says "
                    f"`{reference.__module__}.{name}`",
                )


def plugged(name: str) -> Plugged | None:
    """The module of a dotted name; None where there is none.

    Raises:
        BadArgument: Importing it fails.
    """
    try:
        return Plugged(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise _failing(name, error) from error
    except Exception as error:
        raise _failing(name, error) from error


def _failing(name: str, error: Exception) -> errors.BadArgument:
    return errors.BadArgument(
        f"the module `{name}` cannot be imported: {type(error).__name__}: {error}"
    )


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function as they are written, annotations apart."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    shown = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
    by_name = [n for n, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if by_name and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        shown.insert(by_name[0], "*")
    return shown
