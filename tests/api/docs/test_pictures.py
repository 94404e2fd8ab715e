"""The pictures in README.md, CONTRIBUTING.md and docs/ exist, are described in words, and load nothing."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.api.docs.code_block import ROOT, pages

MARKDOWN_IMAGE = re.compile(r"!\[([^]]*)\]\(([^()\s]+)\)")
HTML_IMAGE = re.compile(r"<(?:img|source)\b[^>]*>")
ATTRIBUTE = re.compile(r'\b(src|srcset|alt)="([^"]*)"')
SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS = sorted((ROOT / "docs" / "images").glob("*.svg"))
MAX_DRAWING_BYTES = 12_000


def read_images(page: Path) -> list[tuple[str, str | None]]:
    """The file and the alternative text of each image. The text is None for the `source` of a `picture`."""
    text = page.read_text(encoding="utf-8")
    images: list[tuple[str, str | None]] = [(file, alt) for alt, file in MARKDOWN_IMAGE.findall(text)]
    for tag in HTML_IMAGE.findall(text):
        attributes = dict(ATTRIBUTE.findall(tag))
        is_source = tag.startswith("<source")
        images.append(
            (attributes["srcset" if is_source else "src"], None if is_source else attributes.get("alt", ""))
        )
    return images


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_each_image_of_a_page_is_a_file_with_an_alternative_text(page: Path) -> None:
    images = read_images(page)
    assert [file for file, _ in images if not (page.parent / file).is_file()] == []
    assert [file for file, alt in images if alt == ""] == []


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.name)
def test_a_drawing_is_small_and_describes_itself(drawing: Path) -> None:
    root = ElementTree.parse(drawing).getroot()
    for tag in ("title", "desc"):
        element = root.find(SVG + tag)
        assert (
            element is not None
            and element.text
            and element.get("id") in root.get("aria-labelledby", "").split()
        )
    assert drawing.stat().st_size <= MAX_DRAWING_BYTES


@pytest.mark.parametrize(
    "file", [*DRAWINGS, ROOT / "docs" / "site" / "style.css"], ids=lambda file: file.name
)
def test_drawings_and_styles_load_nothing_from_other_servers(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"https?://\S+|@import|url\((?!#)[^)]*\)|<script|<image", text) == []
