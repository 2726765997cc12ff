"""What mkdocs.yml cannot say: three pages that lie above docs/, links that lead out of docs/, and
checks that lists are lists and that the built site loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
ABOVE = {
    REPOSITORY / "README.md": "OVERVIEW.md",
    REPOSITORY / "CHANGELOG.md": "CHANGELOG.md",
    REPOSITORY / "CONTRIBUTING.md": "CONTRIBUTING.md",
}
"""MkDocs takes every README.md for the first page of its folder, which index.md is here."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
NO_LIST = re.compile(r"(?:\n|<p>)((?:[-*]|\d+\.) .*)")
LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|url\(["']?((?:https?:)?//[^"')]+)"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, name in ABOVE.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links are written for a code host. A link to what is no page becomes plain text; one that
    leads nowhere stays, so that MkDocs complains of it."""
    folder = DOCS if page.file.generated_by is None else REPOSITORY

    def rewritten(link: re.Match[str]) -> str:
        text, path, anchor = link.groups(default="")
        target = Path(os.path.normpath(folder / path))
        if "://" in path or not target.exists():
            return link[0]
        if target in ABOVE:
            return f"[{text}]({ABOVE[target]}{anchor})"
        if target.is_relative_to(DOCS):
            return f"[{text}]({target.relative_to(DOCS)}{anchor})"
        return text

    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """In cells a code host takes ``\\|`` for ``|``, in code as well; here MkDocs does not. Raises
    PluginError where a list is none, for want of four spaces or of an empty line before it."""
    if found := NO_LIST.search(re.sub(r"<pre.*?</pre>", "", html, flags=re.DOTALL)):
        raise PluginError(f"{page.file.src_uri}: this is no item of a list: {found[1]}")
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


def on_post_build(config: MkDocsConfig) -> None:
    """Raises PluginError where a page or a style would load something from elsewhere."""
    for path in Path(config.site_dir).rglob("*"):
        if path.suffix in (".html", ".css") and (found := LOADED.search(path.read_text())):
            raise PluginError(f"{path.name} loads {found[1] or found[2]}")
