"""The site: Sphinx, MyST and the PyData theme. `make docs` builds it, without a network.

Pages are written so that GitHub shows them too: plain Markdown, links to files. `site_links.py`
makes of these links what the site needs.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from site_links import ANCHOR  # noqa: E402

_project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
source_repository = _project["urls"]["Source"]
known_bugs = frozenset(
    bug for page in HERE.glob("findings/**/*.md") for bug in ANCHOR.findall(page.read_text())
)

project = "amp-fuzz"
author = "The amp_fuzz contributors"
project_copyright = author
version = release = _project["version"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_click",
    "site_docstrings",
    "site_links",
    "site_tables",
]
exclude_patterns = ["node_modules", "_templates"]
nitpicky = True
highlight_language = "none"  # an unmarked block is a shell's, or what a command prints
smartquotes = False  # "--backends" has two hyphens

# -- pages ----------------------------------------------------------------------------------------

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = [
    "myst.header",  # the text of an issue begins at the level that GitHub's form has
]

# -- docstrings: Google style, single backticks for names -----------------------------------------

default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_preprocess_types = False
nitpick_ignore_regex = [
    ("py:obj", ".*"),  # a name in backticks that no page has is shown as code
    ("py:class", r"amp_fuzz\..*|[A-Z]\w*"),  # a type that is not public: as code, too
]

# -- links ----------------------------------------------------------------------------------------

intersphinx_mapping: dict[str, tuple[str, tuple[str, ...]]] = {}  # filled from inventories.toml

# -- the theme ------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "amp-fuzz"
templates_path = ["_templates"]
html_theme_options = {
    "github_url": source_repository,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navigation_depth": 1,  # the toggles of the theme, below, have no name
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
html_copy_source = False
html_show_sourcelink = False
