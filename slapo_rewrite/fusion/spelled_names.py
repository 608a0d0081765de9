"""How the model file refers to a function or module by its dotted name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import KERNELS, TRITON, WRITTEN, Imports, Reference
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.directive import Directive
from slapo_rewrite.fusion.kernel_forms import in_torch, names_with

RUNTIME = "slapo_rewrite.runtime."
# What a schedule file is called as a module, and where what it defines goes.
SCHEDULE, MODULES = "schedule_file", "modules"


class Spelling:
    """Gives the text for dotted names, and notes what has to be imported for them."""

    def __init__(
        self, file: SourceFile, cause: Directive, earlier: Iterable[Reference] = ()
    ) -> None:
        self.file, self.cause, self.earlier = file, cause, tuple(earlier)
        self.imports = Imports(file)
        self.references: dict[str, Reference] = {}  # what the texts use from elsewhere

    def __call__(self, dotted: str, backend: str = "") -> str:
        """The text for a dotted name, `torch.nn.functional.gelu -> nn.functional.gelu`."""
        if in_torch(dotted) is not None:
            return self._called(dotted, backend or TRITON)
        if dotted.startswith(RUNTIME):
            module, *_, name = dotted.removeprefix(RUNTIME).split(".")
            return self._helper(module, name, dotted)
        if dotted.startswith(f"{SCHEDULE}."):
            name = dotted.removeprefix(f"{SCHEDULE}.")
            return self._helper(MODULES, name, dotted)
        if dotted.startswith(f"{self.file.name}."):
            return dotted.removeprefix(f"{self.file.name}.")
        known = [
            (len(meaning), name + dotted[len(meaning) :])
            for name, meaning in self.file.imports.items()
            if f"{dotted}.".startswith(f"{meaning}.")
        ]
        if known:
            return max(known)[1]
        if dotted.startswith("torch.nn."):
            return self._outside("torch", "nn", "torch.nn") + dotted.removeprefix("torch.nn")
        module, _, name = dotted.rpartition(".")
        return self._outside(module, name, dotted)

    def by(self, backend: str) -> Callable[[str], str]:
        """The same, where a backend carries out what rules call."""
        return functools.partial(self, backend=backend)

    def take(self, imports: Imports) -> None:
        """Notes what the text of subclasses uses from elsewhere."""
        for module, names in imports.helpers.items():
            for written in sorted(names):
                name = written.rpartition(".")[2]
                origin = f"{RUNTIME}{module}.{name}"
                self.references[written] = Reference(origin, f".{module}", name, written)
        for module, names in imports.packages.items():
            for shown in sorted(names):  # perhaps by another name: `a as b`
                name, _, written = shown.partition(" as ")
                written = written or name
                self.references[written] = Reference(f"{module}.{name}", module, shown, written)

    def _called(self, kernel: str, backend: str) -> str:
        """A function that rules call: of `kernels`, or of the module that carries it out.

        Where `kernels` has one of that name by another backend, it is of a file of its own.
        """
        name = kernel.rpartition(".")[2]
        known = [*self.earlier, *self.references.values()]
        known = [other for other in known if in_torch(other.origin) is not None]
        self._check_one(name, backend, known)
        if backend not in WRITTEN:
            return self._outside(backend, name, kernel)
        module, names = KERNELS, names_with(kernel, backend)
        for other in (r for r in known if r.module == f".{KERNELS}"):
            own = other.backend or TRITON
            if own != backend and names & names_with(other.origin, own):
                module = f"{KERNELS}_{backend}"
        place = self.imports.helper if module == KERNELS else self.imports.within
        written = place(module, name, (self.cause,))
        by = "" if backend == TRITON else backend
        self.references[written] = Reference(kernel, f".{module}", name, written, by)
        return written

    def _check_one(self, name: str, backend: str, known: Iterable[Reference]) -> None:
        """A function is imported under its name, so that of a user's module is the only one."""
        for other in known:
            homes = {r for r in (other.module, backend) if r not in WRITTEN and r[0] != "."}
            if other.name == name and homes and other.module != backend:
                raise errors.NameTaken(
                    f"`{name}` is imported from `{other.module.lstrip('.')}`, and would be from "
                    f"`{backend if backend not in WRITTEN else KERNELS}`, too",
                    hint="have one backend carry it out everywhere",
                )

    def _helper(self, module: str, name: str, origin: str) -> str:
        written = self.imports.helper(module, name, (self.cause,))
        self.references[written] = Reference(origin, f".{module}", name, written)
        return written

    def _outside(self, module: str, name: str, origin: str) -> str:
        written = self.imports.outside(module, name, (self.cause,))
        self.references[written] = Reference(origin, module, name, written)
        return written
