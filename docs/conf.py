"""The documentation as a site: `make docs` builds it into build/docs; no network, no warnings."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extension"), str(HERE.parent / "src")]

from preimage import __version__  # noqa: E402  # from these sources, wherever another one is installed

project = "preimage"
author = "The preimage authors"
copyright = "the preimage authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "accessible", "command_pages", "pictures", "public_names"]
exclude_patterns = ["extension", "static", "results/raw"]
nitpicky = True

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

# Signatures say types in the short names that people type; what they stand for is in the text of a docstring.
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
# Types are links where they are on the site, and plain words where they belong to torch or to our inside.
nitpick_ignore_regex = [("py:.*", r"(?!preimage\.\w+$).*"), ("py:mod", ".*")]

html_theme = "furo"
html_title = f"preimage {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c8e", "color-brand-content": "#0b5c8e"},
    "dark_css_variables": {"color-brand-primary": "#7fc4f0", "color-brand-content": "#7fc4f0"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
