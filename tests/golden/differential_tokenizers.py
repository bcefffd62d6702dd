#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares imbrex's ids with those of Hugging Face's `tokenizers` on generated texts.

usage: differential_tokenizers.py [--build DIR] [--texts N] [--seed N] [FOLDER...]

FOLDERs hold a tokenizer.json; without any, those of tests/golden/tokenizers and the Qwen2.5 fixture
of the build. Every difference fails, but for two kinds of texts that are compared and counted
apart: with code points that Python's Unicode version has not assigned (imbrex and Hugging Face have
16.0, utf8proc an older one), and, where a tokenizer normalises, with characters that Hugging Face's
normalization tables, of Unicode 10, do not know. Exits 77 with the reason if the package is not
there.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

HERE = os.path.dirname(os.path.abspath(__file__))

WORDS = """the of and to in is that it was for on as with his they at be this from have or by one
had not but what all were when we there can an your which their said if do will each about how up
out them then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use may water long
don't I'll we've they're it's you'd I'm can't DON'T WE'LL tokenizer Internationalization naïve café
für größer Straße señor où déjà Ελληνικά λόγος Привет мир слово שלום עולם مرحبا بالعالم नमस्ते
दुनिया বাংলা தமிழ் ไทยภาษา 日本語 東京 漢字 ひらがな カタカナ 中文 你好 世界 한국어 안녕하세요 việt ngữ Türkçe İstanbul
""".split()
CODE = ["int main(void) {\n    return 0;\n}\n", "for (i = 0; i < n; i++)", "x += y << 3;",
        "\t\t}\n",
        "def f(a, b=None):\n    return a[b:]\n", "#include <stdio.h>\r\n", "// comment", "a->b.c()",
        "SELECT * FROM t WHERE id != 'x';", "</div>\n", "https://example.org/a?b=c&d=%20",
        "0x7fff", "1e-9", "3.14159", "$100,000.00", "\\n", "{{name}}", "`code`", "**bold**", "@_x9"]
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪", "❤️", "✅", "☃", "🏳️‍🌈", "⓪Ⓐ", "𝔘𝔫𝔦", "½²³", "Ⅷ"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\v", "\f", "\u00a0",
          "\u2003",
          "\u3000", "\u1680", "\u2028", "\u0085", "\u200b", "\u180e", "\ufeff", "     ", "\t\t"]
CONTROLS = [chr(c) for c in (*range(0, 9), *range(14, 32), 127, *range(128, 160), 0x200e, 0x202e)]
MARKS = [chr(c) for c in range(0x300, 0x370)] + list("\u3099\u309a\u05b0\u064b\u093c\u0591\u1ab0")
LETTERS = "aeiouAEIOUcnsyzΑαΩωкйЙカハ가각각\u00c5\u1e0b\ufb01\u0130\u017f"
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'\u017f",
                "\u2019s", "''"]


def assigned():
    """Code points that Python's Unicode version has assigned."""
    return [c for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]


class Generator:
    """Texts of all sorts; the same seed gives the same texts."""

    def __init__(self, seed, specials):
        self.random = random.Random(seed)
        self.specials = specials
        self.assigned = assigned()

    def any_character(self):
        if self.random.random() < 0.5:
            return chr(self.random.choice(self.assigned))
        # Ideographs fill most of Unicode; half of the choices are below them.
        while True:
            code_point = self.random.randrange(0x3400)
            if unicodedata.category(chr(code_point)) != "Cn":
                return chr(code_point)

    def piece(self):
        pick, roll = self.random.choice, self.random.randrange(14)
        if roll < 4:
            return pick(WORDS)
        if roll == 4:
            return pick(CODE)
        if roll == 5:
            return pick(EMOJI)
        if roll == 6:
            return pick(SPACES) * self.random.choice((1, 1, 2, 7))
        if roll == 7:
            return pick(LETTERS) + "".join(pick(MARKS) for _ in range(self.random.randrange(4)))
        if roll == 8:
            return pick(CONTROLS)
        if roll == 9:
            return "".join(pick("0123456789") for _ in range(self.random.randrange(1, 9)))
        if roll == 10:
            return pick(CONTRACTIONS)
        if roll == 11:
            return "".join(self.any_character() for _ in range(self.random.randrange(1, 5)))
        if roll == 12 and self.specials:
            special = pick(self.specials)
            return special if self.random.random() < 0.8 else special[:-1]
        return pick("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ \u2581") * self.random.choice((1, 1, 3))

    def text(self):
        separator = self.random.choice(("", " ", " "))
        count = self.random.choice((1, 2, 3, 5, 8, 13))
        return separator.join(self.piece() for _ in range(count))

    def texts(self, count):
        return [self.text() for _ in range(count)]

    def newer_texts(self, count):
        """Texts with code points that are not assigned."""
        known = set(self.assigned)
        others = [c for c in range(0x20000) if c not in known and not 0xD800 <= c <= 0xDFFF]
        return [self.piece() + chr(self.random.choice(others)) + self.piece()
                for _ in range(count)]


