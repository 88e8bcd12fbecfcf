"""The colors of curves and of compared runs."""

from __future__ import annotations

# The variables --c0 to --c7 of page.css. They were searched for: any two are far apart (36 and more in CIELAB) for
# everybody, also without red, green or blue cones.
PALETTE = 8
GOLDEN_ANGLE = 137.508  # degrees: successive multiples of it never meet on the color wheel


def color(index: int) -> str:
    """The CSS color of the run or curve with this index, different for each."""
    if index < PALETTE:
        return f"var(--c{index})"
    return f"hsl({index * GOLDEN_ANGLE % 360:.1f} 50% 50%)"
