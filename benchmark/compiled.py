"""Kernels as compiled for a GPU, without needing one: intercepts, compiles and reads launches.

The public functions run on fake tensors. Their launches are passed to a function instead, which
may compile them with Triton's own compiler, for any GPU.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from slapo_rewrite.emit.kernels import libraries

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Launch:
    """A kernel and what it is called with.

    Attributes:
        kernel: Triton's function.
        arguments: By parameter.
        options: Of the compiler: `num_warps` and the like.
        grid: How many programs along each axis.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """The kernel's."""
        name: str = self.kernel.fn.__name__
        return name

    @property
    def constants(self) -> set[str]:
        """The parameters that the code is compiled for."""
        return {p.name for p in self.kernel.params if p.is_constexpr}

    def compiled(self, capability: int = 90, number: str = "fp32") -> Any:
        """The kernel that Triton compiles for these arguments, specialised as by a launch.

        Args:
            capability: The GPU's, times ten.
            number: The type of Python's floats; `torch.compile` gives "fp64".
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = [p.name for p in self.kernel.params]
        assert set(self.arguments) == set(names), set(self.arguments) ^ set(names)
        constants = {name: self.arguments[name] for name in self.constants}
        constants |= {k: v for k, v in self.arguments.items() if type(v) is int and v == 1}
        signature, aligned = {}, {}
        for place, name in enumerate(names):
            value = self.arguments[name]
            if name in constants:
                signature[name] = "constexpr"
                continue
            if isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
            elif isinstance(value, float):
                signature[name] = number
            else:
                signature[name] = "i64" if value >= 2**31 else "i32"
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                aligned[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=aligned)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=self.options)


@contextmanager
def caught(
    modules: Iterable[ModuleType],
    launched: Callable[[Launch], None],
    multiprocessors: int = 1,
) -> Iterator[None]:
    """Inside, kernels of these modules are handed to a function instead of launched.

    Args:
        modules: They take every tensor to be on a GPU.
        launched: Gets each launch.
        multiprocessors: The GPU's, for the kernels that ask.
    """
    from triton.runtime.jit import JITFunction

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = [p.name for p in self.params]
        bound = dict(zip(names, arguments, strict=False))
        bound |= {k: v for k, v in named.items() if k in names}
        options = {k: v for k, v in named.items() if k not in names}
        launched(Launch(self, bound, options, tuple(grid)))

    with as_on_gpu(modules, multiprocessors), mock.patch.object(JITFunction, "run", run):
        yield


@contextmanager
def as_on_gpu(modules: Iterable[ModuleType], multiprocessors: int = 1) -> Iterator[None]:
    """Inside, the kernels' functions take every tensor to be on a GPU of so many."""
    with ExitStack() as stack:
        for module in modules:
            for name, value in (("runs_triton", True), ("multiprocessors", multiprocessors)):
                if hasattr(module, name):
                    answer = mock.patch.object(module, name, lambda *x, value=value: value)
                    stack.enter_context(answer)
        yield


def kernel_modules() -> list[ModuleType]:
    """The files of kernels."""
    folder = "slapo_rewrite.runtime.kernels"
    return [importlib.import_module(f"{folder}.{name}") for name in libraries()]


def disassembled(binary: bytes, *flags: str) -> str:
    """The output of cuobjdump, which comes with Triton, for a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run(
            [tool, *flags, file.name], capture_output=True, text=True, check=True
        ).stdout


def resources(binary: bytes) -> dict[str, int]:
    """Registers of a thread (REG), and its bytes outside them (STACK, LOCAL)."""
    text = disassembled(binary, "-res-usage")
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


# What else than arithmetic in floating point: half of the lanes.
_INTEGER = re.compile(
    r"(IADD3|ISETP|LOP3|SHF|SEL|FSEL|FSETP|FSET|FMNMX|PRMT|VIADD|VIMNMX|I2FP|F2FP|LEA|PLOP3|HSETP2"
    r"|IMNMX|IABS|P2R|R2P|SGXT|BMSK|MOV|CS2R|POPC|FLO)\b"
)
_SPECIAL = re.compile(r"(MUFU|I2F|F2I|F2F)\b")
_SPACE = re.compile(r"(LDG|STG|LDGSTS)\b")


def parsed(text: str) -> list[tuple[int, str]]:
    """Addresses and instructions of cuobjdump's listing, without what pads its end."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;/]+?) *;", text)
    lines = [(int(at, 16), line) for at, line in found]
    return [(at, line) for at, line in lines if not (line == "NOP" or jump(line) == at)]


def jump(line: str) -> int | None:
    """The target address of a jump instruction."""
    found = re.search(r"\bBRA\S* .*?(0x[0-9a-f]+)", line)
    return int(found[1], 16) if found else None


def counted(text: str) -> tuple[Counter[str], Counter[str]]:
    """A listing's instructions outside its loop, and in a turn of it: none without a loop.

    Raises:
        ValueError: There are several loops.
    """
    lines = parsed(text)
    back = {(to, at) for at, line in lines if (to := jump(line)) is not None and to < at}
    loops = [span for span in back if holds_memory(lines, span)]
    if len(loops) > 1:
        raise ValueError(f"{len(loops)} loops")
    first, last = loops[0] if loops else (0, -1)
    return (
        tally([line for at, line in lines if not first <= at <= last]),
        tally([line for at, line in lines if first <= at <= last]),
    )


def holds_memory(lines: list[tuple[int, str]], span: tuple[int, int]) -> bool:
    """Whether a part of a listing loads or stores."""
    part = (operation(line) for at, line in lines if span[0] <= at <= span[1])
    return any(_SPACE.match(name) for name in part)


def operation(line: str) -> str:
    """An instruction without its predicate and operands."""
    return re.sub(r"^@!?U?P\w+ ", "", line).split(" ")[0]


def tally(lines: list[str]) -> Counter[str]:
    """Counts a warp's instructions.

    All are "instructions". "special" are those of the special-function unit, "integer" of the unit
    for integers, comparisons and conversions; "barriers" wait for the program's other warps,
    "waits" use what is just being loaded, "prefetched" loads go to shared memory meanwhile.
    "load 16" and "store 16" are loads and stores of 16 bytes.
    """
    found, under_way = Counter[str](instructions=len(lines)), set[str]()
    for line in lines:
        name = operation(line)
        found["special"] += bool(_SPECIAL.match(name))
        found["integer"] += bool(_INTEGER.match(name))
        found["barriers"] += name.startswith("BAR.SYNC")
        registers = re.findall(r"\bR(\d+)(\.64)?", line)
        used = {n for n, _ in registers} | {str(int(n) + 1) for n, wide in registers if wide}
        if under_way & used:
            found["waits"] += 1
            under_way = set()
        if not _SPACE.match(name):
            continue
        wide = re.search(r"\.(U8|S8|U16|S16|64|128)\b", name)
        bits = int(wide[1].lstrip("US")) if wide else 32
        found[f"{'store' if name.startswith('STG') else 'load'} {bits // 8}"] += 1
        found["prefetched"] += name.startswith("LDGSTS")
        if name.startswith("LDG."):
            first = int(registers[0][0])
            under_way |= {str(first + i) for i in range(max(bits // 32, 1))}
    return found
