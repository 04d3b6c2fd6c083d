"""The part in C++, compiled at its first use and kept in the user's cache folder."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O1", "-g0", "-std=c++20", "-w", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=native")
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


def why_not() -> str:
    """The reason why this machine has no strict accelerator; empty if it has one."""
    if sys.platform != "linux":
        return f"the strict accelerator needs Linux, this is {sys.platform}"
    if shutil.which(_compiler()) is None:
        return f"the strict accelerator needs a C++ compiler, and there is no {_compiler()}; install g++ or set CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the strict accelerator needs Python's headers; install python3-dev"
    return ""


def build() -> Path:
    """Compile the part in C++ unless it has been, and return its file.

    It takes a minute once for each version of the sources, of torch and of Python.

    Raises:
        RuntimeError: The compiler fails; the message ends with what it printed.
    """
    import torch  # noqa: PLC0415 - asked for only where a test needs the device

    sources = sorted(_SOURCES.iterdir())
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources))
    key.update(f"{torch.__version__} {sys.implementation.cache_tag} {_compiler()} {_FLAGS}".encode())
    folder = _cache() / key.hexdigest()[:16]
    library = folder / f"native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # of several processes one compiles, the others wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def load(library: Path) -> ModuleType:
    """Load the part in C++ into this process, which gives torch a device."""
    loader = importlib.machinery.ExtensionFileLoader("native", str(library))
    spec = importlib.util.spec_from_file_location("native", library, loader=loader)
    if spec is None:
        raise ImportError(f"{library} is no extension module of this Python")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(library: Path) -> None:
    from torch.utils import cpp_extension  # noqa: PLC0415 - which imports setuptools

    tool: Any = cpp_extension
    # Renamed at the end: a process that ends while it compiles leaves no half a library.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [_compiler(), *_FLAGS, str(_SOURCES / "device.cpp"), "-o", str(made)]
        command += [f"-I{path}" for path in (*tool.include_paths(), sysconfig.get_path("include"))]
        command += [f"-L{path}" for path in tool.library_paths()]
        done = subprocess.run([*command, *_LIBRARIES], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{_compiler()} cannot compile the strict accelerator:\n{done.stderr[-4000:]}")
        made.rename(library)


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _cache() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "par-testing" / "accelerator"
