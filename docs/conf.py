"""How Sphinx builds the pages; `make docs` runs it over the whole repository, warnings as errors.

The source folder is the repository, so README, recipes and docs link to each other, and to files of
the code, by the same relative paths as on the forge.
"""

project = "llamarl"
copyright = "the llamarl authors, Apache-2.0"
root_doc = "docs/index"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
include_patterns = ["*.md", "docs/**.md", "recipes/*/README.md"]
exclude_patterns = [".*", "docs/_build", "build", "dist", "runs", "outputs", "multirun"]
nitpicky = True  # a reference to nothing is an error

myst_fence_as_directive = ["mermaid", "math"]  # the forge draws the same fences
myst_heading_anchors = 4

html_theme = "furo"
html_title = "llamarl"
html_show_sphinx = False
html_copy_source = False