def unknown_characters(tokenizers):
    """What Hugging Face's normalizers, with tables of Unicode 10, leave as it is: combining marks
    out of order, characters that decompose."""
    nfd, nfkd, unknown = tokenizers.normalizers.NFD(), tokenizers.normalizers.NFKD(), set()
    for code_point in range(0x110000):
        character = chr(code_point)
        if unicodedata.category(character) in ("Cn", "Cs"):
            continue
        text = "a" + character + "\u0334"
        if (nfkd.normalize_str(character) != unicodedata.normalize("NFKD", character)
                or (unicodedata.combining(character) > 1
                    and nfd.normalize_str(text) != unicodedata.normalize("NFD", text))):
            unknown.add(character)
    return unknown


def imbrex_ids(build, folder, texts, options):
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".jsonl") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
        file.flush()
        command = [os.path.join(build, "imbrex"), "tokenize", folder, "--jsonl", file.name]
        command += options
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"differential_tokenizers.py: {' '.join(command)}: {result.stderr.strip()}")
    return [json.loads(line) for line in result.stdout.splitlines()]


def compare(name, texts, expected, found):
    """Prints the first differences; returns their number."""
    assert len(expected) == len(found) == len(texts), (len(expected), len(found), len(texts))
    differing = [i for i in range(len(texts)) if expected[i] != found[i]]
    for i in differing[:5]:
        print(f"{name}: {ascii(texts[i])}\n    expected {expected[i]}\n    found    {found[i]}")
    return len(differing)


def check(tokenizers, build, folder, count, seed, unknown):
    """Compares one tokenizer both ways of reading special tokens; returns the differences."""
    with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as file:
        description = json.load(file)
    theirs = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    specials = [token["content"] for token in description["added_tokens"]]
    generator = Generator(seed, specials)
    texts, newer = generator.texts(count), generator.newer_texts(count // 20)
    name = os.path.basename(folder.rstrip("/"))
    normalizes = '"NF' in json.dumps(description["normalizer"])
    apart = [text for text in texts if normalizes and unknown.intersection(text)]
    texts = [text for text in texts if not (normalizes and unknown.intersection(text))]
    num_differing = 0
    for encodes_special, options in ((False, []), (True, ["--no-parse-special", "--no-special"])):
        theirs.encode_special_tokens = encodes_special
        counts = []
        for kind in (texts, apart, newer):
            expected = [encoding.ids for encoding in theirs.encode_batch(
                kind, add_special_tokens=not encodes_special)]
            found = imbrex_ids(build, folder, kind, options)
            if kind is texts:
                counts.append(compare(name, kind, expected, found))
            else:
                counts.append(sum(a != b for a, b in zip(expected, found)))
        num_differing += counts[0]
        print(f"{name}{' '.join(['', *options])}: {len(texts)} texts, {counts[0]} differ; apart: "
              f"{len(apart)} with characters unknown to Hugging Face, {counts[1]} differ; "
              f"{len(newer)} with unassigned code points, {counts[2]} differ")
    return num_differing


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--texts", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("folders", nargs="*")
    arguments = parser.parse_args()
    try:
        import tokenizers
    except ImportError:
        print("SKIP: the Python package `tokenizers` is not installed")
        sys.exit(77)
    folders = arguments.folders
    if not folders:
        root = os.path.join(HERE, "tokenizers")
        folders = [os.path.join(arguments.build, "fixtures", "qwen2.5")]
        folders += [os.path.join(root, name) for name in sorted(os.listdir(root))
                    if os.path.exists(os.path.join(root, name, "tokenizer.json"))]
    print(f"tokenizers {tokenizers.__version__}, Unicode {unicodedata.unidata_version}")
    unknown = unknown_characters(tokenizers)
    print(f"{len(unknown)} characters that Hugging Face's normalizers do not know")
    differing = sum(check(tokenizers, arguments.build, folder, arguments.texts, arguments.seed,
                          unknown) for folder in folders)
    print(f"{differing} differences")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
