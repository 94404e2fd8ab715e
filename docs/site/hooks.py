"""Hooks of MkDocs: generated pages, pages that are files of the repository, and links to files that are no pages.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages of the site. All links are written for readers of the repository.
In the site, a link to a page is a link, and a link to any other file shows the file's path. The logo is the console's.
"""

import logging
import posixpath
import re
from pathlib import Path

import api_reference
import benchmark_results
import cli_reference
import settings_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[2]
_DOCS = "docs"
# The file in the repository -> the page of the site.
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_FILES = {page: file for file, page in _PAGES.items()}
# A link in README.md -> the page of the site that says more. The repository has no such file.
_BETTER_TARGETS = {"docs/serving.md#which-request-fields-are-supported": "reference/api.md"}
_LOGO = _ROOT / "api" / "slora_api" / "console" / "static" / "icon.svg"
# Python-Markdown leaves the addresses in HTML as they are.
_IMAGE_IN_HTML = re.compile(r'(?<=\s)(src|srcset)="([^":]+)"')
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]+)\)")
# GitHub needs `\\|` for a bar inside code in a table. Python-Markdown would show the backslash.
_BAR_IN_TABLE = re.compile(r"(?<=^\|)[^\n]*\\\|[^\n]*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]+`")
_FROM_OTHER_SERVERS = re.compile(
    r'<(?:img|script|source|iframe|video)\b[^>]*\ssrc(?:set)?="(?:https?:)?//[^>]*>'
    r'|<link\b(?![^>]*\srel="canonical")[^>]*\shref="(?:https?:)?//[^>]*>'
)
# Browsers would break a line after one of the hyphens.
_FLAG = re.compile(r"(<code\b[^>]*>)(--[\w-]+)")
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
# MkDocs counts the warnings of its own loggers, and `--strict` ends the build for them.
_log = logging.getLogger("mkdocs.hooks.slora")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {page: (_ROOT / file).read_text(encoding="utf-8") for file, page in _PAGES.items()}
    pages |= {f"reference/{page}": content for page, content in api_reference.make_pages().items()}
    pages["reference/cli.md"] = cli_reference.make_page()
    pages["reference/settings.md"] = settings_reference.make_page()
    pages["benchmark-results.md"] = benchmark_results.make_page()
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, config.theme["logo"], abs_src_path=str(_LOGO)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces the links of the repository by those of the site, outside code blocks."""
    source = _FILES.get(page.file.src_uri) or f"{_DOCS}/{page.file.src_uri}"
    parts = _FENCE.split(markdown)
    parts[::2] = [
        _LINK.sub(lambda link: _replace_link(link, source, page, files), part) for part in parts[::2]
    ]
    parts[::2] = [
        _IMAGE_IN_HTML.sub(lambda image: _replace_image(image, source, page, files), part)
        for part in parts[::2]
    ]
    parts[::2] = [_BAR_IN_TABLE.sub(_unescape_bars, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _FLAG.sub(r'\1<span class="flag">\2</span>', html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    for tag in _FROM_OTHER_SERVERS.findall(output):
        _log.warning("%s would load from another server: %s", page.file.src_uri, tag)
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)  # the theme's has no name


def _unescape_bars(row: re.Match[str]) -> str:
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def _replace_image(image: re.Match[str], source: str, page: Page, files: Files) -> str:
    attribute, target = image.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    file = files.get_file_from_path(posixpath.relpath(path, _DOCS))
    if file is None:
        _log.warning("%s has an image %r, which is not a file of %s", source, target, _DOCS)
        return image[0]
    return f'{attribute}="{file.url_relative_to(page.file)}"'


def _replace_link(link: re.Match[str], source: str, page: Page, files: Files) -> str:
    mark, text, target = link.groups()
    if source == "README.md" and target in _BETTER_TARGETS:
        return f"{mark}[{text}]({_BETTER_TARGETS[target]})"
    place, hash_mark, anchor = target.partition("#")
    if ":" in target or not place:
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), place))
    uri = _PAGES.get(path) or posixpath.relpath(path, _DOCS)
    if files.get_file_from_path(uri):
        folder = posixpath.dirname(page.file.src_uri)
        return f"{mark}[{text}]({posixpath.relpath(uri, folder or '.')}{hash_mark}{anchor})"
    if not (_ROOT / path).exists():
        _log.warning("%s has a link to %r, which does not exist", source, target)
    return f'<span title="{path}">{text}</span>'
