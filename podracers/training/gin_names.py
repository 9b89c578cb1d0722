"""Places of .gin files, and the parts that they may name; nothing is imported."""

import ast
import functools
import importlib.util
import os
import pathlib
import re

from podracers import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "podracers"  # holds `gin`, in a checkout and where the project is installed
# Folders that are searched for gin files, in this order.
FOLDERS = ("", *map(str, (SHIPPED, SHIPPED / "gin", SHIPPED / "gin" / "experiments", ROOT)))
PACKAGES = ("agents", "environments", "podracers")


def find(path: str) -> str:
    """Returns where a gin file is; raises `errors.UserError` with the nearest names.

    Paths are relative to the working directory, the repository, its `gin` or `gin/experiments`.
    """
    for folder in FOLDERS:
        if os.path.isfile(file := os.path.join(folder, path)):
            return file
    # `name` and `experiments/name` are compared with the names that they could stand for.
    prefix = {0: "gin/experiments/", 1: "gin/"}.get(path.count("/"), "")
    files = (file.relative_to(SHIPPED).as_posix() for file in SHIPPED.glob("gin/**/*.gin"))
    near = errors.nearest(path, {file.removeprefix(prefix) for file in files})
    raise errors.UserError(f"there is no gin file '{path}'{near}")


def experiments() -> dict[str, str]:
    """Returns the first clause of each experiment's comment, by the file's name."""
    lines = {}
    for file in sorted((SHIPPED / "gin" / "experiments").glob("*.gin")):
        comment = re.split(r"^(?!# )", file.read_text("utf-8"), maxsplit=1, flags=re.MULTILINE)[0]
        text = re.sub(r"\s*(^|\n)# ", " ", comment).strip()
        lines[file.name] = re.split(r"[.:;,] | \(", f"{text} ")[0]
    return lines


@functools.cache
def parts() -> dict[str, list[str]]:
    """Returns the public classes and functions of every module of this project, by dotted name.

    Sources are parsed, not imported. A package stands for the modules whose names it re-exports.
    """
    names_by_module, within_packages = {}, set()
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        body = ast.parse(path.read_bytes()).body
        if path.stem != "__init__":
            public = (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef))
            names = [part.name for part in public if not part.name.startswith("_")]
            names_by_module[f"{package}.{path.stem}"] = names
        elif exports := [
            node
            for node in body
            if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith(f"{package}.")
        ]:
            names_by_module[package] = [alias.name for node in exports for alias in node.names]
            within_packages |= {node.module for node in exports}
    return {name: names for name, names in names_by_module.items() if name not in within_packages}


def is_own(module: str) -> bool:
    """Returns whether a module that .gin files import belongs to this project, or to gin."""
    return module.partition(".")[0] in (*PACKAGES, "__gin__")


def nearest_part(name: str) -> str:
    """Returns the end of a message on the unknown part `module.Name`, or `Name` alone."""
    modules = [(path.rpartition(".")[2], names) for path, names in parts().items()]
    known = {f"{module}.{part}" if "." in name else part for module, ps in modules for part in ps}
    if name in known:
        imports = "`from __gin__ import dynamic_registration` and its import"
        return hiding() or f"; expected {imports} above"
    return errors.nearest(name, known)


def nearest_module(name: str) -> str:
    """Returns the end of a message on a module that cannot be found."""
    place = " (is it in the working directory or on PYTHONPATH?)"
    return hiding() or errors.nearest(name, parts()) if is_own(name) else place


def hiding() -> str:
    """Returns the end of a message on a user's module that hides a package; empty if none does."""
    for package in PACKAGES:
        if (spec := importlib.util.find_spec(package)) is None:
            continue
        first, *_ = spec.submodule_search_locations or [spec.origin or ""]
        if pathlib.Path(first).resolve() != ROOT / package:
            return f"; '{first}' hides this project's package '{package}': rename it"
    return ""
