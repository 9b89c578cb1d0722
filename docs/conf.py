"""Configuration of the site, which `make docs` builds with Sphinx.

Pages are the Markdown files of this folder, which GitHub shows as well, and the notebooks with
their saved outputs. Links to files that are no pages lead to the repository.
"""

import configparser
import importlib.metadata
import inspect
import pathlib
import pkgutil
import re
import shutil

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
_SETUP = configparser.ConfigParser()
_SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
REPOSITORY = _SETUP["metadata"]["url"]
# Sphinx reads files of its own folder only.
shutil.rmtree(DOCS / "notebooks", ignore_errors=True)
shutil.copytree(ROOT / "notebooks", DOCS / "notebooks")
# The pages of modules that have been moved or removed.
for page in DOCS.glob("api/*.rst"):
    if f"   {page.stem}\n" not in (DOCS / "api.rst").read_text():
        page.unlink()

project = "Podracers"
author = "The Podracers contributors"
release = importlib.metadata.version("podracers")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_templates"]
templates_path = ["_templates"]
root_doc = "index"

nb_execution_mode = "off"
myst_heading_anchors = 4
nitpicky = True
# Annotations name classes of other packages and of modules that have no page.
nitpick_ignore_regex = [("py:(class|obj)", ".*"), ("py:exc", r"Stopped|pipeline\.WorkerError")]

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
napoleon_use_ivar = True
strip_signature_backslash = True  # an underscore at the end of an argument's name is shown

html_theme = "sphinx_book_theme"
html_title = project
html_theme_options = {
    "repository_url": REPOSITORY,
    "use_repository_button": True,
    "use_issues_button": True,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the sidebar has a search already
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False


def _site_links(folder: pathlib.Path, text: str) -> str:
    """Returns the text of a page with links as the site has them.

    Args:
      folder: folder of the page in the repository, to which its links are relative.
      text: Markdown, or the JSON of a notebook.
    """

    def place(match: re.Match) -> str:
        name, _, anchor = match[2].partition("#")
        path = (folder / name).resolve()
        if not name or not path.exists():
            return match[0]
        path = path.relative_to(ROOT)
        return match[1] + _address(path) + (f"#{anchor}" if anchor else "")

    return re.sub(r'(\]\(|(?:src|href)=\\?")(?![a-z]+:)([^)\s"\\]+)', place, text)


def _address(path: pathlib.Path) -> str:
    """Returns the address on the site of a page or picture, or else the one in the repository."""
    if path == pathlib.Path("README.md"):
        return "/index.md"
    if path.suffix == ".ipynb":
        return f"/{path}"
    if path.parts[0] == "docs" and path.suffix in {".md", ".png", ".jpg", ".svg", ".gif"}:
        return f"/{path.relative_to('docs')}"
    return f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"


def _read_page(app, docname, source):
    folder = ROOT if docname.startswith("notebooks/") else DOCS
    source[0] = _site_links((folder / docname).parent, source[0])


def _read_included(app, relative_path, parent_docname, content):
    content[0] = _site_links((DOCS / relative_path).resolve().parent, content[0])


def _translate(app, what, name, documented, options, lines):
    """Translates a docstring into reStructuredText, before its sections are.

    Backticks are code, and so is an indented block below a colon and an empty line. A field of a
    NamedTuple is described by the comment behind it.
    """
    text = "\n".join(lines)
    if text.startswith("Alias for field number"):
        owner, _, field = name.rpartition(".")
        source = inspect.getsource(pkgutil.resolve_name(owner))
        text = re.search(rf"^ +{field}: [^#\n]*(?:# *(.*))?$", source, re.M)[1] or ""
        text = re.sub(r"^\[.*?\]", r"`\g<0>`", text)  # the shape
    text = re.sub(r"(?<![`:])`([^`]+)`(?!`)", r"``\1``", text)
    text = re.sub(r"^( *)(\S.*[^:]):\n\n(?=\1 +\S)", r"\1\2::\n\n", text, flags=re.M)
    lines[:] = text.split("\n")


def _name_defaults(app, what, name, documented, options, signature, return_annotation):
    """Writes functions and factories that are defaults as code."""
    if not signature:
        return None
    signature = re.sub(r"<function (?:\S+\.)?(\w+)(?: at 0x\w+)?>", r"\1", signature)
    return signature.replace("<factory>", "..."), return_annotation


def _resolve_short_name(app, env, node, contnode):
    """Resolves names as code writes them, such as `errors.UserError`."""
    if node.get("refdomain") != "py" or node.get("refspecific"):
        return None
    node["refspecific"] = True
    place = (node["refdoc"], app.builder, node["reftype"], node["reftarget"])
    return env.domains["py"].resolve_xref(env, *place, node, contnode)


def setup(app):
    """Connects the functions above with Sphinx."""
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
    app.connect("autodoc-process-docstring", _translate, priority=400)
    app.connect("autodoc-process-signature", _name_defaults)
    app.connect("missing-reference", _resolve_short_name)
