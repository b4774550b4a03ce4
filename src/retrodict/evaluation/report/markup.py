"""Text and numbers in; escaped pieces of HTML out."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isfinite
from typing import NamedTuple

__all__ = ["Cell", "bullets", "cards", "code", "escape", "figure", "figures", "number", "table"]


class Cell(NamedTuple):
    """A cell of a table that is HTML already, with a class."""

    html: str
    kind: str = ""


def number(value: float, digits: int = 3) -> Cell:
    """A number, aligned to the right."""
    if isinstance(value, int):
        return Cell(f"{value:,}", "number")
    return Cell(f"{value:.{digits}g}" if isfinite(value) else "–", "number")


def code(text: object) -> Cell:
    """Names from the user's own code."""
    return Cell(f"<code>{escape(str(text))}</code>")


def table(head: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> str:
    """A table that scrolls by itself if the page is too narrow for it."""
    cells = [[c if isinstance(c, Cell) else Cell(escape(c)) for c in row] for row in rows]
    kinds = [cell.kind for cell in cells[0]] if cells else [""] * len(head)
    titles = "".join(
        f"<th scope='col'{_kind('number' if kind == 'number' else '')}>{escape(title)}</th>"
        for title, kind in zip(head, kinds, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + f"<th scope='row'>{row[0].html}</th>"
        + "".join(f"<td{_kind(cell.kind)}>{cell.html}</td>" for cell in row[1:])
        + "</tr>"
        for row in cells
    )
    return (
        f"<div class='scroll' tabindex='0'><table><thead><tr>{titles}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def _kind(kind: str) -> str:
    return f" class='{kind}'" if kind else ""


def cards(facts: Mapping[str, str]) -> str:
    """A few numbers that matter, each with what it is."""
    inside = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>"
        for what, value in facts.items()
    )
    return f"<dl class='cards'>{inside}</dl>"


def figure(svg: str, caption: str, kind: str = "") -> str:
    """A picture with what is to be seen in it; the caption is HTML."""
    inside = f"<div class='{kind}' tabindex='0'>{svg}</div>" if kind else svg
    return f"<figure>{inside}<figcaption>{caption}</figcaption></figure>"


def figures(items: Iterable[str]) -> str:
    """Figures side by side, as many as there is room for."""
    return f"<div class='figures'>{''.join(items)}</div>"


def bullets(items: Iterable[str]) -> str:
    """A list; nothing if it is empty."""
    inside = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{inside}</ul>" if inside else ""
