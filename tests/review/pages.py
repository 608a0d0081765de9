"""Reads the text of HTML pages, as far as tests need it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

EMPTY = {"meta", "link", "br", "img", "hr", "input"}


@dataclass
class Element:
    """An element: its attributes, and what stands in it."""

    tag: str
    attributes: dict[str, str | None]
    content: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its words, with one space between them."""
        return " ".join(self.raw.split())

    @property
    def raw(self) -> str:
        return "".join(x if isinstance(x, str) else x.raw for x in self.content)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def walk(self) -> Iterator[Element]:
        yield self
        for inner in self.content:
            if isinstance(inner, Element):
                yield from inner.walk()

    def all(self, tag: str = "", cls: str = "", **attributes: str) -> list[Element]:
        """The elements in it of a tag, a class, and these attributes."""
        return [
            each
            for each in self.walk()
            if tag in ("", each.tag)
            and (not cls or cls in each.classes)
            and all(each.attributes.get(k.strip("_")) == v for k, v in attributes.items())
        ]

    def one(self, tag: str = "", cls: str = "", **attributes: str) -> Element:
        (found,) = self.all(tag, cls, **attributes)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].content.append(element)
        if tag not in EMPTY:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.open[-1].content.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> ends something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].content.append(data)


def parsed(text: str) -> Element:
    """The page; every element in it has to be closed in order."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    (page,) = reader.open
    return page
