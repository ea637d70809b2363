"""Write the lock files beside this script: the exact releases that `./run` and the tests install.

    .venv/bin/python locks/generate.py             today's releases, for every Python and every build of torch
    .venv/bin/python locks/generate.py py311-cpu   this file alone
    .venv/bin/python locks/generate.py engines     the hashes of the engines' wheels; their versions are set by hand

Needs a network, and `packaging`. uv resolves for Pythons and platforms that this machine does not have; pip fetches it
into a temporary environment.

What they hold, and why: docs/environment.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
UV = "uv==0.13.9"
PYTHONS = ("3.11", "3.12", "3.13")
TESTED = "py311-cpu"  # CI's
PLATFORM = "x86_64-manylinux_2_28"  # what torch's own wheels need
ENGINES_PLATFORM = "x86_64-manylinux_2_40"  # SGLang's wheels need a glibc of 2.34; the tests read only their Python
GLIBC = range(40, 4, -1)  # minor versions of the glibc that a wheel may ask for
GPU_EXTRAS = {"cpu": (), "cu126": ("cuda12",), "cu128": ("cuda12",), "cu130": ("cuda13", "cuda13-system")}
ENGINES = ("engines.txt", "engines-imports.txt")  # one file for all Pythons: hardly any of these wheels is of one


def main(arguments: Sequence[str]) -> None:
    names = [f"py{python.replace('.', '')}-{build}" for python in PYTHONS for build in GPU_EXTRAS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names)}, engines; default: all but engines")
    asked = parser.parse_args(arguments).name or names
    unknown = set(asked) - {*names, "engines"}
    if unknown:
        parser.error(f"no such lock: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        uv = Uv(Path(folder))
        for name in asked:
            if name == "engines":
                for file in ENGINES:
                    add_hashes(HERE / file, uv)
            else:
                (HERE / f"{name}.txt").write_text(Lock(name, uv).text())
            sys.stdout.write(f"wrote {name}\n")
            sys.stdout.flush()


class Uv:
    """uv in an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "uv"], check=True)
        subprocess.run([folder / "uv" / "bin" / "python", "-m", "pip", "install", "--quiet", UV], check=True)

    def resolve(
        self,
        needs: Iterable[str],
        python: str,
        *words: str,
        torch: dict[str, Any] | None = None,
        platform: str = PLATFORM,
    ) -> list[dict[str, Any]]:
        """Return the packages of a pylock.toml (PEP 751) that satisfies `needs`."""
        asked, made, config = (self.folder / name for name in ("in.txt", "pylock.toml", "uv.toml"))
        asked.write_text("\n".join(needs) + "\n")
        made.unlink(missing_ok=True)  # uv prefers the versions of a file that it writes again
        config.write_text(_metadata(torch) if torch else "")
        command = [self.folder / "uv" / "bin" / "uv", "pip", "compile", asked, "--output-file", made, "--quiet"]
        command += ["--format", "pylock.toml", "--config-file", config, "--only-binary", ":all:"]
        command += ["--python-version", python, "--python-platform", platform, "--no-python-downloads", *words]
        subprocess.run(command, check=True)
        packages: list[dict[str, Any]] = tomllib.loads(made.read_text())["packages"]
        return packages


class Lock:
    """One lock file: every package that some extra needs, for one Python and one build of torch."""

    def __init__(self, name: str, uv: Uv) -> None:
        python, self.build = name.removeprefix("py").split("-")
        self.name, self.uv, self.python = name, uv, f"{python[0]}.{python[1:]}"
        self.script = load_run()
        self.version = self.script.TORCH_FOR_CUDA_12_8 if self.build == "cu128" else self.script.TORCH
        self.torch = torch_metadata(self.version, self.build)

    def text(self) -> str:
        needs = self.needs()
        found = {p["name"]: p for p in self.resolve(need for group in needs.values() for need in group)}
        pins = [f"{name}=={package['version']}" for name, package in found.items()]
        users: dict[str, set[str]] = {name: set() for name in found}
        for extra, group in needs.items():
            for package in self.resolve(group, pins):
                users[package["name"]].add(extra)
        lines = [line(found[name], [self.python], users[name]) for name in sorted(found) if name != "torch"]
        (headers,) = self.uv.resolve([self.script.CUTLASS], self.python, "--no-deps")
        lines.append(line(headers, [self.python], set(self.script.WITH_CUTLASS) & set(needs)))
        return self.header() + "".join(sorted(lines))

    def needs(self) -> dict[str, list[str]]:
        """Requirements by extra; `all`: what autosel imports in any case; `build`: what installs the checkout."""
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        other = {e for extras in GPU_EXTRAS.values() for e in extras} - set(GPU_EXTRAS[self.build])
        by_extra = {extra: self.script.requirements([extra]) for extra in known if extra not in other}
        build = ["pip", *self.script.build_requirements()]
        return {"all": self.script.requirements([]), "build": build, **by_extra}

    def resolve(self, needs: Iterable[str], pins: Iterable[str] = ()) -> list[dict[str, Any]]:
        torch = [f"torch=={self.version}"]
        constraints = self.uv.folder / "pins.txt"
        constraints.write_text("\n".join([*torch, *pins]) + "\n")
        return self.uv.resolve(needs, self.python, "--constraints", str(constraints), torch=self.torch)

    def header(self) -> str:
        local = f"{self.version}+{self.build}"
        if self.build == "cu130":  # PyPI's
            local = f"{self.version} or {local}"
        tried = "Tested: CI installs these." if self.name == TESTED else "Not tried: resolved for another machine."
        apart = "" if self.build in ("cpu", "cu130") else " Its CUDA libraries come with it, as its metadata pins them."
        return (
            f"# Python {self.python}, torch {local}, Linux on x86-64. {tried}\n"
            f"# Written by locks/generate.py on {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}; do not edit.\n"
            f"# torch=={self.version}: installed first, without a hash.{apart}\n"
        )


