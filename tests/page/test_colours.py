"""The colours of the families of causes: seen on the card they lie on, and told apart by colour-blind people.

Colour vision deficiencies by the matrices of Machado, Oliveira and Fernandes (2009, doi 10.1109/TVCG.2009.113),
severity 1.0, on linear RGB; differences in OKLab (Ottosson 2020), where 0.02 can about be noticed.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from whyspan import page

Colour = NDArray[np.float64]
STYLE = (Path(page.__file__).with_name("assets") / "style.css").read_text()
FAMILIES = ("cpu", "memory", "io", "lock", "python", "net", "client", "engine", "pools", "observer", "gpu")
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
#: Least difference of two families.
LEAST = 0.06
#: WCAG 2.2, 1.4.11: what is not text.
CONTRAST = 3.0


def blocks() -> dict[str, dict[str, str]]:
    """Return the custom properties by scheme; ``dark`` and ``chosen dark`` stand in the sheet twice."""
    found = re.findall(
        r":root(\[data-theme=\"dark\"\]|:not\(\[data-theme=\"light\"\]\))? \{(.*?)\}", STYLE, re.S
    )
    named = {"": "light", '[data-theme="dark"]': "chosen dark", ':not([data-theme="light"])': "dark"}
    return {named[how]: dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", body)) for how, body in found}


def linear(colour: str) -> Colour:
    """Return linear RGB, 0..1."""
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def oklab(rgb: Colour) -> Colour:
    """Return OKLab of linear RGB."""
    return np.asarray(_TO_LAB @ np.cbrt(np.clip(_TO_LMS @ np.clip(rgb, 0, 1), 0, None)))


def contrast(a: str, b: str) -> float:
    """Return WCAG's contrast ratio."""
    light = [float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (a, b)]
    return max(light) / min(light)


def test_both_dark_schemes_are_the_same() -> None:
    found = blocks()
    assert found["dark"] == found["chosen dark"]
    assert found["light"].keys() == found["dark"].keys()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_seen_on_the_card(scheme: str) -> None:
    colours = blocks()[scheme]
    low = {f: contrast(colours[f"--c-{f}"], colours["--card"]) for f in (*FAMILIES, "unknown")}
    assert {f: c for f, c in low.items() if c < CONTRAST} == {}


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_told_apart(scheme: str, vision: str) -> None:
    colours = blocks()[scheme]
    seen = {f: oklab(VISIONS[vision] @ linear(colours[f"--c-{f}"])) for f in FAMILIES}
    near = {
        (a, b): round(float(np.linalg.norm(seen[a] - seen[b])), 3)
        for a, b in itertools.combinations(FAMILIES, 2)
        if np.linalg.norm(seen[a] - seen[b]) < LEAST
    }
    assert near == {}
