"""Of the site: `python -m sphinx -W -n notebooks FOLDER`. Lessons are shown with their stored results, not run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "site"))

import docstrings
import formulas
import pictures

import invfunc

project = "invfunc"
author = "invfunc developers"
release = version = invfunc.__version__
root_doc = "index"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "myst_nb"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

nb_execution_mode = "off"  # tests/test_notebooks.py runs them
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # what an argument may be, its text says
autodoc_member_order = "bysource"
autosummary_generate = False
python_use_unqualified_type_names = True
add_module_names = False
nitpick_ignore = [("py:exc", name) for name in ("KeyboardInterrupt",)]

html_math_renderer = "mathml"
html_theme = "furo"
pygments_dark_style = "monokai"
html_title = f"invfunc {release}"
html_static_path = ["site/_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def setup(app):
    app.connect("source-read", docstrings.listed)
    app.connect("autodoc-process-docstring", docstrings.as_rst)
    app.add_html_math_renderer("mathml", (formulas.inline, None), (formulas.displayed, None))
    app.add_directive("picture", pictures.Picture)
