"""Write SVG shapes and drawings; colours are CSS classes, so that drawings follow the page's light or dark theme."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def element(tag: str, attributes: Mapping[str, object], inside: str = "") -> str:
    """One element; ``inside`` is SVG already.  Attributes that are None are left out; ``_`` in names becomes ``-``."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}>{inside}</{tag}>" if inside else f"<{tag}{given}/>"


def number(value: object) -> str:
    """A float rounded to a tenth of a pixel, or the text of anything else."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def rect(x: float, y: float, width: float, height: float, **more: object) -> str:
    """A rectangle."""
    return element("rect", {"x": x, "y": y, "width": width, "height": height, **more})


def text(x: float, y: float, words: str, **more: object) -> str:
    """Words that begin at a point, or are placed at it as ``text_anchor`` says."""
    return element("text", {"x": x, "y": y, **more}, escape(words))


def path(d: str, **more: object) -> str:
    """A path; its style decides whether it is filled."""
    return element("path", {"d": d, **more})


def group(inside: str, title: str = "", **more: object) -> str:
    """A group of shapes; the title is their tooltip."""
    return element("g", more, (element("title", {}, escape(title)) if title else "") + inside)


def cut(words: str, width: float, per_letter: float = 6.6) -> str:
    """Shorten words to a width, with … in the middle."""
    most = max(3, int(width / per_letter))
    if len(words) <= most:
        return words
    return f"{words[: (most - 1) // 2]}…{words[len(words) - most // 2 :]}"


def drawing(inside: str, width: float, height: float, **more: object) -> str:
    """A whole drawing."""
    size = {"width": width, "height": height, "viewBox": f"0 0 {number(width)} {number(height)}"}
    return element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **more}, inside)
