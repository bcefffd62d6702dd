# SPDX-License-Identifier: Apache-2.0
"""The package of this tree with the library of the build that is tested."""
import os
import sys

TESTS = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(TESTS))
BUILD = os.path.abspath(os.environ.get("IMBREX_BUILD", os.path.join(ROOT, "build")))

sys.path[:0] = [os.path.dirname(TESTS), TESTS]

import imbrex  # noqa: E402

imbrex.load(os.path.join(BUILD, "libimbrex.so"))
