"""Find the source of a Python candidate, and digest the candidate and its dependencies, without importing it."""

from __future__ import annotations

import ast
import hashlib
import site
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path

from autosel import files, resources
from autosel.errors import BuildError

MOST_SOURCE_BYTES = 16 << 20
MOST_MODULE_BYTES = 4 << 30  # compiled modules contain kernels for many GPUs
TRITON_KERNELS = "autosel.triton_kernels"  # a package whose modules are in kernels/triton/


def find_source(module: str, path: str = "") -> Path | None:
    """Return the file that `import module` would load with the folder `path` first; None if there is none."""
    if module.startswith(f"{TRITON_KERNELS}."):
        file = resources.kernels() / "triton" / f"{module.removeprefix(f'{TRITON_KERNELS}.')}.py"
        return file if file.is_file() else None
    top, *inner = module.split(".")
    found = _top_level(top, path)
    for part in inner:
        if found is None or found.submodule_search_locations is None:
            return None
        # Search by the last name: for the full name, a folder without __init__.py needs its parent, which is not
        # imported.
        found = PathFinder.find_spec(part, list(found.submodule_search_locations))
    if found is None or not found.has_location or found.origin is None:
        return None
    return Path(found.origin)


def _top_level(name: str, path: str) -> ModuleSpec | None:
    if path:
        found = PathFinder.find_spec(name, [path])
        if found is not None:
            return found
    try:
        return find_spec(name)  # for a name without dots this imports nothing
    except (ValueError, ModuleNotFoundError):  # __main__, or a module that a user put into sys.modules
        return PathFinder.find_spec(name, sys.path)


def module_digest(module: str, path: str = "") -> str:
    """Return a sha256 over the module's file and, transitively, its imports from the same package.

    The package is the folder `path` or, for an installed module, its distribution. Other installed distributions count
    by name and version; PyTorch is left to `arms.torch_identity`. A compiled module counts by its bytes.

    Raises BuildError if the module does not exist.
    """
    first = _file(module, path)
    root = Path(path) if path else _package_root(module, first)
    todo, seen, libraries = [(module, first)], dict[Path, bytes](), set[str]()
    while todo:
        name, file = todo.pop()
        if file in seen:
            continue
        seen[file] = files.read(file, MOST_MODULE_BYTES)
        for imported, where in _imports(name, file, path):
            if _is_own(where, root, first):
                todo.append((imported, where))
            else:
                libraries |= _distributions(where)
    hasher = hashlib.sha256()
    for file in sorted(seen):
        hasher.update(str(file.relative_to(root)).encode() + b"\0" + seen[file] + b"\0")
    for name in sorted(libraries - {"torch"}):
        hasher.update(f"{name}=={metadata.version(name)}".encode() + b"\0")
    return hasher.hexdigest()


def _is_own(file: Path, root: Path, first: Path) -> bool:
    """Return True for an imported file that belongs to the same code as `first`.

    An environment below the root does not. In an environment, `first`'s package and distribution do, and files without
    a distribution.
    """
    if root not in file.parents:
        return False
    folder = _installed_folder(file)
    if folder is None or folder != _installed_folder(first):
        return folder is None
    if _top(file, folder) == _top(first, folder):
        return True
    others = _distributions(file)
    return not others or bool(others & _distributions(first))


def _distributions(file: Path) -> set[str]:
    """Return the names of the installed distributions that may own a file; none for the standard library."""
    folder = _installed_folder(file)
    if folder is None or folder in _standard_library():
        return set()
    top = _top(file, folder)
    return {"torch"} if top == "torch" else set(_distributions_by_module().get(top, ()))


def _top(file: Path, folder: Path) -> str:
    """Return the name of the top-level module of a file below `folder`."""
    return file.relative_to(folder).parts[0].partition(".")[0]


@cache
def _distributions_by_module() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()  # reads the records of every distribution: 0.1 to 0.5 s


