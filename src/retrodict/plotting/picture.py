"""A drawing goes in; a picture comes out, as SVG, PNG or DOT text.

Drawn as in figures 2 to 4 of the paper: latent variables are white circles, observed ones grey,
factors squares, plates boxes. There is one layout, our own (for larger drawings that of the `dot`
binary, where there is one), and a writer for each format over it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from retrodict.plotting.diagram.dot import dot_text, from_dot, suits_dot
from retrodict.plotting.diagram.drawing import Box, Drawing, Edge, Node
from retrodict.plotting.diagram.layout import layered
from retrodict.plotting.diagram.page import Layout
from retrodict.plotting.diagram.svg import svg

__all__ = ["Box", "Drawing", "Edge", "Node", "Picture"]


class Picture:
    """A drawing on a page: shows in a notebook; `save("x.svg")`, also `.png` and `.dot`."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing

    @cached_property
    def layout(self) -> Layout:
        """Where everything stands."""
        found = from_dot(self.drawing) if suits_dot(self.drawing) else None
        return found or layered(self.drawing)

    def save(self, path: str | Path) -> Path:
        """Write the picture in the format that the suffix names; gives the path back."""
        path = Path(path)
        writers: dict[str, Callable[[], str | bytes]]
        writers = {".svg": self.to_svg, ".png": self.to_png, ".dot": self.to_dot}
        write = writers.get(path.suffix.lower())
        if write is None:
            known = ", ".join(writers)
            raise ValueError(f"cannot draw {path.name!r}: its suffix must be one of {known}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot save {path.name!r}: there is no folder {path.parent}")
        content = write()
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def to_svg(self) -> str:
        """The picture as a self-contained SVG document."""
        return svg(self.drawing, self.layout)

    def to_png(self) -> bytes:
        """The picture as a PNG file."""
        # Matplotlib takes a second to import, which no one but the reader of a PNG should wait for.
        from retrodict.plotting.diagram.png import png

        return png(self.drawing, self.layout)

    def to_dot(self) -> str:
        """The drawing in Graphviz's language; places are left to whoever reads it."""
        return dot_text(self.drawing)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __repr__(self) -> str:
        return f"Picture({len(self.drawing.nodes)} nodes, {len(self.drawing.edges)} edges)"
