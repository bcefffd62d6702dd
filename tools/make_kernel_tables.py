#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of docs/kernels.md. usage: make_kernel_tables.py [--check] [ROOT]

Reads what `imbrex bench ops -o` wrote to bench/results/*-gemm*.json and replaces what stands
between the markers of the page. Files that differ in -run<N> alone are runs of one table: it is
that of the middle one by its geometric mean, with the ratios of the others beside. --check changes
nothing and fails if the page would change.
"""
import glob
import json
import math
import os
import re
import statistics
import sys

PAGE = os.path.join("docs", "kernels.md")
RESULTS = os.path.join("bench", "results", "*-gemm*.json")
BEGIN, END = "<!-- kernel-tables: begin -->", "<!-- kernel-tables: end -->"


def contestant(row, kind):
    return next((entry for entry in row["contestants"] if entry["kind"] == kind), None)


def tile_text(plan):
    """As the table names a tile: pp 128x192 c2x1."""
    schedule = {"pingpong": "pp", "cooperative": "co"}[plan["schedule"]]
    text = f"{schedule} {plan['block_m']}x{plan['block_n']}"
    if plan["cluster_m"] * plan["cluster_n"] > 1:
        text += f" c{plan['cluster_m']}x{plan['cluster_n']}"
    return text + ("*" if plan["num_tiles_n"] else "")


def model_text(row):
    """What the cost model would have chosen, if a measured choice has taken its place: the cheapest
    of all contestants by its own figures."""
    entries = [entry for entry in row["contestants"] if entry["kind"] == "imbrex"]
    model = min(entries, key=lambda entry: entry["plan"]["expected_us"])
    if model is entries[0]:
        return ""
    return f"{tile_text(model['plan'])} {model['speedup_over_gemm']['median']:.3f}"


def ratio_of(row):
    return contestant(row, "imbrex")["speedup_over_gemm"]["median"]


def runs_text(runs):
    """All runs of a table together."""
    ratios = [statistics.median(map(ratio_of, rows))
              for rows in zip(*(result["rows"] for _, result in runs))]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    own = "; ".join(f"[{name}](../bench/results/{name}): "
                    f"{result['summary']['geomean_over_gemm']:.3f}, "
                    f"{result['summary']['cells_at_least_one']} cells, "
                    f"{result['summary']['least_over_gemm']:.3f}" for name, result in runs)
    return (f"By the median of {len(runs)} runs in each cell: geometric mean {mean:.3f}, "
            f"{sum(ratio >= 1 for ratio in ratios)} cells at 1 or more, the least "
            f"{min(ratios):.3f}. Each alone: {own}.")


def make_table(runs):
    name, result = sorted(runs, key=lambda run: run[1]["summary"]["geomean_over_gemm"])[
        len(runs) // 2]
    others = [other for other_name, other in runs if other_name != name]
    lines = [f"**{result['op']}**, {result['gpu']}, driver {result['driver']}, "
             f"{result['date'][:10]}, commit {result['commit']}; {result['pairs']} pairs of "
             f"replays of {result['replay_ms']:g} ms ([{name}](../bench/results/{name})):", ""]
    has_pair = result["op"] == "gemm_swiglu"
    lines.append("| shape | M | cuBLASLt us | ours us | TFLOP/s | tile | GEMM / ours | p10-p90 |"
                 + (" other runs |" if others else "") +
                 (" (GEMM + activation) / ours |" if has_pair else "") +
                 " cost model's tile, GEMM / it | MHz | W |")
    lines.append("|---|" + "---:|" * 4 + "---|" +
                 "---:|" * (2 + bool(others) + has_pair) + "---|---:|---:|")
    for index, row in enumerate(result["rows"]):
        ours, gemm = contestant(row, "imbrex"), contestant(row, "gemm")
        ratio = ours["speedup_over_gemm"]
        cells = [row["shape"], str(row["m"]), f"{gemm['us']['median']:.1f}",
                 f"{ours['us']['median']:.1f}", f"{ours['tflops']:.0f}", tile_text(ours["plan"]),
                 f"{ratio['median']:.3f}", f"{ratio['p10']:.3f}-{ratio['p90']:.3f}"]
        if others:
            cells.append(" ".join(f"{ratio_of(other['rows'][index]):.3f}" for other in others))
        if has_pair:
            both = contestant(row, "gemm and activation")
            cells.append(f"{both['us']['median'] / ours['us']['median']:.3f}")
        cells += [model_text(row), f"{row['sm_clock_mhz']:.0f}", f"{row['watts']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    summary = result["summary"]
    text = (f"Geometric mean {summary['geomean_over_gemm']:.3f} over {summary['cells']} "
            f"{'cell' if summary['cells'] == 1 else 'cells'}, "
            f"{summary['cells_at_least_one']} of them at 1 or more, the least "
            f"{summary['least_over_gemm']:.3f}")
    if has_pair:
        text += f"; {summary['geomean_over_gemm_and_activation']:.3f} over GEMM + activation"
    return lines + ["", text + "."] + (["", runs_text(runs)] if others else [])


def make_page(page, root):
    head, _, rest = page.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        sys.exit(f"{PAGE}: expected the markers {BEGIN} and {END}")
    tables = {}
    for path in sorted(glob.glob(os.path.join(root, RESULTS))):
        name = os.path.basename(path)
        with open(path, encoding="utf-8") as file:
            tables.setdefault(re.sub(r"-run\d+", "", name), []).append((name, json.load(file)))
    lines = []
    for runs in tables.values():
        lines += ["", *make_table(runs)]
    return head + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + tail


def main():
    arguments = sys.argv[1:]
    is_check = "--check" in arguments
    if is_check:
        arguments.remove("--check")
    root = arguments[0] if arguments else "."
    path = os.path.join(root, PAGE)
    with open(path, encoding="utf-8") as file:
        page = file.read()
    made = make_page(page, root)
    if is_check and made != page:
        sys.exit(f"{PAGE}: the tables are not those of bench/results; "
                 "run tools/make_kernel_tables.py")
    if not is_check:
        with open(path, "w", encoding="utf-8") as file:
            file.write(made)


if __name__ == "__main__":
    main()
