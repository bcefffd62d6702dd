#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of docs/kv-figures.md.

Reads what `imbrex kv-sim --json` wrote to bench/results/*-kv-sim.json, and in pairs what
`imbrex bench kv --tiers --json` wrote to bench/results/*-kv-tiers-LOAD.json and `imbrex kv-sim
--tier --json`, of the same load, to *-kv-tiers-LOAD-sim.json, what `bench_kv_move` wrote to
*-kv-move-*.json, and what `bench_kv_layers` wrote to *-kv-layers-*.json. Replaces what stands
between the markers of the page. --check changes nothing and fails if the page would change.
"""
import argparse
import glob
import json
import math
import os
import re
import sys

PAGE = os.path.join("docs", "kv-figures.md")
RESULTS = os.path.join("bench", "results", "*-kv-sim.json")
TIERS = os.path.join("bench", "results", "*-kv-tiers-*.json")
MOVES = os.path.join("bench", "results", "*-kv-move-*.json")
LAYERS = os.path.join("bench", "results", "*-kv-layers-*.json")
BEGIN, END = "<!-- kv-tables: begin -->", "<!-- kv-tables: end -->"


def tokens_text(count):
    """As the program shows capacities: 3.1M, 512."""
    for scale, suffix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= scale:
            return f"{count / scale:.4g}{suffix}"
    return str(count)


def number_text(value):
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def hit_text(row):
    text = f"{100 * row['hit_rate']:.2f}"
    if row["closure"] is not None:
        # Halves away from zero, as the program rounds; int() of -0.0 is 0.
        percent = 100 * row["closure"]
        text += f" ({int(math.copysign(math.floor(abs(percent) + 0.5), percent))})"
    return text


def ttft_text(row):
    return f"{number_text(row['ttft_s']['mean'])} / {number_text(row['ttft_s']['p99'])}"


def queue_text(row):
    return number_text(row["mean_queue"])


def rate_text(row):
    return f"{row['prefill_tokens_per_s']:.0f}"


def pair_text(first, second):
    return lambda row: " / ".join(tokens_text(row["prefetch"][key]) for key in (first, second))


def won_text(row):
    won = row["prefetch"]["hit_rate"] - row["hit_rate"]
    tenths = math.copysign(math.floor(abs(1000 * won) + 0.5), won) / 10
    return f"{100 * row['prefetch']['hit_rate']:.2f} ({tenths + 0.0:+.1f})"


def share_text(value):
    return "-" if value is None else f"{100 * value:.1f}"


def precision_text(row):
    prefetch = row["prefetch"]
    return f"{share_text(prefetch['precision'])} / {share_text(prefetch['recall'])}"


def prefetch_ttft_text(row):
    return ttft_text(row["prefetch"])


def cell(text):
    return text.replace("|", "\\|")


def make_table(table, title, rows):
    """rows: [(name, policy, text of a row)]."""
    capacities = list(dict.fromkeys(row["capacity_tokens"] for row in table["rows"]))
    found = {(row["policy"], row["capacity_tokens"]): row for row in table["rows"]}
    yield "| " + " | ".join([title, *map(tokens_text, capacities)]) + " |"
    yield "|---" + "|---:" * len(capacities) + "|"
    for name, policy, text_of in rows:
        texts = [text_of(found[policy, capacity]) for capacity in capacities]
        yield "| " + " | ".join([cell(name), *texts]) + " |"
    yield ""


PREFETCH_TABLES = (
    ("prefetch: hit rate % with it (points won)", won_text),
    ("prefetch: TTFT with it, mean / p99, s", prefetch_ttft_text),
    ("prefetch: precision / recall, %", precision_text),
    ("prefetch: blocks planned / used", pair_text("num_planned", "num_used")),
    ("prefetch: blocks wasted / cancelled", pair_text("num_wasted", "num_cancelled")),
    ("prefetch: blocks late / unforeseen", pair_text("num_late", "num_unforeseen")),
)


def load_text(table):
    if table["prefill_tokens_per_s"] is not None:
        return f"{table['prefill_tokens_per_s']:.9g} uncached prompt tokens/s"
    return f"{table['target_queue']:g} requests waiting under `lru`"


def make_section(table, timeline):
    trace = table["trace"]
    policies = list(dict.fromkeys(row["policy"] for row in table["rows"]))
    yield f"### {trace['trace']}, {load_text(table)}, {timeline}"
    yield ""
    bad = trace["bad_lines"]
    # Some formats do not tell them.
    sessions = f" of {trace['num_sessions']:,} sessions" if trace["num_sessions"] else ""
    yield (f"{trace['num_requests']:,} requests{sessions}, "
           f"{table['rows'][0]['num_requests']:,} scored"
           + (f"; {bad['count']} lines skipped" if bad else "") + ".")
    yield ""
    yield from make_table(table, "hit rate % (closure %)",
                          [(name, name, hit_text) for name in policies])
    yield from make_table(table, "TTFT mean / p99, s",
                          [(name, name, ttft_text) for name in policies])
    planning = [row["policy"] for row in table["rows"] if row.get("prefetch")]
    for title, text_of in PREFETCH_TABLES if planning else ():
        yield from make_table(table, title,
                              [(name, name, text_of) for name in dict.fromkeys(planning)])
    waiting = policies if timeline == "live" else ["lru"]
    yield from make_table(table, "load",
                          [(f"waiting, {name}", name, queue_text) for name in waiting]
                          + [("prefill tokens/s", "lru", rate_text)])


def read_file(path):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    if report["interrupted"]:
        raise ValueError(f"{path}: expected a whole run, found one that was interrupted")
    for trace in [*report["options"]["traces"], report["options"]["starts"] or ""]:
        if os.path.isabs(trace):
            raise ValueError(f"{path}: expected traces named from the folder that they are in, "
                             f"found {trace}, which is nothing elsewhere")
    return report


def make_source(root, path, report):
    machine = report["machine"]
    shown = os.path.relpath(path, root).replace(os.sep, "/")
    commit = f" ({machine['commit']})" if machine["commit"] else ""
    yield f"From [{shown}](../{shown}), imbrex {machine['version']}{commit}, {machine['cpu']}:"
    yield ""
    yield f"    {report['command_line']}"
    yield ""


def make_file(root, path, report):
    yield from make_source(root, path, report)
    for table in report["tables"]:
        yield from make_section(table, report["options"]["timeline"])


def closures(report):
    """{policy: its closures in all rows where lru and MIN differ}"""
    found = {}
    for table in report["tables"]:
        for row in table["rows"]:
            if row["closure"] is not None:
                found.setdefault(row["policy"], []).append(row["closure"])
    return found


def average(values):
    return sum(values) / len(values)


def make_sensitivity(root, reports):
    """One table of all files: the change of the average closure by each number's change."""
    yield "### How much hangs on the numbers of `predictive`"
    yield ""
    for path, report in reports:
        yield from make_source(root, path, report)
    parts = [closures(report) for _, report in reports]
    parts.append({policy: [closure for part in parts for closure in part[policy]]
                  for policy in parts[0]})
    titles = [f"{report['tables'][0]['trace']['trace']}, {len(part['predictive'])} rows"
              for (_, report), part in zip(reports, parts)]
    titles.append(f"all {len(parts[-1]['predictive'])} rows")
    yield "| average closure, %, and its change in points | " + " | ".join(map(cell, titles)) + " |"
    yield "|---" + "|---:" * len(titles) + "|"
    prefix = "predictive "
    for policy in parts[0]:
        if policy == "predictive":
            texts = [f"{100 * average(part[policy]):.2f}" for part in parts]
            yield f"| {policy} | " + " | ".join(texts) + " |"
        elif policy.startswith(prefix) and not policy.startswith(prefix + "-"):
            changes = [100 * (average(part[policy]) - average(part["predictive"]))
                       for part in parts]
            yield (f"| `{cell(policy[len(prefix):])}` | "
                   + " | ".join(f"{round(change, 2) + 0.0:+.2f}" for change in changes) + " |")
    yield ""


def read_whole(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def read_measured(path):
    report = read_whole(path)
    if report["interrupted"]:
        raise ValueError(f"{path}: expected a whole run, found one that was interrupted")
    return report


def simulated_rows(path, report):
    """{(policy, has_host, has_disk): figures}, of all requests."""
    tiers = [tier["name"] for tier in report["options"]["tiers"]]
    if tiers != ["host", "disk"] or report["options"]["warm"] != 0 or len(report["tables"]) != 1:
        raise ValueError(f"{path}: expected one load with all requests scored and the tiers host "
                         f"and disk, found {tiers}, warm {report['options']['warm']}")
    table, found = report["tables"][0], {}
    num_tokens = table["trace"]["num_tokens"]
    for row in table["rows"]:
        if not row["stacks"]:
            continue
        for below, stack in zip(((False, False), (True, False), (True, True)),
                                [None, *row["stacks"]]):
            whole = row if stack is None else stack["prefetch"]
            num_from = [] if stack is None else stack["num_from"]
            found[row["policy"], *below] = {
                "hit_rate": whole["hit_rate"],
                "computed": round((1 - whole["hit_rate"]) * num_tokens),
                "host": num_from[0] if num_from else 0,
                "disk": num_from[1] if len(num_from) > 1 else 0,
                "p50": whole["ttft_s"]["p50"], "p99": whole["ttft_s"]["p99"]}
    return found


def measured_rows(report):
    """The same, averages over rounds."""
    found = {}
    for run in report["runs"]:
        found.setdefault((run["policy"], run["has_host"], run["has_disk"]), []).append({
            "hit_rate": run["hit_rate"], "computed": run["computed_tokens"],
            "host": run["host_tokens"], "disk": run["disk_tokens"],
            "p50": run["ttft_ms"]["p50"] / 1e3, "p99": run["ttft_ms"]["p99"] / 1e3})
    return {key: {name: average([one[name] for one in rounds]) for name in rounds[0]}
            for key, rounds in found.items()}


TIER_COLUMNS = (
    ("hit rate, %", lambda row: f"{100 * row['hit_rate']:.1f}"),
    ("tokens from RAM", lambda row: f"{row['host']:.0f}"),
    ("from disk", lambda row: f"{row['disk']:.0f}"),
    ("computed", lambda row: f"{row['computed']:.0f}"),
    ("TTFT p50, s", lambda row: number_text(row["p50"])),
    ("TTFT p99, s", lambda row: number_text(row["p99"])),
)


def gpu_text(measured):
    """The GPU of a load, which waits most of the time; "" for a CPU."""
    if not measured.get("gpu"):
        return ""
    gpu, runs = measured["gpu"], measured["runs"]
    return (f" {gpu['name']}, driver {gpu['driver']}, "
            f"{average([run['sm_clock_mhz'] for run in runs]):.0f} MHz, on average "
            f"{average([run['watts'] for run in runs]):.0f} W.")


def make_tiers(root, path):
    """The engine's figures of a load and those of its replay, beside each other."""
    simulated_path = path[:-len(".json")] + "-sim.json"
    measured, simulated = read_measured(path), read_file(simulated_path)
    load, engine = measured["load"], measured["engine"]
    name = os.path.basename(path)[:-len(".json")].split("-kv-tiers-", 1)[1]
    yield f"### Tiers, {name}, {measured['model']} on {engine['device']}: measured / simulated"
    yield ""
    yield from make_source(root, path, measured)
    yield from make_source(root, simulated_path, simulated)
    mib, kv_tokens = 1 << 20, engine["kv_num_blocks"] * engine["kv_block_size"]
    yield (f"{load['requests']:,} requests with {load['different_tokens']:,} different tokens; KV "
           f"cache of {kv_tokens:,} tokens ({kv_tokens * engine['kv_token_bytes'] / mib:.1f} MiB), "
           f"RAM of {engine['kv_host_bytes'] / mib:.1f} MiB, disk of "
           f"{engine['kv_disk_bytes'] / mib:.0f} MiB. One request alone: "
           f"{measured['alone']['prefill_tokens_per_s']:.0f} prompt tokens/s, "
           f"{1e3 * measured['alone']['decode_s_per_token']:.1f} ms a token of output."
           + gpu_text(measured))
    yield ""
    yield "| " + " | ".join(["measured / simulated", *(title for title, _ in TIER_COLUMNS)]) + " |"
    yield "|---" + "|---:" * len(TIER_COLUMNS) + "|"
    of_engine, of_replay = measured_rows(measured), simulated_rows(simulated_path, simulated)
    for key, row in of_engine.items():
        policy, has_host, has_disk = key
        title = policy + (" + host" if has_host else "") + (" + disk" if has_disk else "")
        yield "| " + " | ".join([title, *(f"{text(row)} / {text(of_replay[key])}"
                                          for _, text in TIER_COLUMNS)]) + " |"
    yield ""


MOVE_NAMES = {"none": "nothing", "full": "promotions, as many as the tiers take",
              "budget": "promotions for nobody, at {budget_percent} % of the link",
              "both": "promotions, each into a block that is demoted for it",
              "pinned": "copies of 256 MiB of pinned memory"}


def percent_text(spread, base=0):
    low, middle, high = (f"{100 * (spread[key] - base):.1f}" for key in ("p10", "median", "p90"))
    return f"{middle} ({low} to {high})"


def move_texts(mode):
    step, out = mode["step_ms"], mode["out_gb_per_s"]["median"]
    yield f"{step['median']:.3f} ({step['p10']:.3f}, {step['p90']:.3f})"
    if mode["mode"] == "none":
        yield from [""] * 4
    else:
        yield percent_text(mode["step_over_none"], 1)
        yield f"{mode['in_gb_per_s']['median']:.1f}"
        for key in ("in_over_pinned", "in_over_pinned_beside_decode"):
            yield f"{100 * mode[key]['median']:.1f}"
    yield f"{out:.1f}" if out else ""
    for key in ("sm_clock_mhz", "watts"):
        yield f"{mode[key]:.0f}" if key in mode else ""


def device_source(root, path, report):
    machine, gpu = report["machine"], report["gpu"]
    shown = os.path.relpath(path, root).replace(os.sep, "/")
    device = f"{gpu['name']}, driver {gpu['driver']}" if gpu else machine["cpu"]
    return (f"From [{shown}](../{shown}), imbrex {machine['version']} ({machine['commit']}), "
            f"{device}")


def make_moves(root, path):
    """What moves beside decode, and what the steps lose by it."""
    report = read_whole(path)
    idle = report["idle_gb_per_s"]
    yield f"### Moves beside decode, {report['model']}, blocks of {report['block_bytes'] >> 10} KiB"
    yield ""
    yield (f"{device_source(root, path, report)}: {report['sequences']} sequences behind "
           f"{report['context']:,} tokens"
           + (f", {report['rounds']} rounds" if "rounds" in report else "")
           + ". Without decode, GB/s: pinned memory "
           f"{idle['pinned in']['median']:.1f} in, {idle['pinned out']['median']:.1f} out, both at "
           f"once {idle['pinned in of both']['median']:.1f} and "
           f"{idle['pinned out of both']['median']:.1f}; promotions "
           f"{idle['promotions']['median']:.1f}.")
    yield ""
    yield ("| beside decode | step, ms (p10, p90) | slower by, % (p10 to p90 of rounds) "
           "| in, GB/s | of pinned alone, % | of pinned beside decode, % | out, GB/s | SM MHz "
           "| W |")
    yield "|---" + "|---:" * 8 + "|"
    for mode in report["modes"]:
        name = MOVE_NAMES[mode["mode"]].format(**report)
        yield "| " + " | ".join([name, *move_texts(mode)]) + " |"
    yield ""


def clock_text(part):
    if "watts" not in part:
        return ""
    return f" ({part['sm_clock_mhz']:.0f} MHz, {part['watts']:.0f} W)"


def start_text(row):
    return f"{row['ttft_ms']:.2f} ({row['p10_ms']:.2f}, {row['p90_ms']:.2f})"


def beside_texts(row):
    decoders = row["decoders"]
    yield start_text(row)
    yield str(row["layered"])
    yield " / ".join(f"{decoders[key]:.2f}" for key in ("p50_ms", "p99_ms", "longest_ms"))
    yield f"{row['lost_ms']:.2f} ({row['lost_p90_ms']:.2f})"


def make_layers(root, path):
    """The layer-wise start: the time to the first token, and what sequences beside it lose."""
    report = read_whole(path)
    alone, beside = report["alone"], report.get("beside")
    yield (f"### Layer-wise start, {report['model']}, {report['cached_tokens']:,} + "
           f"{report['new_tokens']:,} tokens, blocks of {report['block_bytes'] >> 10} KiB")
    yield ""
    text = (f"{device_source(root, path, report)}: {report['rounds']} rounds; alone"
            f"{clock_text(alone)}")
    titles = ["cached tokens", "groups", "block comes up in, us",
              "alone: ms to the first token (p10, p90)"]
    if beside:
        usual = beside["by_themselves"]
        text += (f", and beside {beside['sequences']} sequences behind {beside['context']:,} "
                 f"tokens and more{clock_text(beside)}, which by themselves have "
                 f"{usual['p50_ms']:.2f} ms between two tokens (p99 {usual['p99_ms']:.2f}, longest "
                 f"{usual['longest_ms']:.2f}); prompts that drew another first id: "
                 f"{beside['other_ids']}")
        titles += ["beside: ms to the first token (p10, p90)", "starts in layers",
                   "ms between two tokens of the others until then, p50 / p99 / longest",
                   "others later by, ms (p90)"]
    yield text + "."
    yield ""
    yield "| " + " | ".join(titles) + " |"
    yield "|---" + "|---:" * (len(titles) - 1) + "|"
    for i, row in enumerate(alone["rows"]):
        texts = [row["mode"], str(row["groups"]), f"{row['block_ns'] / 1e3:.1f}", start_text(row)]
        if beside:
            texts.extend(beside_texts(beside["rows"][i]))
        yield "| " + " | ".join(texts) + " |"
    yield ""


def make_tables(root):
    lines, sensitivities = [], []
    for path in sorted(glob.glob(os.path.join(root, RESULTS))):
        report = read_file(path)
        if report["options"].get("sensitivity"):
            sensitivities.append((path, report))
        else:
            lines.extend(make_file(root, path, report))
    if sensitivities:
        lines.extend(make_sensitivity(root, sensitivities))
    for path in sorted(glob.glob(os.path.join(root, TIERS))):
        if not path.endswith("-sim.json"):
            lines.extend(make_tiers(root, path))
    for path in sorted(glob.glob(os.path.join(root, MOVES)),
                       key=lambda path: read_whole(path)["block_bytes"]):
        lines.extend(make_moves(root, path))
    for path in sorted(glob.glob(os.path.join(root, LAYERS)),
                       key=lambda path: (read_whole(path)["block_bytes"], path)):
        lines.extend(make_layers(root, path))
    return "\n".join(lines or ["There are no result files yet.", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true",
                        help="change nothing, and fail if the page would change")
    parser.add_argument("root", metavar="ROOT", nargs="?",
                        default=os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."),
                        help="the tree (default: that of this script)")
    arguments = parser.parse_args()
    root = arguments.root
    page = os.path.join(root, PAGE)
    with open(page, encoding="utf-8") as file:
        text = file.read()
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        sys.exit(f"{page}: expected one pair of the markers {BEGIN} and {END}")
    try:
        tables = make_tables(root)
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"make_kv_tables: {error!r}")
    made = pattern.sub(lambda _: f"\n{tables}\n", text)
    if arguments.check and made != text:
        sys.exit(f"{page}: expected the tables of {RESULTS}, found others; "
                 "run tools/make_kv_tables.py")
    if made != text:
        with open(page, "w", encoding="utf-8") as file:
            file.write(made)


if __name__ == "__main__":
    main()
