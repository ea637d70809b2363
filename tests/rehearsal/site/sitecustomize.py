"""Start a Python under rehearsal: names of CUDA's libraries lead to the device's.

The same happens after imports that bring CUDA kernels, or a second runtime.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

if os.environ.get("CUDA_REHEARSAL_DEVICE"):
    folder = os.environ["CUDA_HOME"]
    # For all: an object that nvcc made without a runtime finds this one.
    device, *_ = [
        ctypes.CDLL(f"{folder}/{name}", mode=ctypes.RTLD_GLOBAL)
        for name in os.environ["CUDA_REHEARSAL_LIBRARIES"].split(":")
    ]
    sys.path.append(os.environ["CUDA_REHEARSAL_ROOT"])
    os.environ |= {
        "TRITON_PTXAS_PATH": f"{folder}/bin/ptxas",
        "TRITON_LIBCUDA_PATH": folder,
        "CUPY_COMPILE_WITH_PTX": "1",
        "CUPY_CACHE_DIR": f"{folder}/cupy",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # of operators that are replaced
    }

    def of_torch(_: ModuleType) -> None:
        from tests.rehearsal import aten, linked

        for runtime in linked.beside(device):
            linked.redirect(runtime, device)
        aten.install(device)

    def of_cupy(module: ModuleType) -> None:
        from tests.rehearsal import linked

        linked.redirect(str(module.__file__), device)

    # Of a fingerprint's probes, which would take an interpreter an hour.
    SMALLER: dict[str, dict[str, Any]] = {
        "arithmetic": {"MATRIX_SIDE": 256, "STEPS": 64, "PRODUCT_STEPS": 64},
        "bench": {
            **dict.fromkeys(("WARM_UP_S", "WINDOW_S", "SWEEP_WINDOW_S"), 0.0),
            "WINDOWS": 2,
            "BLOCK_BYTES": 1 << 20,
            "READ_BYTES": 4 << 20,
            "CHUNKED_BYTES": 4 << 20,
        },
        "probe": {"LOOK_WINDOW_S": 0.0},
        "cost": {"READS": 20, "COPIED_BYTES": 1 << 20, "ANSWERS": 5},
    }

    AFTER: dict[str, Callable[[ModuleType], None]] = {
        "torch": of_torch,
        "cupy_backends.cuda.api.runtime": of_cupy,
        **{f"autosel.devices.cuda.{n}": lambda module, new=new: vars(module).update(new) for n, new in SMALLER.items()},
    }

    class AfterImport(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            then = AFTER.pop(name, None)
            spec = importlib.util.find_spec(name) if then else None
            if then is None or spec is None or spec.loader is None:
                return None
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                try:
                    then(module)
                except Exception:  # which an importer may interpret as a missing module
                    traceback.print_exc()
                    os._exit(70)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, AfterImport())
