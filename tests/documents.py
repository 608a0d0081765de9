"""The code blocks of a document, run in their order in one folder, as a reader would.

A block with a title (```` ```python title="gpt.py" ````) is a file. Python without a title is a
schedule where it defines `schedule`, and goes on from the file `schedule.py` of the document; other
Python runs as it stands. A `console` block's commands do what is shown: figures may differ, and
`...` stands for anything. `<!-- long -->` above a block leaves it to the long tests,
`<!-- exits 1 -->` says what its last command's exit code is. `<!-- goes on from tutorial.md -->`
has the files of that document there.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from slapo_rewrite import cli
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.parsers import PARSERS
from tests import forked
from tests.golden import GENERATED, ROOT

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.S | re.M,
)
READERS = {"python": ast.parse, "json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
SHOWN_ALONE = {"text", "bash"}
BERT = "transformers.models.bert.modeling_bert"
# What torch's threads say where they end a process that is done: once in hundreds of runs.
ABORTED = "terminate called without an active exception"
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        language: What stands behind the fence.
        title: The file that it is, if it is one.
        text: What stands in it.
        marks: What the comment above it says.
    """

    language: str
    title: str
    text: str
    marks: tuple[str, ...]

    @property
    def long(self) -> bool:
        return "long" in self.marks

    @property
    def exits(self) -> int:
        return next((int(m.removeprefix("exits ")) for m in self.marks if "exits" in m), 0)

    @property
    def is_schedule(self) -> bool:
        return self.language == "python" and re.search("^def schedule", self.text, re.M) is not None

    def sessions(self) -> list[tuple[str, str]]:
        """What is typed, with what is shown after it."""
        typed = re.split(r"^\$ ", self.text.replace("\\\n", " "), flags=re.M)
        return [(part.partition("\n")[0], part.partition("\n")[2]) for part in typed if part]


def read(path: Path) -> list[Block]:
    """The blocks of a document, behind the files of one that it goes on from."""
    text = path.read_text()
    before = re.findall(r"^<!-- goes on from (.*) -->$", text, re.M)
    return [b for name in before for b in read(path.parent / name) if b.title] + blocks(text)


def blocks(text: str) -> list[Block]:
    found = []
    for each in BLOCK.finditer(text):
        marks = tuple(each["mark"].split(", ")) if each["mark"] else ()
        assert all(re.fullmatch(r"long|exits \d", mark) for mark in marks), marks
        found.append(Block(each["language"], each["title"] or "", each["text"], marks))
    assert len(found) == len(re.findall(r"^```\w+", text, re.M)), "one cannot be read"
    return found


def without_figures(text: str) -> list[str]:
    """The words of each line: errors differ from machine to machine in their last digits.

    The code of a refusal is a word.
    """
    figures = re.compile(r"(?!\S*SR\d{3}\b)\S*\d\S*")
    return [" ".join(figures.sub("", line).split()) for line in text.strip().splitlines()]


def without_schedule(text: str) -> str:
    """A schedule file without its `schedule`, for another to take its place."""
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == "schedule":
            lines[node.lineno - 1 : node.end_lineno] = []
    return "".join(lines) + "\n\n"


def shows(shown: str, printed: str) -> bool:
    """Whether what is shown was printed, figures apart."""
    lines = [re.escape(each).replace(r"\.\.\.", "[^\0]*") for each in without_figures(shown)]
    return re.fullmatch("\n".join(lines), "\n".join(without_figures(printed))) is not None


class Reader:
    """Someone who does what a document says, in a folder.

    Args:
        folder: An empty one, in which this process is.
        capsys: What tells of the printed.
        patient: Whether to run what is long.
        by_torchrun: Whether it starts the ranks where a command says so. Each of its processes
            imports torch anew, for seconds; those that are forked have done that.
    """

    def __init__(self, folder: Path, capsys: Any, patient: bool, by_torchrun: bool = False) -> None:
        self.folder, self.capsys, self.patient = folder, capsys, patient
        self.by_torchrun = by_torchrun
        self.source = ""  # of transformers where no file is shown
        self.names: dict[str, Any] = {}

    def follow(self, block: Block) -> None:
        """Does what one block says."""
        if block.language in READERS:
            READERS[block.language](block.text)
        elif block.language not in {"console", "diff", *SHOWN_ALONE}:
            raise AssertionError(f"what is {block.language}?")
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(block.text)
            if block.language == "python" and not self.source:
                self.source = block.title
            return
        if block.language == "diff":
            diffs = [*GENERATED.glob("*/*/rewrite.diff"), *self.folder.glob("**/rewrite.diff")]
            assert any(block.text in path.read_text() for path in diffs), block.text
        if block.language == "console":
            sessions = block.sessions()
            for number, (command, shown) in enumerate(sessions, 1):
                self.type(command, shown, block, block.exits if number == len(sessions) else 0)
        if block.language != "python" or (block.long and not self.patient):
            return
        if block.is_schedule:
            self.try_schedule(block.text)
        else:
            exec(compile(block.text, "<document>", "exec"), self.names)

    def try_schedule(self, text: str) -> None:
        """Rewrites the document's source by a schedule that goes on from its `schedule.py`."""
        given = self.folder / "schedule.py"
        path = self.folder / "shown.py"
        path.write_text((without_schedule(given.read_text()) if given.exists() else "") + text)
        output = rewrite(self.source or BERT, str(path))
        assert output.diff() or "pipeline.py" in output.files, "it changes nothing"

    def type(self, command: str, shown: str, block: Block, exits: int) -> None:
        """Runs a command, and compares what it prints and how it ends."""
        program, *arguments = shlex.split(command, comments=True)
        if program == "make":
            assert arguments[0] in TARGETS, command
        elif program == "pip":
            wanted = re.findall(r"\[([\w,]+)\]", command)
            assert {name for each in wanted for name in each.split(",")} <= EXTRAS.keys(), command
        elif program == "slapo-rewrite":
            name = arguments[0] if arguments[0] in cli.COMMANDS else ""
            PARSERS[name]().parse_args(arguments[bool(name) :])
            if block.long and not self.patient:
                return
            self.capsys.readouterr()
            bin_first = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
            with mock.patch.dict(os.environ, PATH=bin_first):  # as where the environment is active
                code = cli.main(arguments)
            printed = self.capsys.readouterr()
            assert code == exits, command + printed.err
            said = printed.out + (printed.err if exits == 2 else "")
            assert not shown or shows(shown, said), f"{command}\n{said}"
        else:
            assert program in ("python", "torchrun", "git", "pre-commit"), command
            assert block.long or program == "git", f"{command} takes seconds: mark it"
            if block.long and not self.patient:
                scripts = [a for a in arguments if a.endswith(".py")]
                assert all((self.folder / name).exists() for name in scripts), command
                return
            printed = self.ran(program, arguments, exits)
            assert not shown or shows(shown, printed), f"{command}\n{printed}"

    def ran(self, program: str, arguments: list[str], exits: int) -> str:
        """What another program prints that ends as it should."""
        if program == "torchrun" and not self.by_torchrun:
            assert arguments[0] == "--nproc-per-node", arguments
            return forked.printed(self.folder / arguments[2], int(arguments[1]), *arguments[3:])
        found = shutil.which(program, path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
        assert found, program
        for _ in range(2):
            done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=900)
            if ABORTED not in done.stderr:
                break
        assert done.returncode == exits, done.stdout + done.stderr
        return done.stdout
