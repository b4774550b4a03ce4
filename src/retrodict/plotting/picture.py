"""Pictures of graphical models, as SVG, PNG or DOT.

The style follows figures 2 to 4 of Paige & Wood (2016): latent variables are white circles,
observed ones grey circles, factors squares and plates boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from retrodict.plotting.diagram.dot import dot_text
from retrodict.plotting.diagram.drawing import png_bytes, svg_document
from retrodict.plotting.diagram.elements import Diagram
from retrodict.plotting.diagram.layered_layout import layered_layout
from retrodict.plotting.diagram.layout import Layout


class Picture:
    """A picture of a diagram, displayed by notebooks and saved as SVG, PNG or DOT.

    Args:
        diagram: The nodes, edges and boxes to draw.

    Example:
        >>> from retrodict.plotting.diagram.elements import Diagram, DiagramEdge, DiagramNode
        >>> nodes = DiagramNode("x", "x", "latent"), DiagramNode("y", "y", "observed")
        >>> Picture(Diagram(nodes, (DiagramEdge("x", "y"),), ()))
        Picture(2 nodes, 1 edges)
    """

    def __init__(self, diagram: Diagram) -> None:
        self.diagram = diagram

    @cached_property
    def layout(self) -> Layout:
        """Positions of nodes, edges and boxes."""
        return layered_layout(self.diagram)

    def save(self, path: str | Path) -> Path:
        """Save the picture in the format of the file's suffix.

        Args:
            path: A file name that ends in `.svg`, `.png` or `.dot`.

        Returns:
            The path.

        Raises:
            ValueError: If the suffix is none of these.
            FileNotFoundError: If the folder does not exist.
        """
        path = Path(path)
        writers: dict[str, Callable[[], str | bytes]]
        writers = {".svg": self.to_svg, ".png": self.to_png, ".dot": self.to_dot}
        write = writers.get(path.suffix.lower())
        if write is None:
            suffixes = ", ".join(writers)
            raise ValueError(f"cannot save {path.name!r}: its suffix must be one of {suffixes}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot save {path.name!r}: there is no folder {path.parent}")
        content = write()
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def to_svg(self) -> str:
        """Return the picture as a self-contained SVG document."""
        return svg_document(self.diagram, self.layout)

    def to_png(self) -> bytes:
        """Return the picture as the content of a PNG file."""
        return png_bytes(self.diagram, self.layout)

    def to_dot(self) -> str:
        """Return the diagram in Graphviz's DOT language, without positions."""
        return dot_text(self.diagram)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __repr__(self) -> str:
        return f"Picture({len(self.diagram.nodes)} nodes, {len(self.diagram.edges)} edges)"
