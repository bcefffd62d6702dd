# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel: the Python files, libimbrex.so, and the libraries that it loads.

A build backend as PEP 517 and PEP 660 describe it, without dependencies. Settings, given as
`pip install ./python --config-settings NAME=VALUE`:

    library  a libimbrex.so that is there already, relative to the tree or to this folder; else
             `make` builds one in the tree, with the GPU kernels where there is an nvcc
    build    where make builds it, relative to the tree; build
"""
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(_here)

# What every Linux with glibc has, in one version for all programs.
_SYSTEM_LIBRARIES = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s)|ld-linux.*)\.so\b")
_METADATA = """\
Metadata-Version: 2.1
Name: imbrex
Version: {version}
Summary: An LLM inference engine in C: fused kernels as PyTorch operators, and generation
License: Apache-2.0
Requires-Python: >=3.9
Provides-Extra: torch
Requires-Dist: torch>=2.4; extra == "torch"
Provides-Extra: hf
Requires-Dist: transformers>=4.45; extra == "hf"
"""


def _version():
    with open(os.path.join(_root, "include", "imbrex.h"), encoding="utf-8") as file:
        return re.search(r'^#define IMBREX_VERSION "(.*)"', file.read(), re.M).group(1)


def _tag():
    return "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())


def _build_library(settings):
    """Path of libimbrex.so."""
    given = settings.get("library")
    if given:
        # pip does not tell where it was called, and calls this here.
        places = list(dict.fromkeys(os.path.join(base, given) for base in (_root, _here)))
        found = next((place for place in places if os.path.isfile(place)), None)
        if found is None:
            sys.exit("wheel_backend: library: expected a file, found nothing at " +
                     " or ".join(places))
        return found
    build = settings.get("build", "build")
    target = os.path.join(build, "libimbrex.so")
    if not os.path.isfile(os.path.join(_root, "Makefile")):
        sys.exit(f"wheel_backend: expected the source tree of imbrex in {_root}, found no Makefile;"
                 " name a built library with --config-settings library=PATH")
    if shutil.which("make") is None:
        sys.exit("wheel_backend: make is missing; tools/deps.sh build installs what is needed")
    subprocess.run(["make", "-C", _root, f"-j{os.cpu_count() or 1}", f"BUILD={build}", target],
                   check=True)
    return os.path.join(_root, target)


def _needed(library):
    """(name, path) of the shared libraries that it loads and that not every system has."""
    listed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s*(\S+) => (\S+|not found)", listed, re.M)
    for name, path in found:
        if _SYSTEM_LIBRARIES.match(name):
            continue
        if not path.startswith("/"):
            sys.exit(f"wheel_backend: {library} needs {name}, which is not found")
        yield name, path


def _licence(path):
    """The text that Debian installs beside a library, or None."""
    for place in (os.path.realpath(path), path):
        owner = shutil.which("dpkg") and subprocess.run(
            ["dpkg", "-S", place], capture_output=True, text=True).stdout.split(":")[0]
        text = os.path.join("/usr/share/doc", owner, "copyright") if owner else ""
        if os.path.isfile(text):
            return text
    return None


def _collect_libraries(library, folder):
    """Copies the library and what it needs into `folder`, without debugging symbols."""
    os.makedirs(os.path.join(folder, "licences"), exist_ok=True)
    shutil.copy(library, os.path.join(folder, "libimbrex.so"))
    if shutil.which("strip"):
        subprocess.run(["strip", "-g", os.path.join(folder, "libimbrex.so")], check=True)
    for name, path in _needed(library):
        shutil.copy(os.path.realpath(path), os.path.join(folder, name))
        text = _licence(path)
        if text:
            shutil.copy(text, os.path.join(folder, "licences", name + ".txt"))


def _python_files():
    for parent, folders, names in os.walk(os.path.join(_here, "imbrex")):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "lib"))
        for name in sorted(names):
            path = os.path.join(parent, name)
            yield os.path.relpath(path, _here), path


def _digest(content):
    hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={hashed},{len(content)}"


def _write_wheel(wheel_directory, tag, is_pure, files):
    """files: (name in the wheel, content)."""
    version = _version()
    folder = f"imbrex-{version}.dist-info"
    with open(os.path.join(_root, "LICENSE"), "rb") as file:
        licence = file.read()
    files = [*files, (f"{folder}/METADATA", _METADATA.format(version=version).encode()),
             (f"{folder}/LICENSE", licence),
             (f"{folder}/WHEEL", (f"Wheel-Version: 1.0\nGenerator: imbrex\nRoot-Is-Purelib: "
                                  f"{str(is_pure).lower()}\nTag: {tag}\n").encode())]
    record = "".join(f"{name},{_digest(content)}\n" for name, content in files)
    record += f"{folder}/RECORD,,\n"
    name = f"imbrex-{version}-{tag}.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in [*files, (f"{folder}/RECORD", record.encode())]:
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if ".so" in path else 0o644) << 16
            wheel.writestr(entry, content)
    return name


def _read(path):
    with open(path, "rb") as file:
        return file.read()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    library = _build_library(config_settings or {})
    files = [(name, _read(path)) for name, path in _python_files()]
    with tempfile.TemporaryDirectory() as folder:
        _collect_libraries(library, folder)
        for parent, folders, names in os.walk(folder):
            folders.sort()
            files += [("imbrex/lib/" + os.path.relpath(os.path.join(parent, name), folder),
                       _read(os.path.join(parent, name))) for name in sorted(names)]
    return _write_wheel(wheel_directory, _tag(), False, files)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Points at this folder; the package then loads the library of the tree's build/."""
    settings = dict(config_settings or {})
    if settings.pop("library", None) or settings.pop("build", "build") != "build":
        sys.exit("wheel_backend: an editable install uses the library in build/ of the tree")
    _build_library({})
    return _write_wheel(wheel_directory, "py3-none-any", True,
                        [("imbrex.pth", (_here + "\n").encode())])


def build_sdist(sdist_directory, config_settings=None):
    sys.exit("wheel_backend: a source archive of python/ alone could not build the library: "
             "use `make dist`, or build a wheel")
