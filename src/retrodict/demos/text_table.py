"""Tables in plain text."""


def format_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Align the first column to the left and the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def format_line(cells: tuple[str, ...]) -> str:
        first, *rest = cells
        aligned = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        return "  ".join([first.ljust(widths[0]), *aligned]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([format_line(header), rule, *map(format_line, rows)])
