"""Build of attnkit: the Python packages always, and the C++ extension attnkit._C where it compiles;
attnkit._C_cuda beside it where there are a CUDA toolkit and a CUDA build of PyTorch.

What is the same on every machine stands in pyproject.toml; here is what has to be found out:
whether the extension can be built (and if not, why, for `attnkit info`), and how.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD_INFO = Path("attnkit", "_build_info.py")  # written here, read by `attnkit info`; not in git
EXTENSION, CUDA_EXTENSION = "attnkit._C", "attnkit._C_cuda"

# The stable ABIs this is built for: one library serves every later torch and Python as well.
TORCH_TARGET = "0x020b000000000000"  # 2.11
PYTHON_TARGET, PYTHON_TAG = "0x030A0000", "cp310"  # 3.10
# A free-threaded Python has no limited API, so there the library is for that one version.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

# No -march: instruction sets are chosen at run time.  No -ffast-math: NaN and infinities count.
FLAGS = [
    "-O3",
    "-std=c++20",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wno-psabi",
    f"-ffile-prefix-map={ROOT}{os.sep}=",  # errors name their source file, not where it was built
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
]
# Machine code for these; PTX of the last one for what comes later.  TORCH_CUDA_ARCH_LIST, which
# PyTorch's builds know, names others.
CUDA_ARCHITECTURES = ("80", "90a", "100")


def find_compiler() -> tuple[str | None, str]:
    """The command of the C++ compiler and "", or None and the reason why there is none."""
    named = os.environ.get("CXX")
    for command in [named] if named else ["c++", "g++", "clang++"]:
        if shutil.which(shlex.split(command)[0]):
            return command, ""
    if named:
        return None, f"CXX names {named!r}, which is not on the PATH"
    return None, "no C++ compiler was found (c++, g++ or clang++ on the PATH, or CXX)"


def obstacle() -> str:
    """Why the extension is not to be built on this machine, as a sentence; "" when it is."""
    if os.environ.get("ATTNKIT_BUILD_EXT", "1") == "0":
        return "ATTNKIT_BUILD_EXT=0 was set when attnkit was installed"
    if not sys.platform.startswith("linux"):
        return f"the extension is built on Linux only, and this is {sys.platform}"
    command, reason = find_compiler()
    if command is None:
        return reason
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"Python's C headers are not installed ({header} is missing; Debian: python3-dev)"
    return ""


def cuda_toolkit() -> Path | None:
    """The folder of the CUDA toolkit; an `nvcc` on the PATH may be no more than a script."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    found = [Path(nvcc).resolve().parents[1]] if nvcc else []
    for folder in [*map(Path, named), *found, Path("/usr/local/cuda")]:
        if (folder / "bin" / "nvcc").exists() and (folder / "include/cuda_runtime_api.h").exists():
            return folder
    return None


def cuda_obstacle() -> str:
    """Why the CUDA kernels are not to be built, as a sentence; "" when they are.

    Whether this machine has a GPU is not asked: it may build for another one.
    """
    if os.environ.get("ATTNKIT_CUDA", "1") == "0":
        return "ATTNKIT_CUDA=0 was set when attnkit was installed"
    import torch

    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    toolkit = cuda_toolkit()
    if toolkit is None:
        return "no CUDA toolkit was found (nvcc on the PATH, or CUDA_HOME)"
    os.environ["CUDA_HOME"] = str(toolkit)  # before PyTorch looks for it by itself
    nvcc = toolkit / "bin" / "nvcc"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)", said)
    if found is None or found[1] != torch.version.cuda.split(".")[0]:
        return (
            f"the CUDA toolkit in {toolkit} is {found[1] if found else 'unknown'}, and this "
            f"PyTorch is built with CUDA {torch.version.cuda}"
        )
    return ""


def say(sentence: str) -> None:
    print(f"attnkit: {sentence}", file=sys.stderr, flush=True)


def compiler_version(command: str) -> str:
    shown = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True)
    return (shown.stdout.splitlines() or [command])[0]


def write_build_info(folder: Path, reason: str) -> None:
    """Record in `folder` how the extension was built, or why it was not."""
    values = {
        "EXTENSION_BUILT": not reason,
        "REASON": reason,
        "COMPILER": "",
        "TORCH": "",
        "FLAGS": "",
        "CUDA_REASON": reason or cuda_obstacle(),
    }
    if not reason:
        import torch

        command = find_compiler()[0] or ""
        values |= {
            "COMPILER": compiler_version(command),
            "TORCH": torch.__version__,
            "FLAGS": " ".join(FLAGS),
        }
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    text = "\n".join(
        ['"""How this copy of attnkit was built.  Written by setup.py."""', "", *lines, ""]
    )
    path = folder / BUILD_INFO
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class BuildPy(build_py):
    """Copies the packages, and records in the copy (here, if editable) how it was built."""

    def run(self) -> None:
        super().run()
        write_build_info(ROOT if self.editable_mode else Path(self.build_lib), REASON)


