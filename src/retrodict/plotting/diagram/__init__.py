"""Layout and rendering of small graph diagrams with nested or crossing boxes.

`elements` describes a diagram; `layout` describes its positions on a page. A layout is computed by
`layered_layout` (with `box_groups`, `layers`, `crossing_reduction`, `horizontal_coordinates` and
`edge_routing`) or by Graphviz (`dot`). `svg`, `png` and `dot` write the file formats.
"""
