#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of docs/kernels.md, docs/cpu-figures.md and docs/gpu.md.

Reads what `imbrex bench ops -o`, `imbrex bench model --json`, bench/peers/llama_cpp.sh -o and
bench/peers/hf_decode.py -o wrote to bench/results and replaces what stands between the markers of
the pages. --check changes nothing and fails if a page would change. Files that differ in -run<N>
alone are runs of one table: that of a GPU's kernels is the middle one by its geometric mean, with
the ratios of the others beside.
"""
import argparse
import datetime
import glob
import json
import math
import os
import re
import statistics
import sys


def contestant(row, kind):
    return next((entry for entry in row["contestants"] if entry["kind"] == kind), None)


def tile_text(plan):
    """As the table names a tile: pp 128x192 c2x1."""
    schedule = {"pingpong": "pp", "cooperative": "co", "multistage": "ms",
                "gate_first": "gf"}[plan["schedule"]]
    text = f"{schedule} {plan['block_m']}x{plan['block_n']}"
    if plan["cluster_m"] * plan["cluster_n"] > 1:
        text += f" c{plan['cluster_m']}x{plan['cluster_n']}"
    return text + ("*" if plan["num_tiles_n"] else "")


def model_text(row):
    """What the cost model would have chosen, if a measured choice has taken its place: the cheapest
    of all contestants by its own figures."""
    entries = [entry for entry in row["contestants"] if entry["kind"] == "imbrex" and
               entry["plan"]["schedule"] != "gate_first"]
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


def gpu_table(runs):
    name, result = sorted(runs, key=lambda run: run[1]["summary"]["geomean_over_gemm"])[
        len(runs) // 2]
    others = [other for other_name, other in runs if other_name != name]
    lines = [f"**{result['op']}**, {result['gpu']}, driver {result['driver']}, "
             f"{result['date'][:10]}, commit {result['commit']}; {result['pairs']} pairs of "
             f"replays of {result['replay_ms']:g} ms ([{name}](../bench/results/{name})):", ""]
    has_pair = result["op"] == "gemm_swiglu"
    baselines = [kind for kind in ("heuristic", "streams")
                 if any(contestant(row, kind) for row in result["rows"])]
    lines.append("| shape | M | cuBLASLt us | ours us | TFLOP/s | tile | GEMM / ours | p10-p90 |"
                 + (" other runs |" if others else "") +
                 (" (GEMM + activation) / ours |" if has_pair else "") +
                 "".join(f" {kind} / ours |" for kind in baselines) +
                 " cost model's tile, GEMM / it | MHz | W |")
    lines.append("|---|" + "---:|" * 4 + "---|" +
                 "---:|" * (2 + bool(others) + has_pair + len(baselines)) + "---|---:|---:|")
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
        for kind in baselines:
            entry = contestant(row, kind)
            cells.append(f"{entry['time_over_first']['median']:.3f}" if entry else "")
        cells += [model_text(row), f"{row['sm_clock_mhz']:.0f}", f"{row['watts']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    summary = result["summary"]
    text = (f"Geometric mean {summary['geomean_over_gemm']:.3f} over {summary['cells']} "
            f"{'cell' if summary['cells'] == 1 else 'cells'}, "
            f"{summary['cells_at_least_one']} of them at 1 or more, the least "
            f"{summary['least_over_gemm']:.3f}")
    if has_pair:
        text += f"; {summary['geomean_over_gemm_and_activation']:.3f} over GEMM + activation"
    for kind in baselines:
        text += f", {summary[f'geomean_{kind}_over_imbrex']:.3f} over {kind}"
    return lines + ["", text + "."] + (["", runs_text(runs)] if others else [])


def gate_first_of(row):
    """The fastest plan of gate_first."""
    return min((entry for entry in row["contestants"] if entry["kind"] == "imbrex" and
                entry["plan"]["schedule"] == "gate_first"),
               key=lambda entry: entry["us"]["median"])


def hidden_table(result):
    rows = []
    for row in result["rows"]:
        times = [entry["us"]["median"] for entry in row["contestants"]]
        shares = [row["hidden"][key] for key in ("share", "share_of_swish")]
        rows.append([row["shape"], str(row["m"]), tile_text(row["contestants"][0]["plan"]),
                     *(f"{time:.1f}" for time in times),
                     *(f"{100 * share['median']:.1f} ({100 * share['p10']:.1f}-"
                       f"{100 * share['p90']:.1f})" for share in shares)])
    return markdown(["shape", "M", "tile", "hidden us", "serialised us", "removed us",
                     "removed, turn held us", "hidden %", "hidden % of Swish alone"], rows, 3)


def sums_text(result):
    """What a share of hidden_table is of."""
    pairs = result["rows"][0].get("hidden", {}).get("pairs_of_share", 1)
    return f", a share of the sums over {pairs} of them" if pairs > 1 else ""


def gate_first_table(runs):
    """gate_first beside the bare GEMM and the chosen kernel, or what it hides of Swish."""
    name, result = runs[0]
    lines = [f"{result['gpu']}, driver {result['driver']}, {result['date'][:10]}, commit "
             f"{result['commit']}, clock {result['clock']}; {result['pairs']} rounds of replays of "
             f"{result['replay_ms']:g} ms{sums_text(result)} "
             f"([{name}](../bench/results/{name})):", ""]
    if "hidden" in result["rows"][0]:
        return lines + hidden_table(result)
    numbers = row_numbers(result)
    shapes = list(dict.fromkeys(row["shape"] for row in result["rows"]))
    cells = {(row["shape"], row["m"]): row for row in result["rows"]}
    table = []
    for shape in shapes:
        texts = []
        for number in numbers:
            row = cells[shape, number]
            best = gate_first_of(row)
            ratio = contestant(row, "imbrex")["us"]["median"] / best["us"]["median"]
            texts.append(f"{best['speedup_over_gemm']['median']:.3f} {ratio:.3f}")
        table.append([shape, *texts])
    summary = result["summary"]["gate_first"]
    return lines + markdown(["GEMM / it, chosen / it", *(f"M = {number}" for number in numbers)],
                            table, 1) + ["", f"Geometric means over {summary['cells']} cells: "
                                         f"{summary['geomean_over_gemm']:.3f} and "
                                         f"{summary['geomean_over_chosen']:.3f}."]


def made_at(name, result):
    """Where and when a result of a CPU came from, and the file."""
    machine = result["machine"]
    return (f"{machine['cpu']}, {machine['num_cpus']} CPUs, {result['date'][:10]}, commit "
            f"{machine['commit']} ([{name}](../bench/results/{name}))")


def digits(value):
    """Four digits, without an exponent."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def markdown(header, rows, num_text):
    """A table whose first columns are text."""
    rule = "|" + "---|" * num_text + "---:|" * (len(header) - num_text)
    return ["| " + " | ".join(header) + " |", rule,
            *("| " + " | ".join(row) + " |" for row in rows)]


