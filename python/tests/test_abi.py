# SPDX-License-Identifier: Apache-2.0
"""What Python believes of the library against what the headers say."""
import ctypes
import os
import re
import shutil
import subprocess

import pytest

from conftest import ROOT
import imbrex
from imbrex import _abi
from imbrex._abi import ACTIVATIONS, ROUNDINGS

CC = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def header(name):
    with open(os.path.join(ROOT, "include", name), encoding="utf-8") as file:
        return re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)


# Fault: a struct got a field, lost one or changed its order or size, and Python still writes the
# old one: into other fields, or past the end.
@pytest.mark.skipif(CC is None, reason="no C compiler here")
def test_structs(tmp_path):
    lines = ['#include <imbrex.h>', '#include <imbrex_ops.h>', '#include <stdio.h>',
             'int main(void) {']
    expected = []
    for struct in _abi.STRUCTS:
        c = f"struct {struct.c_name}"
        lines.append(f'printf("{c} %zu\\n", sizeof({c}));')
        expected.append(f"{c} {ctypes.sizeof(struct)}")
        for name, _ in struct._fields_:
            lines.append(f'printf("{name} %zu %zu\\n", offsetof({c}, {name}), '
                         f'sizeof((({c} *)0)->{name}));')
            field = getattr(struct, name)
            expected.append(f"{name} {field.offset} {field.size}")
    source = tmp_path / "layout.c"
    source.write_text("\n".join([*lines, "return 0; }\n"]), encoding="utf-8")
    program = str(tmp_path / "layout")
    built = subprocess.run([CC, "-std=c17", "-I", os.path.join(ROOT, "include"), str(source), "-o",
                            program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    found = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert found.split("\n")[:-1] == expected


# Fault: the same, where only padding hides a new field from the sizes.
@pytest.mark.parametrize("struct", _abi.STRUCTS, ids=lambda struct: struct.c_name)
def test_number_of_fields(struct):
    text = header("imbrex.h") + header("imbrex_ops.h")
    body = re.search(r"struct %s \{(.*?)\};" % struct.c_name, text, re.S).group(1)
    fields = [name for part in body.split(";") if part.strip() for name in part.split(",")]
    assert len(fields) == len(struct._fields_), body


# Fault: a status, an activation or a rounding is called by another one's name.
def test_enums():
    statuses = dict(re.findall(r"X\((\w+), (\d+), ", header("imbrex.h")))
    assert {status.name: str(int(status)) for status in imbrex.Status} == statuses
    for name, prefix, names in (
            ("imbrex_activation", "IMBREX_ACTIVATION_", ("silu", "gelu_erf", "gelu_tanh", "relu")),
            ("imbrex_rounding", "IMBREX_ROUNDING_", ROUNDINGS)):
        body = re.search(r"enum %s \{(.*?)\};" % name, header("imbrex_ops.h"), re.S).group(1)
        assert [value.strip() for value in body.split(",") if value.strip()] == [
            prefix + one.upper() for one in names]
    assert ACTIVATIONS == ("silu", "gelu", "gelu_tanh", "relu")


# Fault: the package of one version with the library of another.
def test_version():
    found = imbrex._library.library().imbrex_version().decode()
    assert found == imbrex.__version__
    assert f'#define IMBREX_VERSION "{found}"' in header("imbrex.h")
