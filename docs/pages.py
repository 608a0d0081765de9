"""Makes the pages that nobody writes: one for each primitive and each rule, from their own words.

MkDocs calls the functions that begin with `on_`. Files of the repository that a page links to, an
example say, become part of the site.
"""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from slapo_rewrite.primitives import registry
from slapo_rewrite.primitives.page import described, first_line, rules

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"primitives": list(registry()), "rules": rules()}
ABOUT = {
    "primitives": "Primitives are the methods of a selection in a [schedule](../schedules.md).",
    "rules": "A rule is a pattern with a better way to compute it. `s.apply(NAME)` applies one "
    "rule, `s.apply_all()` all rules that pay.",
}
OTHERS = "repository/"  # where the site has files from outside this folder
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Fills the menu."""
    for entry in in_menu(config.nav):
        for title, kind in entry.items():
            if isinstance(kind, str) and kind in KINDS:
                pages = (f"{kind}/{name}.md" for name in KINDS[kind])
                entry[title] = [f"{kind}/index.md", *pages]


def in_menu(entries: list[Any]) -> Iterator[dict[str, Any]]:
    """What has a title in the menu, sections and what is in them."""
    for entry in entries:
        if isinstance(entry, dict):
            yield entry
            for inside in entry.values():
                yield from in_menu(inside) if isinstance(inside, list) else ()


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds what is made, and what is linked to."""
    for kind, names in KINDS.items():
        files.append(File.generated(config, f"{kind}/index.md", content=listing(kind)))
        for name in names:
            files.append(File.generated(config, f"{kind}/{name}.md", content=written(name)))
    wanted = [file for file in files if file.src_uri.endswith(".md")]
    while wanted:
        file = wanted.pop()
        for link in LINK.finditer(file.content_string):
            uri = address(file.src_uri, link[1])
            source = ROOT / uri.removeprefix(OTHERS)
            if not uri.startswith(OTHERS) or files.get_file_from_path(uri) or not source.is_file():
                continue  # MkDocs says of what is missing
            added = File.generated(config, uri, abs_src_path=str(source))
            added.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(added)
            if uri.endswith(".md"):
                wanted.append(added)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Has links lead to where the files of the repository are on the site."""
    here = page.file.src_uri

    def led(link: re.Match[str]) -> str:
        path = posixpath.relpath(address(here, link[1]), posixpath.dirname(here) or ".")
        return f"]({path}{link[2] or ''})"

    return LINK.sub(led, markdown)


def address(page: str, link: str) -> str:
    """Where the site has what a page links to, as a page or file of the repository does."""
    inside = page.startswith(OTHERS)
    home = posixpath.dirname(page.removeprefix(OTHERS) if inside else f"docs/{page}")
    path = posixpath.normpath(posixpath.join(home, link))
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OTHERS}{path}"


def listing(kind: str) -> str:
    """The page that lists all of a kind."""
    rows = [f"| [`{name}`]({name}.md) | {first_line(name)} |" for name in KINDS[kind]]
    return "\n".join(
        [f"# {kind.title()}", "", ABOUT[kind], "", "| name | |", "| --- | --- |", *rows]
    )


def written(name: str) -> str:
    """The page of a primitive or a rule."""
    page = described(name)
    parts = [f"# {name}", fenced("python", page.call), *sections(page.doc)]
    parts += ["\n".join(f"- {fact}" for fact in page.facts)] if page.facts else []
    source = None
    for number, example in enumerate(page.examples, 1):
        count = f" {number}" if len(page.examples) > 1 else ""
        parts.append(f"## Example{count}{f': {example.about}' if example.about else ''}")
        if example.source != source:
            parts += ["This source", fenced("python", example.source)]
        source = example.source
        parts += ["with this schedule", fenced("python", example.schedule)]
        if example.diff:
            parts += ["changes these lines", fenced("diff", example.diff)]
        if example.printed:
            parts += ["prints", fenced("text", example.printed)]
    return "\n\n".join(parts) + "\n"


def sections(doc: str) -> list[str]:
    """A docstring as Markdown: what stands below `Rewrite:` is code, other sections are prose."""
    doc = re.sub(r"^(Shapes|Numerics|State|Raises): (.+)$", r"**\1:** \2\n", doc, flags=re.M)
    parts = []
    for part in re.split(r"\n\n(?=[A-Z]\w*:\n)", doc):
        title, _, rest = part.partition("\n")
        if not re.fullmatch(r"[A-Z]\w*:", title):
            parts.append(part)
            continue
        body, _, after = re.split(r"(\n\n(?=\S)|\Z)", rest, maxsplit=1)
        body = textwrap.dedent(body)
        parts += [f"**{title}**", fenced("text", body) if title == "Rewrite:" else body]
        parts += [after] if after else []
    return parts


def fenced(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.rstrip()}\n```"
