"""Hooks of mkdocs: add pages from outside docs/, and adapt links and tables that GitHub renders differently."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Page of the site -> its source in the checkout, where that is not docs/PAGE.
SOURCES = {"index.md": "README.md", "pages.md": "docs/README.md", "changelog.md": "CHANGELOG.md"}
PAGES = {source: page for page, source in SOURCES.items()}
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r'<picture>\s*<source[^>]* srcset="([^"]*)">\s*<img src="([^"]*)" alt="([^"]*)">\s*</picture>')
LINK = re.compile(r"\[([^][]*)\]\(([^()\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, source in SOURCES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # its section has no other page
    source = SOURCES.get(here, f"docs/{here}")
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else adapted(part, here, source) for part in parts)


def adapted(text: str, here: str, source: str) -> str:
    """Adapt Markdown outside fences. `here` is the page, `source` its file in the checkout."""
    text = PICTURE.sub(r"![\3](\2#only-light)![\3](\1#only-dark)", text)  # the theme's switch, not the system's
    text = re.sub(r"^\|.*\|$", lambda row: plain_bars(row[0]), text, flags=re.MULTILINE)
    return LINK.sub(
        lambda link: f"[{link[1]}]({target})" if (target := moved(link[2], here, source)) else link[1], text
    )


def plain_bars(row: str) -> str:
    """Return a row of a table with `a|b` instead of `a\\|b`: in code, Python-Markdown shows the backslash."""
    return re.sub(r"`[^`]*`", lambda span: span[0].replace("\\|", "|"), row)


def moved(target: str, here: str, source: str) -> str:
    """Return a link's target relative to the page; "" for a file of the checkout that is not on the site."""
    if re.match(r"[a-z]+:|#", target):
        return target
    path, mark, anchor = target.partition("#")
    file = normpath(str(PurePosixPath(source).parent / path))
    if file == "docs":
        file = "docs/README.md"
    page = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
    return relpath(page, str(PurePosixPath(here).parent)) + mark + anchor if page else ""
