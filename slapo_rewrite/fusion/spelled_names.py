"""Writes references to functions and modules, given by dotted names, in the model file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import (
    KERNELS,
    MODULES,
    SCHEDULE,
    TRITON,
    WRITTEN,
    Imports,
    Reference,
)
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.directive import Directive
from slapo_rewrite.fusion.kernel_forms import in_torch, names_with

RUNTIME = "slapo_rewrite.runtime."


class Spelling(Imports):
    """Writes the text for dotted names, and collects the imports that they need."""

    def __init__(
        self, file: SourceFile, cause: Directive, earlier: Iterable[Reference] = ()
    ) -> None:
        super().__init__(file)
        self.asking, self.earlier = (cause,), tuple(earlier)

    def __call__(self, dotted: str, backend: str = "") -> str:
        """The text for a dotted name, `torch.nn.functional.gelu -> nn.functional.gelu`."""
        if in_torch(dotted) is not None:
            return self._called(dotted, backend or TRITON)
        if dotted.startswith(RUNTIME):
            module, *_, name = dotted.removeprefix(RUNTIME).split(".")
            return self.helper(module, name, self.asking, origin=dotted)
        if dotted.startswith(f"{SCHEDULE}."):
            name = dotted.removeprefix(f"{SCHEDULE}.")
            return self.helper(MODULES, name, self.asking)
        if dotted.startswith(f"{self.file.name}."):
            return dotted.removeprefix(f"{self.file.name}.")
        if (known := self.spelled(dotted)) is not None:
            return known
        if dotted.startswith("torch.nn."):
            return self.outside("torch", "nn", self.asking) + dotted.removeprefix("torch.nn")
        module, _, name = dotted.rpartition(".")
        return self.outside(module, name, self.asking)

    def by(self, backend: str) -> Callable[[str], str]:
        """The same for a backend of the functions that rules call."""
        return functools.partial(self, backend=backend)

    def _called(self, kernel: str, backend: str) -> str:
        """The reference to a function that rules call: in `kernels`, or in the backend's module.

        If `kernels` has a function of that name by another backend, it goes to a separate file.
        """
        name = kernel.rpartition(".")[2]
        known = [*self.earlier, *self.references.values()]
        known = [other for other in known if in_torch(other.origin) is not None]
        self._check_one(name, backend, known)
        if backend not in WRITTEN:
            return self.outside(backend, name, self.asking, kernel)
        module, names = KERNELS, names_with(kernel, backend)
        for other in (r for r in known if r.module == f".{KERNELS}"):
            own = other.backend or TRITON
            if own != backend and names & names_with(other.origin, own):
                module = f"{KERNELS}_{backend}"
        by, apart = "" if backend == TRITON else backend, module != KERNELS
        return self.helper(module, name, self.asking, apart=apart, origin=kernel, backend=by)

    def _check_one(self, name: str, backend: str, known: Iterable[Reference]) -> None:
        """Raises if a function of a user's module and another one would share a name."""
        for other in known:
            homes = {r for r in (other.module, backend) if r not in WRITTEN and r[0] != "."}
            is_named = other.origin.rpartition(".")[2] == name
            if is_named and homes and other.module != backend:
                raise errors.NameTaken(
                    f"`{name}` is imported from `{other.module.lstrip('.')}`, and would be from "
                    f"`{backend if backend not in WRITTEN else KERNELS}`, too",
                    hint="use one backend for it everywhere",
                )
