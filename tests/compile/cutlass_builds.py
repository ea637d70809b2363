"""Compile kernels/cutlass/ for devices that are not present, and compare the machine code with what is expected."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from autosel import resources
from autosel.fingerprint import known
from autosel.native.compile import _command, source_digest
from autosel.native.cuda import architecture
from autosel.values import NativeRecipe
from tests.compile import machine_code
from tests.compile.cutlass_asked import BY_NAME, Build
from tests.compile.emulate import keep, kept, output_of, tools
from tests.compile.machine_code import Function, read_functions

# UTMALDG, UTMASTG: TMA; HGMMA: wgmma; LDGSTS: cp.async; LDSM: ldmatrix.
OPCODES = ("HGMMA", "UTMALDG", "UTMASTG", "WARPGROUP", "SYNCS", "HMMA", "LDGSTS", "LDSM", "LDL", "STL", "ACQBULK")
# 65536 registers / (threads * CTAs an SM): 384 threads and one CTA; 128 or 256 threads, two CTAs or one.
REGISTERS = {"gemm_sm90": 168, "gemm_sm80": 255}
EXPECTED = {
    "gemm_sm90": ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS"),
    "gemm_sm80": ("HMMA", "LDGSTS", "LDSM"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    kernels: tuple[Function, ...]
    advice: tuple[str, ...]  # warnings of ptxas
    seconds: float = 0.0  # of a whole build, on one core


def recipe_of(build: Build) -> NativeRecipe:
    recipe = BY_NAME[build.source].recipe(build.workload, known.load(build.device), build.knobs)
    assert isinstance(recipe, NativeRecipe)
    return recipe


def compiled(recipe: NativeRecipe) -> Compiled:
    """Compile a recipe with the command of compile_source: device code, host code, link."""
    readers = (Path(__file__).read_bytes(), Path(machine_code.__file__).read_bytes())
    file = kept(f"machine-code/{recipe.entry}", "json", *readers, source_digest(recipe.source, recipe.flags))
    if not file.is_file():
        with keep(file) as made:
            made.write_text(json.dumps(asdict(_compiled(recipe))))
    told = json.loads(file.read_text())
    kernels = tuple(Function(**row) for row in told["kernels"])
    return Compiled(kernels=kernels, advice=tuple(told["advice"]), seconds=told["seconds"])


def _compiled(recipe: NativeRecipe) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        told = (*recipe.flags, "-Xptxas", "-v", "-keep", "-keep-dir", folder)
        before = os.times()
        said = output_of(*_command(resources.kernels() / recipe.source, told, Path(folder) / "kernel.so"))
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        return _read(said, next(Path(folder).glob("*.cubin")), seconds)


def assembled(ptx: bytes, cc: tuple[int, int]) -> Compiled:
    """Assemble this PTX with nvcc's assembler, as in a whole build."""
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_bytes(ptx)
        tool = Path(tools()[1].path).resolve().with_name("ptxas")
        return _read(output_of(str(tool), "-v", f"-arch=sm_{architecture(cc)}", str(text), "-o", str(cubin)), cubin)


def _read(said: str, cubin: Path, seconds: float = 0.0) -> Compiled:
    advice = tuple(re.findall(r"\(C\d+\)[^\n]{0,120}|[Pp]otential [Pp]erformance [Ll]oss[^\n]{0,120}", said))
    return Compiled(kernels=read_functions(said, cubin, OPCODES), advice=advice, seconds=seconds)


def faults(build: Build, made: Compiled) -> list[str]:
    """Return the differences of the machine code from the expectation."""
    main, plain = _parted(made.kernels)
    found = [f"ptxas: {words}" for words in made.advice]  # wgmma serialised: half the rate
    if main.registers > REGISTERS[build.source]:
        found.append(f"{main.registers} registers, budget {REGISTERS[build.source]}")
    found += [f"{k.name} spills: {k}" for k in (main, plain) if k.spill_bytes or k.stack_bytes]
    found += [f"no {i}: {main.instructions}" for i in EXPECTED[build.source] if not main.instructions.get(i)]
    # The scheduler that shares tiles does not support dependent launches.
    recipe = recipe_of(build)
    dependent = float(str(known.load(build.device).identity["cc"])) >= 9 and "-DAUTOSEL_STREAM_K=1" not in recipe.flags
    if bool(main.instructions.get("ACQBULK")) != dependent:
        found.append(f"programmatic dependent launch: expected {dependent}")
    return found


def _parted(kernels: tuple[Function, ...]) -> tuple[Function, Function]:
    """Return the product's kernel, and the kernel for unaligned operands."""
    plain = [k for k in kernels if "plain_product" in k.name]
    main = [k for k in kernels if k not in plain]
    assert len(plain) == len(main) == 1, [k.name for k in kernels]
    return main[0], plain[0]
