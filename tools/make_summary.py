#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the table of README.md from bench/results.

Each row is the newest result of its kind (the date is in the file) and links it. --check changes
nothing and fails if the page would change.
"""
import argparse
import glob
import json
import math
import os
import statistics
import sys

from make_kernel_tables import markdown, our_step_ms

PAGE = "README.md"
BEGIN, END = "<!-- summary: begin -->", "<!-- summary: end -->"
# As the file names of quantised weights end, and how a reader knows the type.
FILE_TYPES = {"bf16": "bf16", "bf16-activations": "bf16, activations rounded as llama.cpp does",
              "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K_M"}
PEER_DECODE, PEER_PREFILL = "decode x1 @ d512", "prefill 16384"


class Result:
    """A file of bench/results."""

    def __init__(self, path):
        self.name = os.path.basename(path)
        with open(path, encoding="utf-8") as file:
            self.content = json.load(file)

    def __getitem__(self, field):
        return self.content[field]

    def link(self):
        return f"[{self['date'][:10]}](bench/results/{self.name})"


def newest(root, pattern, accepts=lambda result: True):
    """The last by the date within, or None."""
    results = map(Result, glob.glob(os.path.join(root, "bench", "results", pattern)))
    return max(filter(accepts, results), key=lambda result: result["date"], default=None)


def one(values):
    return next(iter(values), None)


def ratio_text(ratios):
    ratios = list(ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{mean:.2f}x ({min(ratios):.2f}-{max(ratios):.2f}, {len(ratios)} sizes)"


def product_rows(root):
    """The fused product of gate and up, beside what others do for it."""
    result = newest(root, "*-paper.json")
    if not result:
        return
    for way, beside in (("eager", "PyTorch: two products, SiLU, product of both"),
                        ("act", "cuBLAS: one product, then an activation kernel"),
                        ("gemm", "cuBLAS: that product alone, without the activation")):
        ratios = (cell["ways"][way]["us"] / cell["ways"]["ours"]["us"] for cell in result["cells"])
        yield [f"{result['gpu']}: fused SwiGLU product, bf16", beside, ratio_text(ratios),
               result.link()]


def is_7b(row):
    return " 7.62B " in row["model"]


def gpu_model_rows(root):
    """A 7B model beside transformers, by the newest file that has the test."""
    for test, peer_test, kind, how in (
            ("tg64 @ d512", PEER_DECODE, "decode", "torch.compile, static cache"),
            ("pp16384", PEER_PREFILL, "prefill", "eager")):
        def own(result, test=test):
            return one(row for row in result["rows"]
                       if is_7b(row) and row["test"] == test and not row.get("without"))
        ours = newest(root, "*-model-7b*.json", lambda result, own=own:
                      result.content.get("gpu") and own(result) and "portable" not in result.name)
        peer = newest(root, f"*-hf-{kind}.json")
        row = peer and one(row for row in peer["rows"]
                           if row["model"] == "7b" and row["test"] == peer_test)
        if not ours or not row:
            continue
        step_ms = our_step_ms([own(ours)], row)
        roof = own(ours)["roof"]
        of_roof = {"read": "measured read rate",
                   "bf16": "bf16 peak of the data sheet"}[roof["kind"]]
        what = "decode behind 512 tokens" if kind == "decode" else "prompt of 16,384 tokens"
        yield [f"{ours['gpu']['name']}: 7B bf16, {what}",
               f"transformers {peer['transformers']}, {how}",
               f"{row['step_ms'] / step_ms:.2f}x; {roof['percent']:.0f} % of the {of_roof}",
               f"{ours.link()}, {peer.link()}"]


def llama_rows(root):
    """Beside llama.cpp on the same file: decode and prompts, of each kind of processor."""
    for device, name in (("epyc-avx2", "2 cores, Zen 3, AVX2"), ("zen5", "2 cores, Zen 5, AVX-512"),
                         ("xeon", "2 cores, Sapphire Rapids, AVX-512")):
        for ending, file_type in FILE_TYPES.items():
            are_rounded = ending.endswith("activations")
            texts, links = [], []
            for begin, what in (("tg", "decode"), ("pp", "prompt")):
                def own(result, begin=begin):
                    return one(row for row in result["rows"] if row["test"].startswith(begin))
                result = newest(root, f"*-{device}*-llama-cpp-0.5b-{ending}*.json",
                                lambda result, own=own, are_rounded=are_rounded:
                                ("activations" in result.name) == are_rounded and own(result))
                if result:
                    texts.append(f"{what} {own(result)['ratio']['median']:.2f}x")
                    links += [result.link()] if result.link() not in links else []
            if texts:
                yield [f"{name}: 0.5B {file_type}", "llama.cpp, the same file", ", ".join(texts),
                       ", ".join(links)]


def run_of(result, policy, has_tiers):
    return one(run for run in result["runs"] if run["policy"] == policy and
               run["has_host"] == has_tiers and run["has_disk"] == has_tiers)


def cache_rows(root):
    """What tiers of the KV cache give to the time of the first token, and what moves cost."""
    for load, what in (("chat", "conversations"), ("agents", "agents")):
        result = newest(root, f"*-h200-kv-tiers-{load}.json")
        if result:
            before, after = (run_of(result, "lru", has_tiers)["ttft_ms"]["p99"]
                             for has_tiers in (False, True))
            yield [f"{result['gpu']['name']}: 7B, {what}, KV cache a third of what they use",
                   "without RAM and disk below it",
                   f"TTFT p99 {before:.0f} -> {after:.0f} ms", result.link()]
    result = newest(root, "*-kv-move-7b.json")
    mode = result and one(mode for mode in result["modes"] if mode["mode"] == "full")
    if mode:
        yield [f"{result['gpu']['name']}: 7B, KV blocks come back from RAM beside decode",
               "plain copies of pinned memory",
               f"{100 * mode['in_over_pinned']['median']:.0f} % of their rate; a step takes "
               f"{100 * (mode['step_over_none']['median'] - 1):.1f} % longer", result.link()]


def make_page(root, is_check):
    """Whether the page is as it should be, or has become so."""
    path = os.path.join(root, PAGE)
    with open(path, encoding="utf-8") as file:
        old = file.read()
    head, _, rest = old.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        sys.exit(f"{PAGE}: expected the markers {BEGIN} and {END}")
    rows = [row for rows in (product_rows, gpu_model_rows, llama_rows, cache_rows)
            for row in rows(root)]
    table = markdown(["what", "beside", "figure", "from"], rows, 4)
    new = "\n".join([head + BEGIN, "", *table, "", END + tail])
    if new != old and not is_check:
        with open(path, "w", encoding="utf-8") as file:
            file.write(new)
    return new == old or not is_check


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true",
                        help="change nothing, and fail if the page would change")
    parser.add_argument("root", metavar="ROOT", nargs="?", default=".",
                        help="the tree (default: the current folder)")
    arguments = parser.parse_args()
    if not make_page(arguments.root, arguments.check):
        sys.exit(f"{PAGE}: the table is not that of bench/results; run tools/make_summary.py")


if __name__ == "__main__":
    main()