def row_numbers(result):
    return sorted({row["m"] for row in result["rows"]})


def by_cell(result):
    """Rows of one op, shape and type together: [(key, {m: row})], in the file's order."""
    cells = {}
    for row in result["rows"]:
        key = row["op"], row["shape"], row["dtype"]
        cells.setdefault(key, {})[row["m"]] = row
    return cells.items()


CACHED_OPS = ("rmsnorm", "rope_kv")


def ops_table(name, result):
    """The fastest path of each cell, that is the file's first."""
    numbers = row_numbers(result)
    rows = []
    for key, by_m in by_cell(result):
        cells = []
        for m in numbers:
            row = by_m.get(m)
            best = row["contestants"][0] if row else None
            # The rows of CACHED_OPS are in the caches, whose rate is no measured roof.
            roof = "" if key[0] in CACHED_OPS else \
                f" ({best['percent_of_roof']['median']:.0f} % {row['bound_by']})" if best else ""
            cells.append(f"{digits(best['us']['median'])}{roof}" if best else "")
        rows.append([*key, *cells])
    header = ["op", "shape", "type", *(f"M = {m}: us (of the roof)" for m in numbers)]
    return [f"Times of the best path, {result['threads']} threads, {made_at(name, result)}:", "",
            *markdown(header, rows, 3)]


