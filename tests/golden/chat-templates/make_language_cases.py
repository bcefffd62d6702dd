#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders the templates of language_cases.json with Jinja2, set up as Hugging Face does.

usage: make_language_cases.py [--check]

Writes the file anew, with the texts and errors that this machine's Jinja2 gives; --check only tells
what would change. Needs Debian's python3-jinja2. New cases: add {"template": ...} and run it.
"""
import copy
import datetime
import json
import os
import sys

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "language_cases.json")


class Generation(Extension):
    """{% generation %}: prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def strftime_now(format_string):
    return datetime.datetime(2026, 1, 1).strftime(format_string)


def render(template, variables):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    try:
        # a copy: some filters of Jinja change their argument
        text = environment.from_string(template).render(**copy.deepcopy(variables))
        return {"text": text}
    except Exception as error:  # whatever a template can raise
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    with open(PATH, encoding="utf-8") as file:
        document = json.load(file)
    num_changes = 0
    for case in document["cases"]:
        result = render(case["template"], document["variables"])
        known = {key: case[key] for key in ("text", "error") if key in case}
        if known.keys() != result.keys() or known.get("text") != result.get("text"):
            num_changes += 1
            print(f"{case['template']!r}: {known} is now {result}")
            for key in known:
                del case[key]
            case.update(result)
    print(f"{len(document['cases'])} cases, {num_changes} changes, Jinja2 {jinja2.__version__}")
    if num_changes and "--check" not in sys.argv:
        rows = {name: ",\n".join(json.dumps(row, ensure_ascii=False) for row in document[name])
                for name in ("cases", "differences")}
        variables = json.dumps(document["variables"], ensure_ascii=False)
        with open(PATH, "w", encoding="utf-8") as file:
            file.write(f'{{"jinja2": "{jinja2.__version__}",\n"variables": {variables},\n'
                       f'"cases": [\n{rows["cases"]}\n],\n'
                       f'"differences": [\n{rows["differences"]}\n]}}\n')
    return 1 if num_changes and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
