"""A drawing in; its layout on a page and the text or bytes of a picture out.

Read in the order drawing, labels, bezier, page; then the layout from the inside out, which is
plates, grid, order, columns, routes, layout; then the writers, which are ink, dot, svg, png.
"""