def paths_table(name, result):
    """What each path takes on the file's first shape, next to the fastest one."""
    shape = result["rows"][0]["shape"]
    rows = [row for row in result["rows"] if row["shape"] == shape]
    paths = []
    for row in rows:
        for entry in row["contestants"]:
            if entry["path"] not in paths:
                paths.append(entry["path"])
    if len(paths) == 1:  # as the table above says
        return []
    lines = []
    for row in rows:
        times = {entry["path"]: entry["us"]["median"] for entry in row["contestants"]
                 if entry["kind"] == "op"}
        lines.append([row["op"], row["dtype"], str(row["m"]),
                      *(digits(times[path]) if path in times else "" for path in paths)])
    return [f"Each path on {shape}, {result['threads']} threads, {made_at(name, result)}:", "",
            *markdown(["op", "type", "M", *(f"{path}: us" for path in paths)], lines, 2)]


def fused_table(name, result):
    """The MLP beside its unfused pair, on the best path."""
    numbers = row_numbers(result)
    rows = []
    for (op, shape, dtype), by_m in by_cell(result):
        if op != "gemm_swiglu":
            continue
        cells = []
        for m in numbers:
            ratio = by_m[m]["contestants"][0]["unfused_over_fused"] if m in by_m else None
            cells.append(f"{ratio['median']:.3f} ({ratio['p10']:.3f}-{ratio['p90']:.3f})"
                         if ratio else "")
        temporary = 8 * next(iter(by_m.values()))["out_features"]
        rows.append([shape, dtype, *cells, "0", str(temporary)])
    if not rows:
        return []
    header = ["shape", "type", *(f"M = {m}: unfused / fused (p10-p90)" for m in numbers),
              "fused, B/token", "unfused, B/token"]
    return [f"Two products and a pass for the activation by the fused MLP, {result['threads']} "
            f"threads, {made_at(name, result)}:", "", *markdown(header, rows, 2)]


def source_of(name, result):
    """Date, commit and file of a row, where one table holds several files."""
    short = re.sub(r"^\d{4}-\d\d-\d\d-|\.json$", "", name)
    return [f"{result['date'][:10]} {result['machine']['commit']}",
            f"[{short}](../bench/results/{name})"]


def collected(title, header, num_text, rows_of):
    """A table for each title, of the rows of all files."""
    def tables(all_runs):
        found = {}
        for name, result in (run for runs in all_runs for run in runs):
            for row in rows_of(result):
                found.setdefault(title(result), []).append([*row, *source_of(name, result)])
        return [line for text, rows in found.items()
                for line in ("", f"{text}:", "",
                             *markdown([*header, "made", "file"], rows, num_text))]
    return tables


def machine_of(result):
    return f"{result['machine']['cpu']}, {result['machine']['num_cpus']} CPUs"


def model_rows(result):
    """Of a CPU."""
    rows = []
    for row in [] if result.get("gpu") else result["rows"]:
        roof = row["roof"]
        rows.append([row["model"], row["kernels"], str(row["threads"]), row["test"],
                     f"{row['tokens_per_s']:.2f} ± {row['deviation']:.2f}",
                     f"{row['median_tokens_per_s']:.2f}",
                     f"{roof['percent']:.0f} % of {max(roof['samples']) / 1e9:.4g} "
                     f"{'GB/s' if roof['kind'] == 'read' else 'Gop/s'} {roof['kind']}"
                     if roof else ""])
    return rows


def llama_title(result):
    peer = result["llama_cpp"]
    return (f"llama.cpp {peer['commit']} (llama-cpp-python {peer['package']}, {peer['compiler']}), "
            f"{machine_of(result)}")


def llama_rows(result):
    return [[row["file"], row["kernels"], str(row["threads"]), row["test"],
             f"{row['peer']['median']:.2f}", f"{row['ours']['median']:.2f}",
             f"{row['ratio']['median']:.3f}",
             f"{row['ratio']['p10']:.3f}-{row['ratio']['p90']:.3f}",
             str(result["pairs"])] for row in result["rows"]]


