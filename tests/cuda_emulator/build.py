"""Builds what runs CUDA kernels without a GPU: the emulator, its self-test, the project's kernels.

    python tests/cuda_emulator/build.py selftest|kernels|table plain|asan|tsan

Prints the path of the result.  What is up to date is not built again.  Exits with 3, and the reason
as its output, where this machine cannot build it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "cuda_emulator"

SANITIZERS = {
    "plain": [],
    "asan": [
        "-fsanitize=address,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero,"
        "float-cast-overflow,bool,enum,null",
        "-fno-sanitize-recover=all",
    ],
    "tsan": ["-fsanitize=thread"],
}
RUNTIME = ("scheduler", "memory", "tensor_core", "context_switch")
# The dims that the sanitized kernels are compiled for: a build of all takes minutes.
FEW_DIMS = "-DATTNKIT_HEAD_DIMS(X)=X(64, 64) X(192, 128)"


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def header_folders() -> Iterator[Path]:
    """Where CUDA's headers may be: a toolkit, or the packages of pip."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable], "include")
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).resolve().parents[1] / "include"
    yield Path("/usr/local/cuda/include")
    for site in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        yield from sorted(Path(site, "nvidia").glob("*/include"), reverse=True)
        yield Path(site, "triton", "backends", "nvidia", "include")


def cuda_headers() -> Path | None:
    wanted = ("cuda_runtime.h", "cuda_bf16.h", "cuda_fp8.h", "crt/host_defines.h", "nv/target")
    for folder in header_folders():
        if all((folder / name).exists() for name in wanted):
            return folder
    return None


def obstacle() -> str:
    """Why this machine cannot build the emulator, or ""."""
    if not sys.platform.startswith("linux"):
        return f"the emulator runs on Linux, and this is {sys.platform}"
    if shutil.which(shlex.split(compiler())[0]) is None:
        return f"there is no C++ compiler {compiler()!r}"
    if cuda_headers() is None:
        return (
            "CUDA's headers are not here (they come with a toolkit, or by "
            "pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl)"
        )
    return ""


class Builder:
    """Compiles and links one variant into its own folder."""

    def __init__(self, variant: str, source: Path = ROOT, folder: Path | None = None) -> None:
        self.variant, self.source = variant, source
        self.folder = folder or BUILD / variant
        self.folder.mkdir(parents=True, exist_ok=True)
        # NVIDIA's headers are not ours to warn about, and much of them is for the device
        self.base = [*shlex.split(compiler()), "-std=c++20", "-O1", "-g1", "-fPIC",
                     "-isystem", str(cuda_headers())]  # fmt: skip

    def compile(self, path: Path, flags: list[str], name: str = "") -> Path:
        """The object file of a source, built anew if it, its flags or what it includes changed."""
        to = self.folder / f"{name or path.stem}.o"
        command = [*self.base, *flags, "-MMD", "-c", str(path), "-o", str(to)]
        stamp = to.with_suffix(".cmd")
        wanted = hashlib.sha256(shlex.join(command).encode()).hexdigest()
        if not self._fresh(to, stamp, wanted):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{shlex.join(command)}\n{done.stderr}")
            stamp.write_text(wanted)
        return to

    @staticmethod
    def _fresh(to: Path, stamp: Path, wanted: str) -> bool:
        listed = to.with_suffix(".d")
        if not (to.exists() and stamp.exists() and listed.exists()):
            return False
        if stamp.read_text() != wanted:
            return False
        used = listed.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        built = to.stat().st_mtime
        return all(Path(p).exists() and Path(p).stat().st_mtime <= built for p in used)

    def link(self, to: Path, objects: list[Path], flags: list[str]) -> Path:
        if not to.exists() or any(o.stat().st_mtime > to.stat().st_mtime for o in objects):
            sanitizers = SANITIZERS[self.variant]
            command = [*self.base, *sanitizers, *map(str, objects), *flags, "-o", str(to)]
            subprocess.run(command, check=True)
        return to

    def runtime_jobs(self) -> list[tuple[Path, list[str], str]]:
        """The emulator itself: never sanitized, but told which sanitizer the kernels have."""
        told = {"plain": [], "asan": ["-DEMULATOR_ASAN"], "tsan": ["-DEMULATOR_TSAN"]}
        flags = ["-O2", *told[self.variant]]
        return [(HERE / f"{name}.cpp", flags, "") for name in RUNTIME]

    def kernel_flags(self) -> list[str]:
        return ["-x", "c++", "-include", str(HERE / "cuda_emulator.h"), "-Wno-unknown-pragmas",
                *SANITIZERS[self.variant]]  # fmt: skip

    def objects(self, jobs: list[tuple[Path, list[str], str]]) -> list[Path]:
        workers = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda job: self.compile(*job), jobs))

    def selftest(self) -> Path:
        """An executable that runs the cases of selftest.cu."""
        jobs = [*self.runtime_jobs(), (HERE / "selftest.cu", self.kernel_flags(), "")]
        return self.link(self.folder / "selftest", self.objects(jobs), [])

    def table(self) -> Path:
        """An executable that lists the kernels and what they ask of a multiprocessor."""
        jobs = [*self.runtime_jobs(), (HERE / "kernel_table.cu", self.kernel_flags(), "")]
        return self.link(self.folder / "kernel_table", self.objects(jobs), [])

    def kernels(self) -> Path:
        """A library that registers the CUDA operators for CPU tensors."""
        flags = self.kernel_flags()
        if self.variant != "plain":
            flags = [*flags, FEW_DIMS]
        cuda = self.source / "csrc" / "cuda"
        jobs = [(path, flags, "") for path in sorted(cuda.glob("*.cu"))]
        if self.variant != "plain":
            few = {"decode_64", "decode_192_128"}
            jobs = [j for j in jobs if j[0].stem in few or not j[0].stem.startswith("decode_")]
        jobs += self.runtime_jobs()
        # it has nothing that a sanitizer is to look at, and takes as long as all the rest
        operators = Builder("plain", self.source).operators()
        return self.link(
            self.folder / "kernels.so", [*self.objects(jobs), operators], self.library_flags()
        )

    def operators(self) -> Path:
        """What registers them with torch, for CPU tensors."""
        flags = ["-DATTNKIT_EMULATED", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-Wno-psabi",
                 "-isystem", str(torch_folder() / "include")]  # fmt: skip
        return self.compile(self.source / "csrc" / "cuda" / "operators.cpp", flags)

    def library_flags(self) -> list[str]:
        libraries = torch_folder() / "lib"
        return ["-shared", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]


def torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def main() -> int:
    what, variant = sys.argv[1:]
    reason = obstacle()
    if reason:
        print(reason)
        return 3
    builder = Builder(variant)
    with (builder.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sanitized kernels are built beside running tests
        print(getattr(builder, what)())
    return 0


if __name__ == "__main__":
    sys.exit(main())
