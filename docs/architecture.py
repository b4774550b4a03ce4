"""Draw the import contract of pyproject.toml: `python docs/architecture.py`.

Writes `docs/pictures/architecture.svg`. A solid arrow points from a package to the next lower layer
of the contract, a dashed one shows an exception that the contract lists under `ignore_imports`.
"""

import re
import tomllib
from itertools import pairwise
from pathlib import Path

from retrodict.plotting.diagram.elements import Diagram, DiagramEdge, DiagramNode
from retrodict.plotting.picture import Picture

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"


def import_contract() -> dict:
    """Return the layers contract of import-linter."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (contract,) = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    return contract


def contract_layers(contract: dict) -> list[list[str]]:
    """Return the names of the packages and modules of each layer, from top to bottom."""
    return [re.split(r"\s*\|\s*", layer) for layer in contract["layers"]]


def contract_diagram(contract: dict) -> Diagram:
    """Return the layers as boxes, each with arrows to the layer below and to its exceptions."""
    layers = contract_layers(contract)
    nodes = tuple(DiagramNode(name, name, "factor") for layer in layers for name in layer)
    solid = [
        DiagramEdge(upper, lower)
        for upper_layer, lower_layer in pairwise(layers)
        for upper in upper_layer
        for lower in lower_layer
    ]
    # "retrodict.graph.graph -> retrodict.plotting.picture" is drawn as graph -> plotting.
    exceptions = [re.findall(r"retrodict\.(\w+)", line) for line in contract["ignore_imports"]]
    dashed = [DiagramEdge(a, b, "dashed") for a, b in dict.fromkeys(map(tuple, exceptions))]
    return Diagram(nodes, (*solid, *dashed), ())


if __name__ == "__main__":
    Picture(contract_diagram(import_contract())).save(PICTURE)
