"""Text tables for the terminal."""

from collections.abc import Sequence


def align_columns(lines: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Align the first column to the left, and the others to the right, or to the left if they are not `numbers`."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if not numbers:
        return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines)
    return "\n".join("  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]) for cells in lines)