def load_run() -> Any:
    loader = importlib.machinery.SourceFileLoader("autosel_run", str(ROOT / "run"))
    spec = importlib.util.spec_from_loader("autosel_run", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module


def torch_metadata(version: str, build: str) -> dict[str, Any]:
    """Return the metadata of this build of torch, as uv takes it. It is derived from PyPI's build, for CUDA 13: without
    the CUDA libraries and, for a CPU, without Triton, its requirements are those of the other builds."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    said = subprocess.run([*command, "--report", "-", f"torch==={version}"], check=True, capture_output=True).stdout
    needs = json.loads(said)["install"][0]["metadata"]["requires_dist"]
    kept = {
        "cpu": lambda need: "platform_system" not in need,
        "cu130": lambda need: True,
    }.get(build, lambda need: "platform_system" not in need or need.startswith("triton"))
    return {"name": "torch", "version": version, "requires-dist": [need for need in needs if kept(need)]}


def _metadata(torch: dict[str, Any]) -> str:
    """As uv's configuration has it. A JSON string or list of strings is a TOML value too."""
    return "[[dependency-metadata]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in torch.items())


def line(package: dict[str, Any], pythons: Iterable[str], users: set[str]) -> str:
    """A line of a lock; raises ValueError for a package without a wheel."""
    fitting = {tag for python in pythons for tag in tags(python)}
    hashes = {
        wheel["hashes"]["sha256"]
        for wheel in package.get("wheels", ())
        if parse_wheel_filename(file_name(wheel))[3] & fitting
    }
    pin = f"{canonicalize_name(package['name'])}=={package['version']}"
    if not hashes:
        raise ValueError(f"{pin} has no wheel for this Python and Linux on x86-64")
    words = [pin, *(f"--hash=sha256:{digest}" for digest in sorted(hashes))]
    who = ["all"] if "all" in users else sorted(users)
    return " ".join(words) + (f"  # {', '.join(who)}\n" if who else "\n")


def file_name(wheel: dict[str, Any]) -> str:
    return str(wheel.get("name") or wheel["url"].rpartition("/")[2]).replace("%2B", "+")


def tags(python: str) -> set[Tag]:
    """The tags of wheels that pip may choose under this Python, on Linux on x86-64."""
    version = tuple(map(int, python.split(".")))
    legacy = ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    platforms = [*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), *legacy]
    interpreter = f"cp{version[0]}{version[1]}"
    return {
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, interpreter=interpreter, platforms=platforms),
    }


def add_hashes(file: Path, uv: Uv) -> None:
    """Write the hashes of the releases that stand in `file`."""
    text = file.read_text()
    header = "".join(f"{row}\n" for row in text.splitlines() if row.startswith("#"))
    pins = re.findall(r"^[\w.-]+==[\w.]+", text, flags=re.MULTILINE)
    merged: dict[str, dict[str, Any]] = {}
    for python in PYTHONS:
        for package in uv.resolve(pins, python, "--no-deps", "--prerelease", "allow", platform=ENGINES_PLATFORM):
            merged.setdefault(package["name"], {**package, "wheels": []})["wheels"] += package["wheels"]
    file.write_text(header + "".join(sorted(line(package, PYTHONS, set()) for package in merged.values())))


if __name__ == "__main__":
    main(sys.argv[1:])
