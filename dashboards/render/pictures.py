"""A figure for paper: PNG at print resolution, SVG and PDF."""

from __future__ import annotations

import vl_convert

from dashboards.compose.content import Content
from dashboards.render.specification import VEGA_LITE, print_specification


def pictures_of(content: Content) -> dict[str, bytes]:
    """Return the printed figure by file suffix: ".png", ".svg" and ".pdf"; empty without panels."""
    if not content.rows:
        return {}
    svg = vl_convert.vegalite_to_svg(print_specification(content), vl_version=VEGA_LITE)
    return {
        ".png": vl_convert.svg_to_png(svg, ppi=200),
        ".svg": svg.encode(),
        ".pdf": vl_convert.svg_to_pdf(svg),
    }
