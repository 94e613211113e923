"""XML from servers: small documents without a document type, whatever a hostile server sends."""

from __future__ import annotations

import re
from typing import NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

MOST_BYTES = 16 * 2**20
# A page of a list has at most 5000 entries (Azure) with some 30 elements each.
_MOST_ELEMENTS = 300_000
_MOST_DEPTH = 16
# Elements have one or two attributes; a tag of megabytes would become a dictionary of gigabytes.
_LONG_TAG = re.compile(rb"<[^>]{4096}")


def parse(body: bytes) -> Element:
    """Return the root of a document. Names of elements are without their namespace.

    Raises:
        ValueError: it is no XML, or has a document type (which could define entities), or is too
            large or too deep.
    """
    if len(body) > MOST_BYTES:
        raise ValueError(f"has more than {MOST_BYTES} bytes")
    if _LONG_TAG.search(body):
        raise ValueError("has a tag of more than 4096 bytes")
    builder = TreeBuilder()
    parser = expat.ParserCreate(namespace_separator="}")
    bare = _BareNames()
    count = depth = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal count, depth
        count, depth = count + 1, depth + 1
        if count > _MOST_ELEMENTS or depth > _MOST_DEPTH:
            raise ValueError(f"has more than {_MOST_ELEMENTS} elements, or they are nested deeper than {_MOST_DEPTH}")
        builder.start(bare[name], {bare[key]: value for key, value in attributes.items()} if attributes else {})

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(bare[name])

    def refuse(*_: object) -> NoReturn:
        raise ValueError("has a document type, which no server needs")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    parser.buffer_text = True
    try:
        parser.Parse(body, True)
    except expat.ExpatError as error:
        raise ValueError(f"is no XML: {error}") from None
    return builder.close()


def text_of(element: Element, path: str, default: str = "") -> str:
    """Return the text of the element at ``path``, or ``default`` if there is none."""
    return element.findtext(path) or default


class _BareNames(dict[str, str]):
    """Names without their namespaces. A document has few, and each of them often."""

    def __missing__(self, name: str) -> str:
        self[name] = bare = name.rpartition("}")[2]
        return bare
