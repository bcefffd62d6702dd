#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the type of keys and values (--kv-dtype) costs: nll, bytes of a token, speed.

usage: kv_dtype.py run -o FILE [-i PROGRAM] [--device NAME] [--speed MODEL] [--depth LIST]
                       [--batch LIST] [-p N] [-n N] [-r N] [--no-texts]
       kv_dtype.py report [--check] [ROOT]

`run` scores two texts for each type: the validation ids of qwen2-tiny-4m in windows of 512, and, on
a CPU, 40 stories that stories260K tells in fp32, sampled at temperature 1 with seeds 1 to 40, each
alone. (Greedy texts would not do: any change makes them less likely.) With --speed it times prompts
and generation behind --depth tokens as well, an engine for each type in one process, in turns. On a
GPU the types are those that it takes.

`report` puts the tables of bench/results/*-kv-dtype*.json into docs/kv-cache.md.
"""
import argparse
import glob
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
QWEN = os.path.join(ROOT, "tests", "golden", "qwen2-tiny-4m")
TYPES = {"cpu": ["fp32", "fp16", "bf16", "int8", "fp8"], "cuda": ["bf16", "int8", "fp8"]}
NUM_STORIES = 40
RESULTS = os.path.join("bench", "results", "*-kv-dtype*.json")
PAGE = os.path.join("docs", "kv-cache.md")
BEGIN, END = "<!-- kv-dtype-tables: begin -->", "<!-- kv-dtype-tables: end -->"


def call(program, *arguments):
    result = subprocess.run([program, *arguments], capture_output=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join([program, *arguments])}: {result.stderr.decode().strip()}")
    return result.stdout


def score(program, device, kv_dtype, *arguments):
    scored = json.loads(call(program, "perplexity", *arguments, "--json", "--device", device,
                             "--kv-dtype", kv_dtype))
    return scored["nll"] * scored["tokens"], scored["tokens"]


def score_all(program, device, kv_dtype, inputs):
    """(nll per token, tokens) of several inputs."""
    parts = [score(program, device, kv_dtype, *arguments) for arguments in inputs]
    num_tokens = sum(tokens for _, tokens in parts)
    return sum(nll for nll, _ in parts) / num_tokens, num_tokens


def token_bytes(program, model, kv_dtype):
    return json.loads(call(program, "inspect", model, "--json", "--device", "cpu", "--kv-dtype",
                           kv_dtype))["kv_bytes_per_token"]


def time_model(arguments, types):
    """The rows of the bench, each with what the other types took beside it."""
    report = json.loads(call(
        arguments.program, "bench", "model", arguments.speed, "--device", arguments.device,
        "--kv-dtype", types[0], "--beside-kv", ",".join(types[1:]), "-p", arguments.prompt, "-n",
        arguments.generate, "-d", arguments.depth, "-b", arguments.batch, "-r",
        arguments.repetitions, "--no-roofs", "--energy-ms", "0", "-o", "json"))
    keys = ("test", "prompt", "depth", "batch", "tokens_per_s", "deviation", "median_tokens_per_s",
            "step_ms", "kernels", "threads", "kv_dtype", "samples_ns", "beside_kv")
    return [{key: row[key] for key in keys} for row in report["rows"]]


def run(arguments):
    program, device = arguments.program, arguments.device
    types = TYPES["cpu" if device == "cpu" else "cuda"]
    header = json.loads(call(program, "bench", "model", "-p", "1", "-n", "0", "-r", "1",
                             "--no-roofs", "--device", device, "-o", "json"))
    report = {"benchmark": "kv_dtype", "date": header["date"], "machine": header["machine"],
              "gpu": header.get("gpu"), "device": device, "texts": [], "speed": []}
    with tempfile.TemporaryDirectory() as folder:
        texts = [(QWEN, "qwen2-tiny-4m, validation ids in windows of 512",
                  [(QWEN, "--ids", os.path.join(QWEN, "val_ids.json"), "-w", "512")])]
        if device == "cpu":
            stories = []
            for seed in range(1, NUM_STORIES + 1):
                path = os.path.join(folder, str(seed))
                with open(path, "wb") as file:
                    file.write(call(program, "run", "-p", "", "-n", "255", "--temp", "1", "--seed",
                                    str(seed), "--device", "cpu"))
                stories.append(("builtin:stories260K", "--text", path))
            texts.append(("builtin:stories260K", f"stories260K, {NUM_STORIES} stories of its own",
                          stories))
        for model, name, inputs in ([] if arguments.no_texts else texts):
            rows = []
            for kv_dtype in types:
                nll, num_tokens = score_all(program, device, kv_dtype, inputs)
                rows.append({"kv_dtype": kv_dtype, "nll": nll, "tokens": num_tokens,
                             "token_bytes": token_bytes(program, model, kv_dtype)})
            report["texts"].append({"text": name, "rows": rows})
    if arguments.speed is not None:
        report["speed_model"] = arguments.speed
        report["speed"] = time_model(arguments, types)
    with open(arguments.output, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")


def make_source(path, report):
    machine = report["machine"]
    cpu = f"{machine['cpu']}, {machine['num_cpus']} CPUs"
    where = report["gpu"]["name"] if report["gpu"] else cpu
    name = os.path.basename(path)
    return (f"{where}, {report['date'][:10]}, commit {machine['commit']} "
            f"([{name}](../bench/results/{name}))")


def make_texts(report):
    lines = []
    for text in report["texts"]:
        base = text["rows"][0]
        lines += ["", f"| {text['text']} | bytes of a token | nll | over {base['kv_dtype']} |",
                  "|---|---:|---:|---:|"]
        for row in text["rows"]:
            change = "" if row is base else f"{100 * (row['nll'] / base['nll'] - 1):+.3f} %"
            lines.append(f"| {row['kv_dtype']} | {row['token_bytes']} | {row['nll']:.5f} | "
                         f"{change} |")
    return lines


def make_apart(report):
    """Of types that were timed one after the other."""
    tests = list(dict.fromkeys(row["test"] for row in report["speed"]))
    lines = ["", f"| {report['speed_model']}, t/s | " + " | ".join(tests) + " |",
             "|---|" + "---:|" * len(tests)]
    for kv_dtype in dict.fromkeys(row["kv_dtype"] for row in report["speed"]):
        cells = [f"{row['tokens_per_s']:.2f} ± {row['deviation']:.2f}" for row in report["speed"]
                 if row["kv_dtype"] == kv_dtype]
        lines.append(f"| {kv_dtype} | " + " | ".join(cells) + " |")
    return lines


def make_speed(report):
    if "beside_kv" not in report["speed"][0]:
        return make_apart(report)
    first = report["speed"][0]
    names = [engine["name"] for engine in first["beside_kv"]]
    lines = ["", f"| {report['speed_model']} | {first['kv_dtype']}, t/s | " +
             " | ".join(f"{name}, t/s | time, {name} / {first['kv_dtype']}" for name in names) +
             " |", "|---|" + "---:|" * (1 + 2 * len(names))]
    for row in report["speed"]:
        cells = [f"{row['tokens_per_s']:.1f}"]
        for engine in row["beside_kv"]:
            over = engine["time_over_full"]
            cells += [f"{engine['tokens_per_s']:.1f}",
                      f"{over['median']:.3f} ({over['p10']:.3f}-{over['p90']:.3f})"]
        lines.append(f"| {row['test']} | " + " | ".join(cells) + " |")
    return lines


def make_tables(root):
    lines = []
    for path in sorted(glob.glob(os.path.join(root, RESULTS))):
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        lines += [make_source(path, report) + ":", *make_texts(report)]
        if report["speed"]:
            lines += make_speed(report)
        lines.append("")
    return "\n".join(lines)


def report_tables(arguments):
    page = os.path.join(arguments.root, PAGE)
    with open(page, encoding="utf-8") as file:
        text = file.read()
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        sys.exit(f"{page}: expected one pair of the markers {BEGIN} and {END}")
    tables = make_tables(arguments.root)
    made = pattern.sub(lambda _: f"\n{tables}\n", text)
    if arguments.check and made != text:
        sys.exit(f"{page}: expected the tables of {RESULTS}, found others; "
                 "run bench/kv_dtype.py report")
    if made != text:
        with open(page, "w", encoding="utf-8") as file:
            file.write(made)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="score and time")
    running.add_argument("-o", dest="output", metavar="FILE", required=True)
    running.add_argument("-i", dest="program", metavar="PROGRAM",
                         default=os.path.join(ROOT, "build", "imbrex"))
    running.add_argument("--device", default="cpu", help="cpu, or a GPU as imbrex names it")
    running.add_argument("--speed", metavar="MODEL", help="time this one as well")
    running.add_argument("--depth", metavar="LIST", default="0,4096", help="tokens in the context")
    running.add_argument("--batch", metavar="LIST", default="1", help="sequences that generate")
    running.add_argument("-p", dest="prompt", metavar="LIST", default="512", help="tokens to read")
    running.add_argument("-n", dest="generate", metavar="LIST", default="16",
                         help="tokens to generate")
    running.add_argument("-r", dest="repetitions", metavar="N", default="3", help="samples")
    running.add_argument("--no-texts", action="store_true", help="time alone")
    reporting = commands.add_parser("report", help="renew the tables of docs/kv-cache.md")
    reporting.add_argument("--check", action="store_true",
                           help="change nothing, and fail if the page would change")
    reporting.add_argument("root", metavar="ROOT", nargs="?", default=ROOT)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    else:
        report_tables(arguments)


if __name__ == "__main__":
    main()
