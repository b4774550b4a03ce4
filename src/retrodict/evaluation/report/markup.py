"""Escaped pieces of HTML: tables, figures, lists."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isfinite
from typing import NamedTuple

__all__ = ["Cell", "bullets", "cards", "code", "escape", "figure", "figures", "number", "table"]


class Cell(NamedTuple):
    """A table cell: HTML that needs no escaping, and a CSS class."""

    html: str
    css_class: str = ""


def number(value: float, digits: int = 3) -> Cell:
    """Format a number, aligned to the right."""
    if isinstance(value, int):
        return Cell(f"{value:,}", "number")
    return Cell(f"{value:.{digits}g}" if isfinite(value) else "–", "number")


def code(text: object) -> Cell:
    """Format a name from the user's code."""
    return Cell(f"<code>{escape(str(text))}</code>")


def table(header: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> str:
    """Make a table that scrolls where the page is too narrow for it."""
    cells = [[c if isinstance(c, Cell) else Cell(escape(c)) for c in row] for row in rows]
    classes = [cell.css_class for cell in cells[0]] if cells else [""] * len(header)
    titles = "".join(
        f"<th scope='col'{_class('number' if name == 'number' else '')}>{escape(title)}</th>"
        for title, name in zip(header, classes, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + f"<th scope='row'>{row[0].html}</th>"
        + "".join(f"<td{_class(cell.css_class)}>{cell.html}</td>" for cell in row[1:])
        + "</tr>"
        for row in cells
    )
    return (
        f"<div class='scroll' tabindex='0'><table><thead><tr>{titles}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def _class(name: str) -> str:
    return f" class='{name}'" if name else ""


def cards(values: Mapping[str, str]) -> str:
    """Make a row of cards, each a value with its label."""
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in values.items()
    )
    return f"<dl class='cards'>{items}</dl>"


def figure(svg: str, caption: str, css_class: str = "") -> str:
    """Make a figure; the caption is HTML."""
    content = f"<div class='{css_class}' tabindex='0'>{svg}</div>" if css_class else svg
    return f"<figure>{content}<figcaption>{caption}</figcaption></figure>"


def figures(items: Iterable[str]) -> str:
    """Place figures side by side, as many as fit."""
    return f"<div class='figures'>{''.join(items)}</div>"


def bullets(items: Iterable[str]) -> str:
    """Make a list; nothing if it is empty."""
    content = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{content}</ul>" if content else ""
