#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times llama.cpp and imbrex in turns on the same GGUF files; started by llama_cpp.sh.

A pair is one run of each on one test, one after the other; every second pair begins with the other
one, so that a machine that gets slower or faster meanwhile favours neither.
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys

PEER, OURS = "llama.cpp", "imbrex"


def run(command):
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"llama_cpp.py: cannot run {command[0]}: {error.strerror}")
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        sys.exit(f"llama_cpp.py: {command[0]} failed with {result.returncode}: {lines[-1]}")
    try:
        return json.loads(result.stdout)
    except json.JSONDecodeError as error:
        sys.exit(f"llama_cpp.py: {command[0]}: expected JSON on its output: {error}")


def numbers(text):
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"expected whole numbers between commas, found '{text}'")
    return values


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama-cpp", required=True)
    parser.add_argument("--imbrex", required=True)
    parser.add_argument("--threads", type=numbers, required=True)
    parser.add_argument("--prompt", type=numbers, required=True)
    parser.add_argument("--generate", type=numbers, required=True)
    parser.add_argument("--depths", type=numbers, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--cpu", default="auto")
    parser.add_argument("--output")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if min(arguments.threads) < 1:
        parser.error(f"-t: expected at least 1 thread, found {min(arguments.threads)}")
    if not any(arguments.prompt + arguments.generate):
        parser.error("-p and -n: expected tokens in one of them, found 0 in both")
    return arguments


def read_build(folder):
    """What llama_cpp.sh noted about its build: a word and its value a line."""
    with open(os.path.join(folder, "built"), encoding="utf-8") as file:
        return dict(line.rstrip("\n").partition(" ")[::2] for line in file)


def tests(arguments):
    """(name, options that both programs take)."""
    for threads in arguments.threads:
        for depth in arguments.depths:
            suffix = f" @ d{depth}" if depth else ""
            for letter, name, counts in (("-p", "pp", arguments.prompt),
                                         ("-n", "tg", arguments.generate)):
                other = "-n" if letter == "-p" else "-p"
                for count in filter(None, counts):
                    yield (f"{name}{count}{suffix}", threads,
                           [letter, str(count), other, "0", "-d", str(depth), "-t", str(threads),
                            "-r", "1", "-o", "json"])


class Contest:
    def __init__(self, arguments, path):
        self.programs = {
            PEER: [os.path.join(arguments.llama_cpp, "build", "bin", "llama-bench"), "-m", path],
            OURS: [arguments.imbrex, "bench", "model", "-m", path, "--no-roofs",
                   "--device", "cpu", "--cpu", arguments.cpu],
        }
        self.machine = self.kernels = self.peer_build = None

    def sample(self, who, options):
        """Tokens per second."""
        report = run(self.programs[who] + options)
        if who == PEER:
            row = report[0]
            self.peer_build = row.get("build_commit"), row.get("build_number")
            return row["avg_ts"]
        self.machine, self.kernels = report["machine"], report["rows"][0]["kernels"]
        return report["rows"][0]["tokens_per_s"]

    def row(self, name, threads, options, num_pairs):
        samples = {PEER: [], OURS: []}
        for pair in range(num_pairs):
            for who in (PEER, OURS) if pair % 2 == 0 else (OURS, PEER):
                samples[who].append(self.sample(who, options))
        ratios = [ours / peer for ours, peer in zip(samples[OURS], samples[PEER])]
        cuts = statistics.quantiles(ratios, n=10, method="inclusive") if num_pairs > 1 else ratios
        return {
            "test": name, "threads": threads, "kernels": self.kernels,
            "ours": {"median": statistics.median(samples[OURS]), "samples": samples[OURS]},
            "peer": {"median": statistics.median(samples[PEER]), "samples": samples[PEER]},
            "ratio": {"median": statistics.median(ratios), "p10": cuts[0], "p90": cuts[-1]},
        }


def write_report(arguments, build, machine, rows):
    """After each row, so that a run that is broken off leaves those it has."""
    if not arguments.output:
        return
    report = {
        "benchmark": "llama_cpp",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine,
        "llama_cpp": build,
        "pairs": arguments.pairs,
        "rows": rows,
    }
    with open(arguments.output + ".part", "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    os.replace(arguments.output + ".part", arguments.output)


def measure(arguments, path, build, rows):
    contest = Contest(arguments, path)
    for name, threads, options in tests(arguments):
        row = contest.row(name, threads, options, arguments.pairs)
        row = {"file": os.path.basename(path), "file_bytes": os.path.getsize(path), **row}
        rows.append(row)
        write_report(arguments, build, contest.machine, rows)
        print(f"| {row['file'][:32]:<32} | {threads:>7} | {name:<14} | "
              f"{row['peer']['median']:>9.2f} | {row['ours']['median']:>9.2f} | "
              f"{row['ratio']['median']:>5.3f} | {row['ratio']['p10']:.3f}-"
              f"{row['ratio']['p90']:.3f} |", flush=True)


def main():
    arguments = parse_arguments()
    if arguments.output:
        # A name that cannot be written should not cost a run.
        try:
            with open(arguments.output, "a", encoding="utf-8"):
                pass
        except OSError as error:
            sys.exit(f"llama_cpp.py: -o {arguments.output}: {error.strerror}")
    build = read_build(arguments.llama_cpp)
    print(f"llama.cpp {build['commit']} (llama-cpp-python {build['package']}), "
          f"{arguments.pairs} pairs; tokens per second\n")
    print("| file                             | threads | test           | llama.cpp |    imbrex "
          "| ratio | p10-p90     |")
    print("|----------------------------------|--------:|----------------|----------:|----------:"
          "|------:|-------------|", flush=True)
    rows = []
    for path in arguments.files:
        measure(arguments, path, build, rows)


if __name__ == "__main__":
    main()
