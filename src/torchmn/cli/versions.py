"""``torchmn --version``: versions and available engines, without importing any of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from torchmn import __version__
from torchmn.cluster.gpus import text_of
from torchmn.run.backend import find_mpirun
from torchmn.run.host_checks import version_of


def versions_text(env: Mapping[str, str]) -> str:
    """Return a line for torchmn and one for each package that it uses. Local, without torch."""
    rows = {
        "Python": platform.python_version(),
        "torch": version_of("torch", "not installed"),
        "gloo": "in torch" if version_of("torch", "") else "not installed",
        "NCCL": _nccl(),
        "MPI": _mpi(env),
        "codec kernels": _kernels(),
        "schedulers": ", ".join(_schedulers(env)) or "none found on the PATH",
    }
    width = max(map(len, rows))
    lines = [f"  {name:{width}}  {text}" for name, text in rows.items()]
    return "\n".join([f"torchmn {__version__}", *lines])


def _nccl() -> str:
    cuda = _cuda_of_torch()
    if not cuda:
        return "no: this torch is not built for CUDA"
    for distribution in metadata.distributions():
        if (distribution.name or "").lower().startswith("nvidia-nccl"):
            return f"{distribution.version}, torch built for CUDA {cuda}"
    return f"in torch, built for CUDA {cuda}"


def _cuda_of_torch() -> str:
    """Return the CUDA version that torch was built for, from torch's own file, or empty."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = text_of(Path(spec.origin).parent / "version.py")
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else ""


def _mpi(env: Mapping[str, str]) -> str:
    path, binding = find_mpirun(env), version_of("mpi4py", "")
    parts = [
        f"mpi4py {binding}" if binding else "no mpi4py",
        f"mpirun at {path}" if path else "no mpirun",
    ]
    return ", ".join(parts)


def _kernels() -> str:
    numba, triton = version_of("numba", ""), version_of("triton", "")
    parts = [
        f"numba {numba} (CPU)" if numba else "no numba (no codecs but 16 bits on CPUs)",
        f"Triton {triton} (CUDA)" if triton else "no Triton (no codecs but 16 bits on GPUs)",
    ]
    return ", ".join(parts)


def _schedulers(env: Mapping[str, str]) -> list[str]:
    from torchmn.submit.site import SCHEDULERS, installed_schedulers

    path = env.get("PATH")
    found = [SCHEDULERS[name] for name in installed_schedulers(path)]
    return [f"{scheduler.title} ({scheduler.submit_command[0]})" for scheduler in found]
