"""Settings of the documentation site: `make docs` builds it with Sphinx from the Markdown pages of the project."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "sphinx")]
os.environ.setdefault("COLUMNS", "100")

project = "shardtune"
author = "The shardtune authors"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

# The sources are the project's own pages at their places, so that one link is right on the site and beside the code.
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "examples/**/README.md"]
exclude_patterns = [".*", "build", "runs", "outputs", "shardtune", "tests", "bench", "**/made", "docs/sphinx"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "source_pages",
    "generated",
    "docstrings",
]
source_suffix = {".md": "markdown"}
default_role = "literal"  # docstrings write names in single backticks

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "deflist", "strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_attr_annotations = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = "shardtune"
html_baseurl = os.environ.get("SHARDTUNE_DOCS_URL", "")
html_static_path = ["sphinx/static"]
html_css_files = ["site.css"]
html_extra_path = ["sphinx/root"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_favicon = "sphinx/static/icon.svg"
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_remove_prompts = True
pygments_style = "friendly"
pygments_dark_style = "monokai"
