# SPDX-License-Identifier: Apache-2.0
"""`pip install ./python` as a user does it, in a fresh environment and without a network."""
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import BUILD, ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None,
                                reason="this Python has no ensurepip (python3-venv)")

PROGRAM = """
import imbrex, sys
with imbrex.Engine() as engine:
    print(engine.generate("Once upon a time", max_tokens=9).result().text)
print(imbrex._library.library()._name)
assert "torch" not in sys.modules
"""


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Path of a Python that has the package and nothing else."""
    folder = str(tmp_path_factory.mktemp("venv"))
    run(sys.executable, "-m", "venv", folder)
    python = os.path.join(folder, "bin", "python")
    # The build under test is taken as it is: making it is the Makefile's part.
    run(python, "-m", "pip", "install", "--no-index", "--disable-pip-version-check",
        "--config-settings", f"library={BUILD}/libimbrex.so", os.path.join(ROOT, "python"))
    return python


# Fault: the wheel lacks a file, finds its library only in the source tree, or needs PyTorch.
def test_generates(environment, tmp_path):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    text, library = run(environment, "-c", PROGRAM, cwd=tmp_path, env=clean).strip().split("\n")
    assert text == ", there was a little girl named"
    assert library.startswith(os.path.dirname(os.path.dirname(environment)))
    for name in ("py.typed", "ops.py", os.path.join("integrations", "hf.py")):
        assert os.path.isfile(os.path.join(os.path.dirname(os.path.dirname(library)), name))


# Fault: a library that only the building machine has is left out of the wheel.
@pytest.mark.skipif(not shutil.which("ldd"), reason="no ldd here")
def test_carries_what_it_loads(environment, tmp_path):
    library = run(environment, "-c", "import imbrex; print(imbrex._library.library()._name)",
                  cwd=tmp_path).strip()
    folder = os.path.dirname(library)
    loaded = re.findall(r"^\s*(\S+) => (\S+)", run("ldd", library), re.M)
    assert "libjansson.so.4" in dict(loaded)
    for name, path in loaded:
        if not re.match(r"lib(c|m|dl|rt|pthread|gcc_s)\.so", name):
            assert os.path.dirname(path) == folder, f"{name} is {path}"


# Fault: RECORD, by which pip uninstalls and checks, does not name what is there.
def test_uninstall(environment, tmp_path):
    package = run(environment, "-c", "import imbrex; print(imbrex.__path__[0])",
                  cwd=tmp_path).strip()
    run(environment, "-m", "pip", "check")
    run(environment, "-m", "pip", "uninstall", "-y", "imbrex")
    assert not os.path.exists(os.path.join(package, "lib"))


# Fault: a missing library ends in a wheel without one, or in a traceback that names nothing.
def test_missing_library(tmp_path):
    code = ("import wheel_backend; wheel_backend.build_wheel('.', {'library': '/no/such/file.so'})")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            cwd=tmp_path, env=dict(os.environ,
                                                   PYTHONPATH=os.path.join(ROOT, "python")))
    assert result.returncode != 0
    assert "library: expected a file, found nothing at /no/such/file.so" in result.stderr
    assert os.listdir(tmp_path) == []


# Fault: a library that is named as the guide does, from the root of the tree, is looked for where
# pip runs the backend; or one that is named from python/ is not found any more.
@pytest.mark.parametrize("name", ["build/libimbrex.so", "../build/libimbrex.so"])
def test_relative_library(tmp_path, name):
    backend = shutil.copytree(os.path.join(ROOT, "python"), tmp_path / "python",
                              ignore=shutil.ignore_patterns("__pycache__", "tests"))
    for file in ("LICENSE", os.path.join("include", "imbrex.h")):
        os.makedirs(os.path.dirname(tmp_path / file), exist_ok=True)
        shutil.copy(os.path.join(ROOT, file), tmp_path / file)
    os.mkdir(tmp_path / "build")
    os.symlink(os.path.join(BUILD, "libimbrex.so"), tmp_path / "build" / "libimbrex.so")
    os.mkdir(tmp_path / "out")
    run(sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--config-settings",
        f"library={name}", "-w", str(tmp_path / "out"), str(backend), cwd=tmp_path)
    assert len(os.listdir(tmp_path / "out")) == 1
