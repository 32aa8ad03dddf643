"""Sphinx's settings: the Markdown pages of this folder and the docstrings of the public names become a site.

`make docs` builds it in build/docs, and every warning is an error: a link or an anchor that leads nowhere, a page in no
table of contents, a docstring that does not parse, a public name that no page describes.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in (".", "compiler", "scheduler", "protos"))]

import actorflow  # noqa: E402

project = "actorflow"
author = "the authors of actorflow"
release = version = actorflow.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "command_examples", "public_names"]
source_suffix = {".md": "markdown"}
root_doc = "index"
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!actorflow\.\w+$).*")]  # types in signatures: Python's, torch's and inner ones
smartquotes = False  # commands and names are copied from these pages

myst_heading_anchors = 4  # as GitHub makes them

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_title = f"actorflow {release}"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
