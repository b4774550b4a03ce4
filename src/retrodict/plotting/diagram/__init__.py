"""Layout and rendering of small graph diagrams with nested or crossing boxes.

`elements` describes a diagram; `layout` describes its positions. A layout is computed by
`layered_layout` (with `box_groups`, `layers`, `crossing_reduction`, `coordinates` and
`edge_routing`). `drawing` writes SVG and PNG, `dot` writes DOT.
"""
