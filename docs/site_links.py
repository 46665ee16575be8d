"""What the links of the pages become on the site.

Pages link to files, as GitHub needs it. Here a link to a file that is no page leads to the source
on GitHub, a link to a known bug to its section, and one to a page that is not there is a warning.
Inventories of other projects cannot be downloaded where there is no network: `inventories.toml`
lists the names that docstrings use, and where they are documented.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from zlib import compress

from sphinx.application import Sphinx
from sphinx.util import logging

HERE = Path(__file__).parent
ROOT = HERE.parent
# Code, which has no links; or a link.
LINK = re.compile(r"(?s:^```.*?^```$)|`[^`\n]+`(?!\])|\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)", re.M)
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx."""
    app.connect("config-inited", inventories)
    app.connect("source-read", relink)
    app.connect("missing-reference", alias, priority=400)  # before intersphinx, which has 500
    return {"parallel_read_safe": True}


def relink(app: Sphinx, page: str, source: list[str]) -> None:
    """Rewrite the links and the anchors of a page."""
    home = (HERE / page).parent
    bugs = app.config.known_bugs

    def link(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        path, place = (home / match[1]).resolve(), match[2] or ""
        if not path.exists():
            logging.getLogger(__name__).warning("no file %s", match[1], location=page)
        if place[1:] in bugs:
            return f"]({place})"
        if path.suffix == ".md" and path.is_relative_to(HERE):
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        where = f"{app.config.source_repository}/{kind}/main/{path.relative_to(ROOT).as_posix()}"
        return f"]({where}{place})"

    source[0] = ANCHOR.sub(r"\n(\1)=", LINK.sub(link, source[0]))


def alias(app: Sphinx, env: object, node: Any, text: object) -> None:
    """Give a name its full form: docstrings and annotations use short ones."""
    node["reftarget"] = ALIASES.get(node["reftarget"], node["reftarget"])


ALIASES = {
    "pd.DataFrame": "pandas.DataFrame",
    "st.SearchStrategy": "hypothesis.strategies.SearchStrategy",
    "BackendError": "amp_fuzz.backends.base.BackendError",
    "MissingBackend": "amp_fuzz.backends.registry.MissingBackend",
    "StoreError": "amp_fuzz.records.outputs.StoreError",
    "Path": "pathlib.Path",
}


def inventories(app: Sphinx, _: object) -> None:
    """Write the inventory of each other project, and tell intersphinx."""
    folder = Path(app.doctreedir) / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    for name, listed in tomllib.loads((HERE / "inventories.toml").read_text()).items():
        url = listed.pop("url")
        lines = [
            f"{item} py:{role} 1 {page}#{item} -\n"
            for where, items in listed.items()
            for role, page in [where.split()]
            for item in items
        ]
        head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version:\n# zlib\n"
        path = folder / f"{name}.inv"
        path.write_bytes(head.encode() + compress("".join(lines).encode()))
        app.config.intersphinx_mapping[name] = (url, (str(path),))