def made_on(name, result):
    """Where and when a result of a GPU came from, and the file."""
    gpu = result["gpu"]
    return (f"{gpu['name']}, driver {gpu['driver']}, {result['date'][:10]}, commit "
            f"{result['machine']['commit']} ([{name}](../bench/results/{name}))")


def known(value, form):
    return "" if value is None else format(value, form)


def spread_text(spread):
    return f"{spread['median']:.3f} ({spread['p10']:.3f}-{spread['p90']:.3f})"


def roof_text(roof):
    if not roof:
        return ""
    most = max(roof["samples"]) / 1e12
    return (f"{roof['percent']:.1f} % of {most:.2f} TB/s" if roof["kind"] == "read"
            else f"{roof['percent']:.1f} % of {most:.0f} TFLOP/s")


def share_text(row, name):
    return next((f"{100 * (1 - entry['time_over_full']['median']):.0f} %"
                 for entry in row["without"] if entry["omitted"] and entry["name"] == name), "")


def gpu_model_table(name, result):
    """Whole models on a GPU."""
    if not result.get("gpu"):
        return []
    rows = [[row["model"], row["test"], f"{row['tokens_per_s']:.1f} ± {row['deviation']:.1f}",
             f"{row['step_ms']:.3f}", known(row["step_bytes"] and row["step_bytes"] / 1e9, ".3f"),
             roof_text(row["roof"]), share_text(row, "MLP"), share_text(row, "attention"),
             known(row["joules_per_token"], ".4f"), known(row["sm_clock_mhz"], ".0f"),
             known(row["watts"], ".0f")] for row in result["rows"]]
    header = ["model", "test", "t/s", "ms/step", "GB/step", "of the roof", "MLP", "attention",
              "J/token", "MHz", "W"]
    return [f"{made_on(name, result)}:", "", *markdown(header, rows, 2)]


def ablation_table(name, result):
    """What each part is worth: the time without it over the time with it."""
    names = []
    for row in result["rows"]:
        names += [entry["name"] for entry in row.get("without", [])
                  if not entry["omitted"] and entry["name"] not in names]
    if not names:
        return []
    rows = []
    for row in result["rows"]:
        found = {entry["name"]: entry["time_over_full"] for entry in row["without"]
                 if not entry["omitted"]}
        rows.append([row["model"], row["test"], f"{row['step_ms']:.3f}",
                     *(spread_text(found[part]) if part in found else "" for part in names)])
    header = ["model", "test", "ms/step", *(f"without {part}" for part in names)]
    return [f"Time without a part by the time with it, median (p10-p90) of "
            f"{len(result['rows'][0]['samples_ns'])} pairs, {made_on(name, result)}:", "",
            *markdown(header, rows, 2)]


