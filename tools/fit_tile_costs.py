#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits the constants of src/ops/cuda/tile_choice.c to measured sweeps.

usage: fit_tile_costs.py [--steps N] FILE...

Each FILE is what `imbrex bench ops --plans all -o FILE` wrote. The model below is the one in C. Two
things are made small: how far the expected times of a cell's plans are from the measured ones, up
to a factor of the cell (its clock), near the best plans most; and how much longer the plan that the
model chooses took than the best one. Constants are moved one at a time, at random, and a move is
kept if it helps. Prints the constants, then the loss of each cell.
"""
import argparse
import json
import math
import random

START = {
    "pingpong.rate": 0.941, "pingpong.k_block": 11.6, "pingpong.tile": 1030.0,
    "pingpong.tile_element": 0.0, "pingpong.end_element": 0.309,
    "cooperative.rate": 0.919, "cooperative.k_block": 0.0, "cooperative.tile": 117.0,
    "cooperative.tile_element": 0.297, "cooperative.end_element": 0.0,
    "ONE_WARPGROUP_CLOCKS": 30.0, "FEED_BYTES_PER_CLOCK": 72.2, "SHARED_LOAD_SHARE": 0.90,
    "CLUSTER_TILE_CLOCKS": 200.0, "CLUSTER_LAUNCH_CLOCKS": 2300.0,
    "MEMORY_BYTES_PER_CLOCK": 3870.0, "LAUNCH_CLOCKS": 25800.0, "OVERLAP_EXPONENT": 6.4,
}
LIMITS = {"pingpong.rate": (0.5, 1.0), "cooperative.rate": (0.5, 1.0),
          "SHARED_LOAD_SHARE": (0.5, 1.0), "OVERLAP_EXPONENT": (1.2, 20.0)}
BLOCK_K = 64
PIECE = 16          # rows of weights: what narrower tiles lack
MACS_PER_CLOCK = 2048.0
NEARNESS = 12.0     # weight of a plan falls by e for each 1/12 that it is slower than the best
FIT_WEIGHT = 10.0   # of the mean square of the logarithm, beside the loss


class Plan:
    def __init__(self, row, is_plain, measured_us, plan, num_sms):
        self.schedule = plan["schedule"]
        self.block_m, self.block_n = plan["block_m"], plan["block_n"]
        self.cluster_m, self.cluster_n = plan["cluster_m"], plan["cluster_n"]
        self.measured_us = measured_us
        columns = self.block_n if is_plain else self.block_n // 2
        n = row["hidden_size"] if is_plain else row["intermediate_size"]
        size = self.cluster_m * self.cluster_n
        pieces = self.block_n // PIECE
        self.num_tiles_n = plan.get("num_tiles_n", 0)
        num_tiles = self.num_tiles_n or math.ceil(n / columns)
        num_wide = num_tiles
        if self.num_tiles_n:
            num_wide = math.ceil(n * pieces / columns) - num_tiles * (pieces - 1)
        blocks_m = math.ceil(row["m"] / (self.block_m * self.cluster_m))
        blocks = blocks_m * math.ceil(num_tiles / self.cluster_n)
        clusters = min(num_sms // size, blocks)
        self.waves = math.ceil(blocks / clusters)
        self.wide_waves = math.ceil(blocks_m * math.ceil(num_wide / self.cluster_n) / clusters)
        self.neighbours = size - 1
        self.elements_of_column = self.block_m * columns / self.block_n

    def name(self):
        return (f"{self.schedule} {self.block_m}x{self.block_n} cluster "
                f"{self.cluster_m}x{self.cluster_n} tiles {self.num_tiles_n}")


class Cell:
    def __init__(self, row, is_plain, num_sms):
        self.name = f"{'gemm' if is_plain else 'gemm_swiglu'} {row['shape']} m {row['m']}"
        k = row["intermediate_size"] if is_plain else row["hidden_size"]
        self.num_k_blocks = math.ceil(k / BLOCK_K)
        self.num_bytes = row["bytes"]
        plans = {}
        for contestant in row["contestants"]:
            if contestant["kind"] == "imbrex":
                plan = Plan(row, is_plain, contestant["us"]["median"], contestant["plan"], num_sms)
                plans[plan.name()] = plan
        self.plans = list(plans.values())
        self.best_us = min(plan.measured_us for plan in self.plans)


def overlapped(a, b, exponent):
    return (a ** exponent + b ** exponent) ** (1.0 / exponent)


def tile_clocks(constants, cell, plan, width):
    own = plan.schedule + "."
    exponent = constants["OVERLAP_EXPONENT"]
    products = (plan.block_m * width * BLOCK_K / (MACS_PER_CLOCK * constants[own + "rate"]) +
                constants[own + "k_block"])
    if plan.block_m <= 64:
        products += constants["ONE_WARPGROUP_CLOCKS"]
    share = constants["SHARED_LOAD_SHARE"]
    rows = (plan.block_m * (share if plan.cluster_n > 1 else 1.0) +
            plan.block_n * (share if plan.cluster_m > 1 else 1.0))
    loads = rows * BLOCK_K * 2 / constants["FEED_BYTES_PER_CLOCK"]
    return (cell.num_k_blocks * overlapped(products, loads, exponent) + constants[own + "tile"] +
            constants[own + "tile_element"] * plan.elements_of_column * width +
            constants["CLUSTER_TILE_CLOCKS"] * plan.neighbours)


def expected_clocks(constants, cell, plan):
    waves = (plan.wide_waves * tile_clocks(constants, cell, plan, plan.block_n) +
             (plan.waves - plan.wide_waves) *
             tile_clocks(constants, cell, plan, plan.block_n - PIECE))
    fixed = (constants["LAUNCH_CLOCKS"] + constants["CLUSTER_LAUNCH_CLOCKS"] * plan.neighbours +
             constants[plan.schedule + ".end_element"] * plan.elements_of_column * plan.block_n)
    memory = cell.num_bytes / constants["MEMORY_BYTES_PER_CLOCK"]
    return fixed + overlapped(waves, memory, constants["OVERLAP_EXPONENT"])


def judge(constants, cell):
    """(mean square of the logarithm of expected / measured, loss of the choice, the choice)"""
    weights, logs = [], []
    chosen, least = None, math.inf
    for plan in cell.plans:
        clocks = expected_clocks(constants, cell, plan)
        if clocks < least:
            chosen, least = plan, clocks
        weights.append(math.exp(-NEARNESS * math.log(plan.measured_us / cell.best_us)))
        logs.append(math.log(clocks / plan.measured_us))
    mean = sum(w * x for w, x in zip(weights, logs)) / sum(weights)
    square = sum(w * (x - mean) ** 2 for w, x in zip(weights, logs)) / sum(weights)
    return square, math.log(chosen.measured_us / cell.best_us), chosen


def score(constants, cells):
    judged = [judge(constants, cell) for cell in cells]
    return sum(FIT_WEIGHT * square + loss for square, loss, _ in judged) / len(cells)


def search(cells, num_steps):
    source = random.Random(1)
    constants, least = dict(START), score(START, cells)
    names = [name for name, value in START.items() if value != 0.0]
    spread = {name: 0.25 for name in names}
    for _ in range(num_steps):
        name = source.choice(names)
        low, high = LIMITS.get(name, (0.0, math.inf))
        moved = dict(constants)
        moved[name] = min(high, max(low, moved[name] * math.exp(source.gauss(0, spread[name]))))
        found = score(moved, cells)
        if found < least:
            constants, least = moved, found
            spread[name] = min(0.5, spread[name] * 1.3)
        else:
            spread[name] = max(0.01, spread[name] * 0.93)
    return constants


def read_cells(path):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    return [Cell(row, report["op"] == "gemm", report["num_sms"]) for row in report["rows"]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    cells = [cell for path in options.files for cell in read_cells(path)]
    constants = search(cells, options.steps) if options.steps > 0 else START
    for name, value in constants.items():
        print(f"{name:26} {value:.4g}")
    losses = []
    for cell in cells:
        _, loss, chosen = judge(constants, cell)
        losses.append(loss)
        print(f"{cell.name:28} {100 * loss:6.1f} %  {chosen.name()}")
    print(f"{len(cells)} cells: the choice is {100 * sum(losses) / len(losses):.2f} % slower than "
          "the best plan in geometric mean")


if __name__ == "__main__":
    main()
