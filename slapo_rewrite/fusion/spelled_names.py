"""How the model file refers to a function or module by its dotted name."""

from __future__ import annotations

from slapo_rewrite.changes.imports import Imports, Reference
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.directive import Directive

RUNTIME = "slapo_rewrite.runtime."
# What a schedule file is called as a module, and where what it defines goes.
SCHEDULE, MODULES = "schedule_file", "modules"


class Spelling:
    """Gives the text for dotted names, and notes what has to be imported for them.

    Attributes:
        references: What the texts use from elsewhere.
    """

    def __init__(self, file: SourceFile, cause: Directive) -> None:
        self.file, self.cause = file, cause
        self.imports = Imports(file)
        self.references: dict[str, Reference] = {}

    def __call__(self, dotted: str) -> str:
        """The text for a dotted name, `torch.nn.functional.gelu -> nn.functional.gelu`.

        Raises:
            NameTaken: The file means something else by the names that it needs.
        """
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

    def take(self, imports: Imports) -> None:
        """Notes what the text of subclasses uses from elsewhere."""
        for module, names in imports.helpers.items():
            for written in sorted(names):
                name = written.rpartition(".")[2]
                origin = f"{RUNTIME}{module}.{name}"
                self.references[written] = Reference(origin, f".{module}", name, written)
        for module, names in imports.packages.items():
            for name in sorted(names):
                self.references[name] = Reference(f"{module}.{name}", module, name, name)

    def _helper(self, module: str, name: str, origin: str) -> str:
        written = self.imports.helper(module, name, (self.cause,))
        self.references[written] = Reference(origin, f".{module}", name, written)
        return written

    def _outside(self, module: str, name: str, origin: str) -> str:
        written = self.imports.outside(module, name, (self.cause,))
        self.references[written] = Reference(origin, module, name, written)
        return written
