"""Arms of a race: everything needed to load one again, and a digest that changes when it becomes another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from autosel.candidates import inductor
from autosel.candidates.base import Candidate
from autosel.candidates.libraries.base import PACKAGE as LIBRARIES
from autosel.candidates.source import TRITON_KERNELS, function_digest, module_digest
from autosel.candidates.torch import EAGER, EAGER_STORED
from autosel.devices.cuda import nvml
from autosel.devices.stack import version_of
from autosel.values import Arm, Fingerprint, Knobs, PythonRecipe, Scalar, Workload, digest

# Modules of the whole step, op by op, as a graph and by PyTorch alone (decode.question).
STEPS = ("autosel.decode.step", "autosel.decode.graph", "autosel.decode.torch_step")


def arm(candidate: Candidate, w: Workload, fp: Fingerprint, built_digest: str, knobs: Knobs) -> Arm:
    """Return a candidate's arm for this workload. `built_digest` is the artefact's (native) or unused (Python)."""
    recipe = candidate.recipe(w, fp, knobs)
    build = "" if isinstance(recipe, PythonRecipe) else built_digest
    source = python_digest(recipe) if isinstance(recipe, PythonRecipe) else built_digest
    return Arm(
        candidate=candidate.name,
        backend=candidate.backend,
        recipe=recipe,
        knobs=knobs.values,
        digest=digest_of(source, knobs.values),
        build=build,
    )


def digest_of(source: str, knobs: Mapping[str, Scalar]) -> str:
    """Return an arm's digest from its code and knobs. `source` is a native arm's build, or a Python arm's
    `python_digest`.
    """
    return digest({"source": source, "knobs": knobs})


def python_digest(recipe: PythonRecipe) -> str:
    """Return the digest of a Python arm: PyTorch, its libraries, and the source of the function.

    For autosel's functions, the source is the code that each reaches; for a user's, the module and the modules that it
    imports from its own folder. Raises BuildError if the module no longer exists.
    """
    module, _, name = recipe.target.partition(":")
    if module == inductor.__name__:
        source = function_digest(EAGER, name) + function_digest(module, "_lazy")
    elif module in (EAGER, EAGER_STORED, *STEPS) or module.startswith(f"{LIBRARIES}."):
        source = function_digest(module, name)
    else:
        source = module_digest(module, recipe.path)
    if recipe.layout is not None:
        source += digest(recipe.layout) + "".join(
            module_digest(target.partition(":")[0], recipe.path)
            for target in (recipe.layout.prepare, recipe.layout.compare)
            if target
        )
    compiler = {"triton": triton_version()} if module.startswith(TRITON_KERNELS) else {}
    return digest({"target": recipe.target, "source": source, **compiler, **_library(module), **torch_identity()})


def _library(module: str) -> dict[str, str]:
    """Return name and version of the installed library behind one of autosel's wrappers."""
    if not module.startswith(f"{LIBRARIES}."):
        return {}
    found = {
        k.library.distribution: k.library.version() for k in import_module(module).KERNELS if hasattr(k, "library")
    }
    return {**found, "triton": triton_version()}


@cache
def triton_version() -> str:
    """Return the version of the compiler of the Triton kernels; "" if it is not installed."""
    return version_of("triton") or ""


@cache
def torch_identity() -> dict[str, Any]:
    """Identify PyTorch: version, commit, BLAS and oneDNN, instruction set, CUDA and cuDNN, and the GPU's driver.

    The number of threads and the numeric flags are not included: they are part of the decision's mode.
    """
    import torch

    cudnn_version: Any = torch.backends.cudnn.version  # untyped in some versions
    return {
        "torch": torch.__version__,
        "git": str(torch.version.git_version),
        "built": torch.__config__.show(),
        "cuda": str(torch.version.cuda),
        "cudnn": str(cudnn_version() if torch.cuda.is_available() else None),
        **({"driver": driver} if (driver := nvml.driver()) else {}),
    }
