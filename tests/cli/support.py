# SPDX-License-Identifier: Apache-2.0
"""What the tests of the program share: running it, and making small models to run it on.

The tests are run from the root of the tree and write below the build folder only.
"""
import array
import json
import os
import pty
import random
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUILD = os.path.abspath(os.environ.get("IMBREX_BUILD", os.path.join(ROOT, "build")))
# A shell that runs the tests in the background lets them ignore Ctrl-C, and so all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Texts and figures are those of a CPU, also where there is a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

IMBREX = os.path.abspath(os.environ.get("IMBREX", os.path.join(BUILD, "imbrex")))
BUILTIN = os.path.join(ROOT, "models", "stories260K")

# No test waits for time to pass: this only ends a program that hangs.
TIMEOUT_S = 120

SANITIZED = False
with open(IMBREX, "rb") as program:
    SANITIZED = b"__asan_init" in program.read()


def open_terminal(test):
    """Both ends of a pseudo-terminal; skips the test where there is none (some containers)."""
    try:
        return pty.openpty()
    except OSError as error:
        return test.skipTest(f"no pseudo-terminal: {error}")


def run(*arguments, **options):
    """Runs the program to its end; stdout and stderr are bytes."""
    options.setdefault("stdin", subprocess.DEVNULL if "input" not in options else None)
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    options.setdefault("timeout", TIMEOUT_S)
    if options["stdin"] is None:
        del options["stdin"]
    return subprocess.run([IMBREX, *map(os.fspath, arguments)], check=False, **options)


def start(*arguments, pipe_bytes=4096, **options):
    """Starts the program with a small pipe as stdout: it stops when nobody reads on."""
    return subprocess.Popen([IMBREX, *map(os.fspath, arguments)], stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                            pipesize=pipe_bytes, **options)


def tensor(dtype, shape, content):
    return {"dtype": dtype, "shape": list(shape), "content": content}


def random_tensor(shape, generator, scale):
    count = 1
    for length in shape:
        count *= length
    values = array.array("f", (generator.gauss(0, scale) for _ in range(count)))
    return tensor("F32", shape, values.tobytes())


def safetensors_header(tensors):
    """The header of tensors laid out one after another, as a dict."""
    header = {}
    offset = 0
    for name, one in tensors.items():
        end = offset + len(one["content"])
        header[name] = {"dtype": one["dtype"], "shape": one["shape"], "data_offsets": [offset, end]}
        offset = end
    return header


def write_safetensors(path, tensors, header=None):
    """`header` replaces the right one: a dict, or bytes."""
    if header is None:
        header = safetensors_header(tensors)
    if isinstance(header, dict):
        header = json.dumps(header).encode()
        header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for one in tensors.values():
            file.write(one["content"])


SMALL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 100000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def small_tensors(config):
    generator = random.Random(1)
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (hidden, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_size, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inter, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inter, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inter)
    shapes["model.norm.weight"] = (hidden,)
    return {name: random_tensor(shape, generator, 0.2) for name, shape in shapes.items()}


class Model:
    """A small random model in its own folder, which a test may spoil."""

    def __init__(self, folder):
        self.folder = folder
        self.config = json.loads(json.dumps(SMALL_CONFIG))
        self.tensors = small_tensors(self.config)
        self.weights = os.path.join(folder, "model.safetensors")
        os.makedirs(folder, exist_ok=True)
        shutil.copy(os.path.join(BUILTIN, "tokenizer.json"), folder)
        os.chmod(os.path.join(folder, "tokenizer.json"), 0o644)
        self.write()

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, header=None):
        self.write_json("config.json", self.config)
        write_safetensors(self.weights, self.tensors, header)

    def write_json(self, name, value):
        with open(self.path(name), "w", encoding="utf-8") as file:
            json.dump(value, file)

    def truncate(self, num_bytes):
        os.truncate(self.weights, num_bytes)


class TestCase(unittest.TestCase):
    """Gives each test a folder of its own below the build folder."""

    maxDiff = 2000

    def setUp(self):
        parent = os.path.join(BUILD, "cli")
        os.makedirs(parent, exist_ok=True)
        self.folder = tempfile.mkdtemp(prefix=self._testMethodName[:40] + ".", dir=parent)
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, content):
        path = self.path(name)
        with open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        return path

    def model(self):
        return Model(self.path("model"))

    def assert_ok(self, result):
        self.assertEqual((result.returncode, result.stderr if result.returncode else b""),
                         (0, b""))

    def assert_error(self, result, exit_code, *parts):
        """One line on stderr that holds all parts: strings, or compiled patterns."""
        text = result.stderr.decode()
        self.assertEqual(result.returncode, exit_code, text)
        self.assertRegex(text, r"\Aimbrex: error: [^\n]+\n\Z")
        for part in parts:
            if isinstance(part, re.Pattern):
                self.assertRegex(text, part)
            else:
                self.assertIn(part, text)