class BuildNothing(build_ext):
    """Stands in for the build of the extension where it is not to be built."""

    def run(self) -> None:
        say(f"installing without the C++ extension: {REASON}.")
        if self.inplace or self.editable_mode:
            remove_built("_C*.so")
            write_build_info(ROOT, REASON)


def remove_built(pattern: str) -> None:
    for old in (ROOT / "attnkit").glob(pattern):
        say(f"removing {old.name} of an earlier build.")
        old.unlink()


def extension_arguments() -> dict:
    """What setup() needs to know to build attnkit._C."""
    # Build tools of the interpreter's own environment (ninja) count even where it is not activated.
    os.environ["PATH"] = os.pathsep.join(
        [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    )
    os.environ["CXX"] = find_compiler()[0] or ""
    try:
        no_cuda = cuda_obstacle()
        from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
    except ImportError as error:
        raise SystemExit(
            f"attnkit: the C++ extension needs torch to build, and it does not import ({error}). "
            "Install torch first, drop --no-build-isolation, or set ATTNKIT_BUILD_EXT=0 to install "
            "without the extension."
        ) from error

    class BuildExtensions(BuildExtension):
        """Compiles, keeps object files between editable installs, explains a failure."""

        def run(self) -> None:
            if self.inplace or self.editable_mode:
                # pip would have it in a temporary folder, and compile everything anew every time
                self.build_temp = str(ROOT / "build" / "inplace")
            try:
                super().run()
            except Exception as error:
                raise SystemExit(
                    f"attnkit: compiling {EXTENSION} with {os.environ['CXX']!r} failed "
                    f"({type(error).__name__}: {error}). Its messages stand above. It has to know "
                    "C++20 (GCC 10, clang 12 or newer; CXX=... names another one); "
                    "ATTNKIT_BUILD_EXT=0 installs without the extension"
                    f"{'' if no_cuda else ', ATTNKIT_CUDA=0 without the CUDA kernels'}."
                ) from error
            if self.inplace or self.editable_mode:
                if no_cuda:
                    remove_built("_C_cuda*.so")
                write_build_info(ROOT, "")

    headers = files("*.[hi]*")
    flags = [*FLAGS, "-g0"]  # Python's own flags often hold -g: a library ten times larger
    if "CFLAGS" in os.environ:  # whose -O and -g stand before these, and so would lose
        flags = [flag for flag in flags if flag not in ("-O3", "-g0")]
    if LIMITED_API:
        flags = [*flags, f"-DPy_LIMITED_API={PYTHON_TARGET}"]
    options = {"depends": ["setup.py", *headers], "py_limited_api": LIMITED_API}
    sources = [name for name in files("*.cpp") if not name.startswith("csrc/cuda/")]
    extensions = [CppExtension(EXTENSION, sources, extra_compile_args={"cxx": flags}, **options)]
    if not no_cuda:
        options["depends"] = [*options["depends"], *files("*.cuh")]
        extensions.append(
            CUDAExtension(
                CUDA_EXTENSION,
                ["csrc/cuda/operators.cpp", *files("*.cu")],
                extra_compile_args={"cxx": [*flags, "-DUSE_CUDA"], "nvcc": nvcc_flags()},
                **options,
            )
        )
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_py": BuildPy, "build_ext": BuildExtensions},
        "options": {"bdist_wheel": {"py_limited_api": PYTHON_TAG}} if LIMITED_API else {},
    }


def files(pattern: str) -> list[str]:
    """Sources under csrc, relative to the root."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "csrc").rglob(pattern))]


def nvcc_flags() -> list[str]:
    flags = ["-O3", "-std=c++20", "-Xptxas=-v"]  # tests/cuda_budgets.py reads what that says
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return flags  # PyTorch adds them
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in CUDA_ARCHITECTURES]
    last = CUDA_ARCHITECTURES[-1]
    return [*flags, *codes, f"-gencode=arch=compute_{last},code=compute_{last}"]


os.chdir(ROOT)
if int(setuptools.__version__.split(".")[0]) < 77:
    # it would fail all the same, on how pyproject.toml writes the licence, with a page of text
    raise SystemExit(
        f"attnkit: setuptools {setuptools.__version__} is too old, 77 or newer is needed: "
        "pip install 'setuptools>=77', or drop --no-build-isolation."
    )
REASON = obstacle()
KERNELS = ["attnkit.kernels", *(f"attnkit.kernels.{name}" for name in find_packages("kernels"))]
PURE = {"cmdclass": {"build_py": BuildPy, "build_ext": BuildNothing}}
setup(
    packages=[*find_packages(include=["attnkit", "attnkit.*"]), *KERNELS],
    package_dir={"attnkit.kernels": "kernels"},  # the top-level name `kernels` belongs to others
    **(PURE if REASON else extension_arguments()),
)
