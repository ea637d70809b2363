"""The state of the checks behind a score: a digest of their sources, which is stored with each row."""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

from autosel import resources

PACKAGE = Path(__file__).parents[2]
FOLDERS = (PACKAGE / "ops", PACKAGE / "parity", PACKAGE / "testing" / "mutants")


COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)  # of C++; none of our strings holds one


def digest() -> str:
    """Return eight hexadecimal digits that change with the code of an op, a check, a mutant or a C++ kernel.

    Comments, docstrings and layout do not count.
    """
    files = [file for folder in FOLDERS for file in sorted(folder.rglob("*.py"))]
    files += sorted((resources.kernels() / "cpu").iterdir())
    found = hashlib.blake2b(digest_size=4)
    for file in files:
        found.update(f"{file.name}\0{code_of(file.suffix, file.read_text())}".encode())
    return found.hexdigest()


def code_of(suffix: str, text: str) -> str:
    """Return what counts of a source: Python's syntax tree, or the words of C++."""
    if suffix != ".py":
        return " ".join(COMMENT.sub(" ", text).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)