def _installed_folder(file: Path) -> Path | None:
    """Return the innermost folder of installed modules that contains a file."""
    return max((f for f in installed() if f in file.parents), key=lambda f: len(f.parts), default=None)


@cache
def installed() -> frozenset[Path]:
    """Return the folders that every interpreter of this environment has on its path."""
    paths = [sysconfig.get_paths()[k] for k in ("purelib", "platlib")]
    return _as_named_and_resolved(*paths, *site.getsitepackages(), site.getusersitepackages()) | _standard_library()


@cache
def _standard_library() -> frozenset[Path]:
    return _as_named_and_resolved(*(sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib")))


def _as_named_and_resolved(*folders: str) -> frozenset[Path]:
    """Return folders as named and resolved: a module's file keeps the path that found it, links included."""
    return frozenset(p for f in folders for p in (Path(f), Path(f).resolve()))


@cache
def function_digest(module: str, name: str) -> str:
    """Return a sha256 over a function and all definitions of its package that it reaches by name.

    Editing one op's code does not change the digests of the others. Comments, docstrings and layout do not count.
    Raises BuildError if the function does not exist.
    """
    todo, seen = [(module, name)], dict[tuple[str, str], str]()
    while todo:
        key = todo.pop()
        if key in seen:
            continue
        definitions, imported = _definitions(key[0])
        if key[1] in imported:
            seen[key] = ""
            todo.append(imported[key[1]])
        elif key[1] in definitions:
            seen[key] = "\n".join(ast.dump(node) for node in definitions[key[1]])
            todo += [(key[0], used) for node in definitions[key[1]] for used in _names(node)]
    if (module, name) not in seen:
        raise BuildError(f"{module} no longer defines {name}")
    hasher = hashlib.sha256()
    for place, name_ in sorted(seen):
        hasher.update(f"{place}\0{name_}\0{seen[place, name_]}\0".encode())
    return hasher.hexdigest()


def _file(module: str, path: str) -> Path:
    found = find_source(module, path)
    if found is None:
        raise BuildError(f"module {module} no longer exists", why=f"looked in {path or 'sys.path'}")
    return found


def _package_root(module: str, file: Path) -> Path:
    """Return the import root; for a Triton kernel, its own folder."""
    return file.parent if module.startswith(f"{TRITON_KERNELS}.") else import_root(module, file)


def import_root(module: str, file: Path) -> Path:
    """Return the folder from which Python imports a module: the one of its top-level package or file."""
    return file.parents[module.count(".") + (1 if file.stem == "__init__" else 0)]


def _imports(module: str, file: Path, path: str) -> list[tuple[str, Path]]:
    if file.suffix != ".py":
        return []
    try:
        tree = ast.parse(files.read(file, MOST_SOURCE_BYTES))
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):  # not Python, or nested too deeply
        return []
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += _imported_from(node, package)
    found = ((name, find_source(name, path)) for name in dict.fromkeys(names))
    return [(name, f) for name, f in found if f is not None]


def _imported_from(node: ast.ImportFrom, package: str) -> list[str]:
    """Return both meanings of `from a import b`: the module a.b, or an attribute of a."""
    try:
        base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
    except ImportError:
        return []
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


@cache
def _definitions(module: str) -> tuple[dict[str, list[ast.stmt]], dict[str, tuple[str, str]]]:
    """Return the module's top-level definitions by name, and the names that it imports from its package."""
    package = module.partition(".")[0]
    tree = _WithoutDocstrings().visit(ast.parse(files.read(_file(module, ""), MOST_SOURCE_BYTES)))
    defined: dict[str, list[ast.stmt]] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            imported |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}
            continue
        for name in _bound(node):
            defined.setdefault(name, []).append(node)
    return defined, imported


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a top-level statement binds (including `import x` and `X[k] = v`)."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(a.asname or a.name).partition(".")[0] for a in node.names}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _names(node: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node
