"""What a result needs to be read later: the machine, the versions of everything and the commit."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

import attnkit
from attnkit.benchmark import peers

PACKAGE = Path(__file__).resolve().parent.parent

# Flags that decide which kernel can run, out of the hundred that a CPU reports.
TELLING_FLAGS = (
    *("sse2", "avx", "avx2", "fma", "f16c"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),  # Arm
)


@dataclass(frozen=True)
class Machine:
    """The computer and how much of it was used."""

    cpu: str  # the model's name, as the system gives it
    architecture: str  # x86_64, aarch64, ...
    cores: int  # that this process may run on
    threads: int  # torch.get_num_threads() while measuring
    instruction_set: str  # the highest that PyTorch's own kernels use here
    flags: tuple[str, ...]  # the processor's instruction sets that matter for kernels
    memory_bytes: int
    system: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Versions:
    """The software that ran."""

    python: str
    torch: str
    attnkit: str
    compiler: str | None  # that built attnkit._C; None without the extension
    peers: dict[str, str] = field(default_factory=dict)  # the optional libraries that are installed


def describe_machine() -> Machine:
    """Look at this machine; ``threads`` is the number in force at the time of the call."""
    info = _cpuinfo()
    present = set((info.get("flags") or info.get("Features") or "").split())
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Machine(
        cpu=info.get("model name") or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        cores=_usable_cores(),
        threads=torch.get_num_threads(),
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        flags=tuple(flag for flag in TELLING_FLAGS if flag in present),
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        gpus=gpus,
    )


def describe_versions() -> Versions:
    """Versions of Python, torch, attnkit and of the compiler that built the extension."""
    return Versions(
        python=platform.python_version(),
        torch=torch.__version__,
        attnkit=attnkit.__version__,
        compiler=_extension_compiler(),
        peers=peers.versions(),
    )


def headline(machine: Machine, versions: Versions) -> str:
    """Both in one line, to stand above a table."""
    return (
        f"{machine.cpu}, {machine.threads} of {machine.cores} cores, {machine.instruction_set}; "
        f"torch {versions.torch}, Python {versions.python}, {versions.compiler or 'no extension'}"
    )


def git_commit(package: Path = PACKAGE) -> str | None:
    """The commit of the checkout that holds ``package``, with ``+changes`` if it was edited.

    None when there is no git, or when the package is installed inside a folder that some other
    project keeps in git: its commit would say nothing about this code.
    """
    if _git(package, "ls-files", "--error-unmatch", "spec.py") is None:
        return None
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changes else commit


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _extension_compiler() -> str | None:
    name = "attnkit._build_info"  # written by the build; a checkout that was never built has none
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name).COMPILER or None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    if sys.platform == "win32":
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
