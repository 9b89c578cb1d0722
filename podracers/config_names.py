"""Which gin files, modules and symbols there are, without importing anything."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("", str(ROOT))  # where gin files are looked for, in this order
PACKAGES = ("agents", "environments", "podracers")
_NOT_PARTS = {"NamedTuple", "Protocol", "Exception", "RuntimeError", "ValueError"}


def find_file(path: str) -> pathlib.Path | None:
    """Returns where a gin file is, or None."""
    found = (pathlib.Path(folder) / path for folder in FOLDERS)
    return next((candidate for candidate in found if candidate.is_file()), None)


def files() -> list[str]:
    """Returns the gin files of this project, relative to it."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("gin/**/*.gin"))


def modules() -> list[str]:
    """Returns `package.module` of every module of this project."""
    return [
        f"{package}.{path.stem}"
        for package in PACKAGES
        for path in sorted((ROOT / package).glob("*.py"))
        if path.stem != "__init__"
    ]


@functools.cache
def symbols() -> list[tuple[str, str, str]]:
    """Returns `(package, module, symbol)` of every public class and function that can be a part."""
    found = []
    for name in modules():
        package, module = name.split(".")
        for node in ast.parse((ROOT / package / f"{module}.py").read_text()).body:
            if _is_part(node):
                found.append((package, module, node.name))
    return found


def _is_part(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
        return False
    bases = getattr(node, "bases", [])
    return not any(isinstance(base, ast.Name) and base.id in _NOT_PARTS for base in bases)
