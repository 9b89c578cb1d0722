"""Which gin files, modules and symbols there are, without importing anything."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "podracers"  # holds `gin`, in a checkout as well as where it was installed
# Where gin files are looked for, in this order.
FOLDERS = ("", *(str(SHIPPED / folder) for folder in ("", "gin", "gin/experiments")))
PACKAGES = ("agents", "environments", "podracers")
_NOT_PARTS = {"NamedTuple", "Protocol", "Exception", "RuntimeError", "ValueError"}


def find_file(path: str) -> pathlib.Path | None:
    """Returns where a gin file is, or None."""
    found = (pathlib.Path(folder) / path for folder in FOLDERS)
    return next((candidate for candidate in found if candidate.is_file()), None)


def files() -> list[str]:
    """Returns the gin files of this project, as `gin/experiments/catch_ppo.gin`."""
    paths = [*SHIPPED.glob("gin/*.gin"), *SHIPPED.glob("gin/*/*.gin")]
    return sorted(str(path.relative_to(SHIPPED)) for path in paths)


def modules() -> list[str]:
    """Returns the dotted names of all modules of this project by which .gin files import parts."""
    return sorted(_sources())


@functools.cache
def symbols() -> list[tuple[str, str, str]]:
    """Returns `(package, module, symbol)` of every public class and function that can be a part."""
    found = []
    for name, (_, parts) in sorted(_sources().items()):
        package, _, module = name.rpartition(".")
        found += [(package, module, part) for part in parts]
    return found


@functools.cache
def _sources() -> dict[str, tuple[pathlib.Path, list[str]]]:
    """Returns the file and the parts of each module.

    A package stands for the modules whose names it re-exports: there is one name for each part.
    """
    paths = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    found = {_dotted(path): (path, _parts(path)) for path in sorted(paths)}
    for path in [path for path in paths if path.stem == "__init__"]:
        package = _dotted(path)
        exported = _exported(path)
        if not exported:
            del found[package]
            continue
        found[package] = path, sorted(name for names in exported.values() for name in names)
        for module in exported:
            del found[module]
    return found


def _dotted(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _parts(path: pathlib.Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text()).body if _is_part(node)]


def _exported(path: pathlib.Path) -> dict[str, list[str]]:
    """Returns what a package re-exports, by the module of its own that defines it."""
    package = f"{_dotted(path)}."
    return {
        node.module: [alias.name for alias in node.names]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package)
    }


def _is_part(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
        return False
    bases = getattr(node, "bases", [])
    return not any(isinstance(base, ast.Name) and base.id in _NOT_PARTS for base in bases)
