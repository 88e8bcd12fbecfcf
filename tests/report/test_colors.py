"""The colors of curves can be told apart by everybody, in both schemes."""

from __future__ import annotations

import itertools
import math
import re
from importlib import resources

import pytest

from stepmark.report.templates import PALETTE

# Linear RGB without one kind of cones: Machado, Oliveira and Fernandes, "A physiologically-based model for simulation
# of color vision deficiency", 2009, severity 1.
VISION = {
    "complete": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
TOLD_APART = 30  # CIELAB; 2 is what one can just see side by side
CONTRAST = 3  # what WCAG asks of graphics


def linear(color: str) -> list[float]:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(color: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


def lab(rgb: list[float]) -> tuple[float, float, float]:
    red, green, blue = rgb
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (max(v, 0) ** (1 / 3) if v > 0.008856 else 7.787 * max(v, 0) + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def palettes() -> list[tuple[list[str], str]]:
    """The colors of the light and the dark scheme, each with the paper's color."""
    css = resources.files("stepmark.report").joinpath("assets", "page.css").read_text()
    light, dark = (part.split("}")[0] for part in css.split(":root")[1:3])
    found = []
    for part in (light, dark):
        colors = [match[1] for match in re.finditer(r"--c\d: (#\w{6})", part)]
        card = re.search(r"--card: (#\w{6})", part)
        assert card is not None
        found.append((colors, card[1]))
    return found


@pytest.mark.parametrize(("colors", "card"), palettes(), ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_curves_are_told_apart(colors: list[str], card: str, vision: str) -> None:
    assert len(colors) == PALETTE
    seen = [
        lab([sum(a * b for a, b in zip(row, linear(each), strict=True)) for row in VISION[vision]]) for each in colors
    ]
    assert min(math.dist(one, other) for one, other in itertools.combinations(seen, 2)) > TOLD_APART


@pytest.mark.parametrize(("colors", "card"), palettes(), ids=["light", "dark"])
def test_curves_stand_out_from_the_page(colors: list[str], card: str) -> None:
    for each in colors:
        dim, bright = sorted((luminance(each), luminance(card)))
        assert (bright + 0.05) / (dim + 0.05) >= CONTRAST, each
