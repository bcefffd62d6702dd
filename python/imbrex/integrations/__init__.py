# SPDX-License-Identifier: Apache-2.0
"""Imbrex inside other libraries, each imported by its name."""