def parameter_size(model):
    """The number in "qwen2 494M BF16", to know the peer's model by."""
    found = re.search(r" ([\d.]+)([KMB])\b", model)
    return float(found[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[found[2]] if found else 0.0


def our_step_ms(rows, peer):
    """Of the test that the peer's row is, if it was measured; of several the first."""
    for row in rows:
        size, found = peer["parameters"], parameter_size(row["model"])
        kind = "prefill" if row["prompt"] else "decode"
        tokens = peer["tokens"] if kind == "prefill" else row["generate"]
        if (abs(found / size - 1) < 0.02 and kind == peer["kind"] and row["batch"] == peer["batch"]
                and row["depth"] == peer["depth"] and (row["prompt"] or row["generate"]) == tokens):
            return row["step_ms"]
    return None


def seconds_of(run):
    return datetime.datetime.strptime(run["date"], "%Y-%m-%dT%H:%M:%SZ").timestamp()


def transformers_table(name, result):
    """Beside transformers: ours are the results of the same day and machine, those nearest in time.
    Of the patched models, which have no rows, none."""
    if "rows" not in result:
        return []
    rows = []
    runs = []
    begin = name.partition("-hf-")[0]
    for path in sorted(glob.glob(os.path.join(result["folder"], f"{begin}-model-*.json"))):
        with open(path, encoding="utf-8") as file:
            runs.append(json.load(file))
    runs.sort(key=lambda run: abs(seconds_of(run) - seconds_of(result)))
    ours = [row for run in runs for row in run["rows"]]
    for row in result["rows"]:
        if "step_ms" not in row:
            continue
        step_ms = our_step_ms(ours, row)
        rows.append([row["model"], row["test"], f"{row['step_ms']:.3f}", known(step_ms, ".3f"),
                     known(step_ms and row["step_ms"] / step_ms, ".2f")])
    return [f"transformers {result['transformers']}, torch {result['torch']}, {result['gpu']}, "
            f"{result['date'][:10]} ([{name}](../bench/results/{name})):", "",
            *markdown(["model", "test", "transformers ms/step", "imbrex ms/step",
                       "transformers / imbrex"], rows, 2)]


def of_each(table):
    """A table for the runs of each."""
    def tables(all_runs):
        return [line for lines in map(table, all_runs) if lines for line in ("", *lines)]
    return tables


def one_by_one(table):
    """A table of each run."""
    def tables(runs):
        made = [table(name, result) for name, result in runs]
        return [line for lines in made if lines for line in (*lines, "")][:-1]
    return of_each(tables)


# Page, name in its markers, result files, what makes tables of the runs of each.
SECTIONS = [
    ("kernels.md", "kernel-tables", "*-gemm*.json", of_each(gpu_table)),
    ("kernels.md", "gate-first-tables", "*-gate_first-*.json", of_each(gate_first_table)),
    ("kernels.md", "portable-tables", "*-portable-*.json", of_each(gpu_table)),
    ("cpu-figures.md", "ops-tables", "*-ops-*.json", one_by_one(ops_table)),
    ("cpu-figures.md", "paths-tables", "*-ops-*.json", one_by_one(paths_table)),
    ("cpu-figures.md", "fused-tables", "*-ops-*.json", one_by_one(fused_table)),
    ("cpu-figures.md", "model-tables", "*-model-*.json",
     collected(machine_of, ["model", "kernels", "threads", "test", "t/s", "median", "roof"], 2,
               model_rows)),
    ("cpu-figures.md", "llama-cpp-tables", "*-llama-cpp-*.json",
     collected(llama_title, ["file", "kernels", "threads", "test", "llama.cpp t/s", "imbrex t/s",
                             "ours / llama.cpp", "p10-p90", "pairs"], 2, llama_rows)),
    ("gpu.md", "model-tables", "*-model-*.json", one_by_one(gpu_model_table)),
    ("gpu.md", "ablation-tables", "*-model-*.json", one_by_one(ablation_table)),
    ("gpu.md", "transformers-tables", "*-hf-*.json", one_by_one(transformers_table)),
]


def make_section(page, text, section, root):
    name, results, table = section
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        sys.exit(f"{page}: expected the markers {begin} and {end}")
    tables = {}
    for path in sorted(glob.glob(os.path.join(root, "bench", "results", results))):
        file_name = os.path.basename(path)
        with open(path, encoding="utf-8") as file:
            runs = tables.setdefault(re.sub(r"-run\d+", "", file_name), [])
            runs.append((file_name, {**json.load(file), "folder": os.path.dirname(path)}))
    lines = table(tables.values())
    return head + begin + "\n" + "\n".join(lines) + "\n\n" + end + tail


def make_page(page, root, is_check):
    """Whether the page is as it should be, or has become so."""
    path = os.path.join(root, "docs", page)
    with open(path, encoding="utf-8") as file:
        old = file.read()
    new = old
    for name, *section in SECTIONS:
        if name == page:
            new = make_section(os.path.join("docs", page), new, section, root)
    if new != old and not is_check:
        with open(path, "w", encoding="utf-8") as file:
            file.write(new)
    return new == old or not is_check


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true",
                        help="change nothing, and fail if a page would change")
    parser.add_argument("root", metavar="ROOT", nargs="?", default=".",
                        help="the tree (default: the current folder)")
    arguments = parser.parse_args()
    for page in sorted({section[0] for section in SECTIONS}):
        if not make_page(page, arguments.root, arguments.check):
            sys.exit(f"docs/{page}: the tables are not those of bench/results; "
                     "run tools/make_kernel_tables.py")


if __name__ == "__main__":
    main()
