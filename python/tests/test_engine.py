# SPDX-License-Identifier: Apache-2.0
"""imbrex.Engine on a CPU with the built-in model. The engine itself has its tests in tests/; these
are for what Python adds."""
import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import threading

import pytest

from conftest import ROOT
import imbrex

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine():
    with imbrex.Engine(num_threads=2) as opened:
        yield opened


def golden():
    path = os.path.join(ROOT, "tests", "golden", "stories260K", "greedy_golden.json")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


# Fault: ids or text of the built-in model are not those that the C library is known to give.
def test_golden_text(engine):
    expected = golden()
    result = engine.generate(expected["prompt_ids"], max_tokens=len(expected["ids"])).result()
    assert result.token_ids == expected["ids"]
    assert result.text == engine.model.detokenize(expected["ids"])
    assert engine.generate(PROMPT, max_tokens=16).result().text == \
        ", there was a little girl named Lily. She loved to play"


# Fault: tokens come at the end all together, out of order, or their texts do not make the text.
def test_tokens_one_by_one(engine):
    generation = engine.generate(PROMPT, max_tokens=8)
    first = next(generation)
    assert first.token_id is not None and first.finish_reason is None
    tokens = [first, *generation]
    assert [token.finish_reason for token in tokens] == [None] * 8 + ["length"]
    assert "".join(token.text for token in tokens) == \
        engine.generate(PROMPT, max_tokens=8).result().text
    assert list(generation) == []


# Fault: a batch gives results in another order than the prompts, or mixes up choices.
def test_batch(engine):
    prompts = [PROMPT, engine.model.tokenize("The cat"), "One day, a dog"]
    options = imbrex.Sampling(max_tokens=10, num_choices=2, temperature=0.8, seed=3)
    results = engine.generate_batch(prompts, options, num_logprobs=1)
    alone = [engine.generate(prompt, options).result() for prompt in prompts]
    assert [[choice.token_ids for choice in result.choices] for result in results] == \
        [[choice.token_ids for choice in result.choices] for result in alone]
    assert len({result.text for result in results}) == 3
    for result in results:
        assert len(result.choices[1].logprobs) == 10 and result.choices[1].logprobs[0] < 0.0
    assert alone[0].choices[0].logprobs is None


# Fault: more prompts than may wait are refused, not in their order, or run one by one; a prompt
# that cannot be taken at all is waited for.
def test_batch_of_more_than_the_queue():
    with imbrex.Engine(num_threads=1, max_running=2, max_waiting=1) as engine:
        prompts = [f"{number} little" for number in range(9)]
        results = engine.generate_batch(iter(prompts), max_tokens=6, num_choices=2,
                                        temperature=1.0, seed=4)
        for prompt, result in zip(prompts, results):
            alone = engine.generate(prompt, max_tokens=6, num_choices=2, temperature=1.0, seed=4)
            assert result.choices == alone.result().choices
        assert len(results) == len(prompts)
        with pytest.raises(imbrex.Error, match="CAPACITY: prompt"):
            engine.generate_batch([*prompts, "a" * 100000], max_tokens=6)
        held = engine.generate(PROMPT)
        with pytest.raises(imbrex.Error, match="CAPACITY: the queue is full"):
            engine.generate_batch(prompts)
        held.close()
        assert engine.generate_batch([]) == []


# Fault: what cannot be told apart from a request with other meaning is taken: letters for prompts,
# bytes for token ids, any object for a switch, no limit for no time.
@pytest.mark.parametrize("call, message", [
    (lambda e: e.generate_batch("One"), "prompts: expected a sequence of prompts, found 'One'"),
    (lambda e: e.generate_batch([1, 2]), "prompt: expected a text or token ids, found 1"),
    (lambda e: e.generate(b"abc"), "prompt: expected a text or token ids, found b'abc'"),
    (lambda e: e.generate(None), "prompt: expected a text or token ids, found None"),
    (lambda e: e.generate([1.5]), "prompt: expected integers: "),
    (lambda e: e.generate([1], max_tokens=-1), "max_tokens: expected a number >= 0, found -1"),
    (lambda e: e.generate([1], timeout=0), "timeout: expected seconds, more than 0 and"),
    (lambda e: e.generate([1], timeout=-1.0), "timeout: expected seconds, more than 0 and"),
    (lambda e: e.generate([1], timeout=float("nan")), "timeout: expected seconds, more"),
    (lambda e: e.generate([1], timeout=float("inf")), "timeout: expected seconds, more"),
    (lambda e: e.generate([1], timeout="1"), "found '1'"),
    (lambda e: e.generate([1], timeout="soon"), "found 'soon'"),
    (lambda e: e.generate([1], stop=5), "stop: expected a text or a sequence of texts, found 5"),
    (lambda e: e.generate([1], stop=None), "stop: expected a text or a sequence of texts, found"),
    (lambda e: e.generate([1], stop=[b"a"]), "found [b'a']"),
    (lambda e: e.generate([1], salt="str"), "salt: expected bytes, found 'str'"),
    (lambda e: e.generate([1], end_token_ids=7), "end_token_ids: expected integers"),
    (lambda e: e.generate([1], logit_bias=[7]), "logit_bias: expected a mapping of token ids"),
    (lambda e: e.generate([1], logit_bias={2**33 + 1: 1.0}), "logit_bias: expected 32-bit"),
    (lambda e: e.generate([1], logit_bias={7: "x"}), "logit_bias: expected a mapping of token ids"),
    (lambda e: e.generate([1], ignore_eos="no"), "ignore_eos: expected True or False, found 'no'"),
    (lambda e: e.generate([1], top_k=1.5), "top_k: expected an integer, found 1.5"),
    (lambda e: e.generate([1], temperature="1"), "temperature: expected a number, found '1'"),
    (lambda e: imbrex.Engine(batch_invariant="x"), "batch_invariant: expected True, False or None"),
    (lambda e: imbrex.Engine(batch_invariant=2), "found 2"),
    (lambda e: imbrex.Engine(compute=[]), "compute: expected auto, f32 or bf16, found []"),
    (lambda e: imbrex.Engine(kv_write="late"), "kv_write: expected computed or demoted"),
    (lambda e: imbrex.Engine(kv_dtype="int4"), "kv_dtype: expected auto, fp32, fp16, bf16, int8"),
    (lambda e: imbrex.Engine(device=0), "device: expected a text, found 0"),
    (lambda e: imbrex.Engine(kv_disk_path=5), "kv_disk_path: expected a path, found 5"),
    (lambda e: imbrex.Engine(tuned="/nope"), "tuned: expected a model that runs on a GPU with it"),
    (lambda e: imbrex.Model(5), "path: expected a path, found 5"),
])
def test_refused_types(engine, call, message):
    with pytest.raises(imbrex.Error) as caught:
        call(engine)
    assert caught.value.status == imbrex.Status.INVALID_ARGUMENT
    assert message in caught.value.message


# Fault: no path is a path of the name None, or a path that is an object is refused.
def test_paths(tmp_path):
    assert imbrex.Model(None).describe().path == imbrex.Model().describe().path
    with imbrex.Engine(None, num_threads=1, kv_disk_path=tmp_path, kv_disk_bytes=1 << 26,
                       kv_host_bytes=1 << 20) as engine:
        assert engine.memory_plan()["kv_disk_bytes"] > 0
    with pytest.raises(imbrex.Error, match="NOT_FOUND: .*none there"):
        imbrex.Model(tmp_path / "none there")


# Fault: what a prompt found below the cache is not told, or is told of another tier.
def test_tiers(tmp_path):
    options = {"num_threads": 1, "kv_disk_path": tmp_path, "kv_disk_bytes": 1 << 27}
    prompt = list(range(300, 365))
    with imbrex.Engine(**options) as engine:
        cold = engine.generate(prompt, max_tokens=3).result()
        again = engine.generate(prompt, max_tokens=3).result()
    with imbrex.Engine(**options) as engine:
        warm = engine.generate(prompt, max_tokens=3).result()
    assert (cold.num_cached_tokens, cold.num_disk_tokens) == (0, 0)
    assert (again.num_cached_tokens, again.num_disk_tokens) == (64, 0)
    assert (warm.num_cached_tokens, warm.num_disk_tokens) == (64, 64)
    assert warm.num_host_tokens == warm.num_remote_tokens == 0
    assert warm.token_ids == cold.token_ids


# Fault: a field of Sampling that never reaches the library.
@pytest.mark.parametrize("changes", [
    {"stop": "girl"}, {"stop": ["no such text", "girl"]}, {"max_tokens": 3},
    {"logit_bias": {403: -100.0}}, {"repetition_penalty": 50.0}, {"end_token_ids": [261]},
    {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"temperature": 2.0, "seed": 1},
])
def test_sampling(engine, changes):
    options = imbrex.Sampling(max_tokens=40)
    plain = engine.generate([1], options).result()
    changed = engine.generate([1], options, **changes).result()
    assert changed.text != plain.text
    if "stop" in changes:
        assert changed.text == plain.text[:plain.text.index("girl")]
        assert changed.choices[0].finish_reason == "stop_string"
    if "end_token_ids" in changes:
        assert changed.token_ids == [403, 407, 261]
        assert changed.choices[0].finish_reason == "eos"


# Fault: top-k and its like are ignored: with a width of one all of them are greedy.
@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}])
def test_filters(engine, changes):
    greedy = engine.generate([1], max_tokens=20).result()
    assert engine.generate([1], max_tokens=20, temperature=3.0, seed=5).result().text != greedy.text
    assert engine.generate([1], max_tokens=20, temperature=3.0, seed=5,
                           **changes).result().text == greedy.text


# Fault: a deadline in seconds is taken for nanoseconds or left out. This one is over at once.
def test_timeout(engine):
    for timeout in (1e-9, 1e-12):
        result = engine.generate([1], timeout=timeout).result()
        assert result.choices[0].finish_reason == "deadline"


# Fault: a failure is a wrong answer, a crash, or an exception without the status and message.
@pytest.mark.parametrize("call, status, message", [
    (lambda e: imbrex.Model("/no/such/model"), "NOT_FOUND", "/no/such/model"),
    (lambda e: imbrex.Model("a\0b"), "INVALID_ARGUMENT", "path"),
    (lambda e: imbrex.Engine(num_threads=-1), "INVALID_ARGUMENT", "num_threads"),
    (lambda e: imbrex.Engine(context_size=2**40), "INVALID_ARGUMENT", "context_size"),
    (lambda e: imbrex.Engine(kv_policy="none such"), "NOT_FOUND", "policy"),
    (lambda e: imbrex.Engine(kv_policy=""), "NOT_FOUND", "kv_policy: expected none or one of"),
    (lambda e: imbrex.Engine(kv_host_bytes=-1), "INVALID_ARGUMENT",
     "kv_host_bytes: expected 0 to 18446744073709551615, found -1"),
    (lambda e: imbrex.Engine(kv_disk_bytes=-5, kv_disk_path="x"), "INVALID_ARGUMENT",
     "kv_disk_bytes: expected 0 to 18446744073709551615, found -5"),
    (lambda e: imbrex.Engine(kv_disk_path="", kv_disk_bytes=1 << 30), "INVALID_ARGUMENT",
     "kv_disk_path: expected a folder, found an empty text"),
    (lambda e: imbrex.Engine(kv_disk_path="x"), "INVALID_ARGUMENT",
     "kv_disk_path: expected kv_disk_bytes with it"),
    (lambda e: imbrex.Engine(kv_disk_bytes=1 << 30), "INVALID_ARGUMENT",
     "kv_disk_bytes: expected a kv_disk_path with it"),
    (lambda e: imbrex.Engine(kv_disk_path="/proc/none", kv_disk_bytes=1 << 30), "IO",
     "kv_disk_path: KV folder /proc/none: "),
    (lambda e: imbrex.Engine(kv_host_bytes=1 << 30, kv_policy="none"), "INVALID_ARGUMENT",
     "kv_policy: expected one that keeps blocks"),
    (lambda e: imbrex.Engine(kv_prefetch_percent=-1), "INVALID_ARGUMENT",
     "kv_prefetch_percent: expected a number in [0, 100], found -1"),
    (lambda e: imbrex.Engine(kv_disk_zstd_level=20), "INVALID_ARGUMENT",
     "kv_disk_zstd_level: expected a number in [0, 19], found 20"),
    (lambda e: imbrex.Engine(kv_remote_secret_path="x"), "INVALID_ARGUMENT",
     "kv_remote_secret_path: expected the address"),
    (lambda e: imbrex.Engine(compute="f16"), "INVALID_ARGUMENT", "compute"),
    (lambda e: imbrex.Engine(device="cuda:99999999999"), "INVALID_ARGUMENT", "device"),
    (lambda e: e.generate(PROMPT, top_p=2.0), "INVALID_ARGUMENT", "top_p"),
    (lambda e: e.generate(PROMPT, seed=-1), "INVALID_ARGUMENT", "seed"),
    (lambda e: e.generate(PROMPT, max_tokens="7"), "INVALID_ARGUMENT", "max_tokens"),
    (lambda e: e.generate([]), "INVALID_ARGUMENT", "prompt"),
    (lambda e: e.generate([2**33]), "INVALID_ARGUMENT", "prompt"),
    (lambda e: e.generate([-5]), "INVALID_ARGUMENT", "prompt[0]: expected an id in [0, 512), "
     "found -5"),
    (lambda e: e.generate("\ud800"), "INVALID_ARGUMENT", "prompt"),
    (lambda e: e.generate("a" * 100000), "CAPACITY", ""),
    (lambda e: e.generate(PROMPT, stop=["a\0"]), "INVALID_ARGUMENT", "stop"),
    (lambda e: e.model.detokenize([10**6]), "INVALID_ARGUMENT", "1000000"),
    (lambda e: e.chat([{"role": "user", "content": "hi"}]), "NOT_FOUND", "chat template"),
    (lambda e: e.score([1]), "INVALID_ARGUMENT", ""),
])
def test_errors(engine, call, status, message):
    with pytest.raises(imbrex.Error) as caught:
        call(engine)
    assert caught.value.status == imbrex.Status[status]
    assert message in caught.value.message
    assert str(caught.value) == f"{status}: {caught.value.message}"


# Fault: an unknown option is ignored.
def test_unknown_option(engine):
    with pytest.raises(TypeError):
        engine.generate(PROMPT, max_token=3)


# Fault: cancelling does nothing, loses the end, or leaves the engine unusable.
def test_cancel(engine):
    generation = engine.generate(PROMPT, ignore_eos=True)
    next(generation)
    generation.cancel()
    rest = list(generation)
    assert rest[-1].finish_reason == "cancelled" and len(rest) < 20
    generation.close()
    generation.close()
    generation.cancel()
    assert list(generation) == []
    with pytest.raises(imbrex.Error):
        generation.result()
    assert engine.generate(PROMPT, max_tokens=2).result().text == ", there"


# Fault: a generation that is dropped or left by an exception goes on running, and its engine
# cannot be closed.
def test_ownership():
    engine = imbrex.Engine(max_running=2, max_waiting=2)
    for _ in range(10):
        next(engine.generate(PROMPT))
    gc.collect()
    with pytest.raises(ZeroDivisionError):
        with engine.generate(PROMPT) as generation:
            next(generation)
            raise ZeroDivisionError
    left = engine.generate(PROMPT)
    next(left)
    engine.close()
    engine.close()
    assert list(left) == []
    for call in (lambda: engine.generate(PROMPT), lambda: engine.score([1, 2]),
                 engine.memory_plan):
        with pytest.raises(imbrex.Error) as caught:
            call()
        assert "closed" in caught.value.message


# Fault: what the collector or the interpreter's end finalizes together goes in an order that the
# library does not bear: an engine before its requests, a model before its engine.
@pytest.mark.parametrize("program", [
    # At the end, in a cycle with the module's names.
    "def f(): return e\n"
    "e = imbrex.Engine(); g = e.generate(PROMPT, max_tokens=300); next(g)",
    # At the end, held by what is never finalized.
    "import sys; e = imbrex.Engine(); g = e.generate(PROMPT, max_tokens=300); next(g)\n"
    "sys.kept = [e, g]",
    # By the collector, each of the objects first.
    "for order in itertools.permutations(range(3)):\n"
    "    m = imbrex.Model(); e = imbrex.Engine(m); g = e.generate(PROMPT, max_tokens=300)\n"
    "    next(g); things = [(m, e, g)[idx] for idx in order]\n"
    "    for thing in things: thing.cycle = things\n"
    "    del m, e, g, thing, things; gc.collect()",
    # The engine's last reference goes before that of a generation, which runs on.
    "g = imbrex.Engine().generate(PROMPT, max_tokens=4); gc.collect()\n"
    "assert g.result().text == ', there was a'; del g",
    # A thread runs the engine until the process ends.
    "import threading; e = imbrex.Engine(); begun = threading.Event()\n"
    "def work():\n"
    "    while True:\n"
    "        for token in e.generate(PROMPT, max_tokens=300): begun.set()\n"
    "threading.Thread(target=work, daemon=True).start(); begun.wait()",
])
def test_finalized_in_any_order(program):
    environment = dict(os.environ, PYTHONPATH=os.path.join(ROOT, "python"))
    code = f"import gc, itertools, sys, imbrex; imbrex.load(sys.argv[1]); PROMPT = {PROMPT!r}\n"
    result = subprocess.run([sys.executable, "-c", code + program,
                             imbrex._library.library()._name],
                            capture_output=True, text=True, env=environment, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


# Fault: a copy shares what the library gave once, and frees it a second time.
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_not_copied(engine, duplicate):
    with engine.generate(PROMPT, max_tokens=4) as generation:
        for thing in (engine, engine.model, generation):
            with pytest.raises(TypeError, match=type(thing).__name__ + " objects cannot be"):
                duplicate(thing)
        assert generation.result().text == ", there was a"


# Fault: a model is closed under an engine that uses it.
def test_shared_model():
    model = imbrex.Model()
    engines = [imbrex.Engine(model, num_threads=1) for _ in range(2)]
    del model
    gc.collect()
    texts = {engine.generate(PROMPT, max_tokens=5).result().text for engine in engines}
    assert texts == {", there was a little"}
    for engine in engines:
        engine.close()


# Fault: threads that share an engine get each other's tokens, or one waits for ever.
def test_threads(engine):
    expected = {seed: engine.generate([1], max_tokens=30, temperature=1.0, seed=seed).result().text
                for seed in range(6)}
    found = {}

    def work(seed):
        found[seed] = engine.generate([1], max_tokens=30, temperature=1.0, seed=seed).result().text

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


# Fault: close() from another thread frees a request that is being waited for.
def test_close_from_another_thread(engine):
    generation = engine.generate([1], ignore_eos=True)
    begun = threading.Event()
    tokens = []

    def work():
        for token in generation:
            tokens.append(token)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    generation.close()
    thread.join()
    assert tokens and list(generation) == []


# Fault: text changes on its way through ids, or special tokens are read where they must not be.
def test_tokenizer(engine):
    model = engine.model
    text = "Once upon a time, \u00e9\u4e2d\U0001f600\0 end"
    assert model.detokenize(model.tokenize(text)) == text
    assert model.tokenize("a")[1:] == model.tokenize("a", add_special=False)
    assert 2 in model.tokenize("a</s>", parse_special=True)
    assert 2 not in model.tokenize("a</s>")


# Fault: a conversation's options are lost, or the reply does not end at the template's end token.
def test_chat(engine):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    messages = [{"role": "user", "content": "a </s> \u00e9"}]
    ids = engine.model.chat_prompt(messages, template=template)
    assert engine.model.detokenize(ids, skip_special=False).endswith("user: a </s> \u00e9</s>")
    assert ids.count(2) == 1
    assert engine.chat(messages, template="chatml", max_tokens=4).result().num_prompt_tokens > 4
    with pytest.raises(imbrex.Error) as caught:
        engine.chat(messages, template="{{ raise_exception('not like this') }}")
    assert "not like this" in caught.value.message


# Fault: likelihoods are those of other tokens.
def test_score(engine):
    ids = engine.model.tokenize(PROMPT)
    nll = engine.score(ids)
    assert len(nll) == len(ids) - 1
    result = engine.generate(ids[:-1], max_tokens=1, num_logprobs=0).result()
    assert result.token_ids == ids[-1:]
    assert abs(result.choices[0].logprobs[0] + nll[-1]) < 1e-4


# Fault: the tiers below the cache are not told of, or forget what an engine had.
def test_kv_folder(tmp_path):
    ids = [1] + [403, 407, 261, 378, 432, 383, 286] * 20
    options = dict(num_threads=2, kv_host_bytes=1 << 22, kv_disk_path=str(tmp_path),
                   kv_disk_bytes=1 << 26)
    results = []
    for _ in range(2):
        with imbrex.Engine(**options) as engine:
            assert engine.memory_plan()["kv_disk_bytes"] == 1 << 26
            results.append(engine.generate(ids, max_tokens=4).result())
    assert (results[0].num_cached_tokens, results[1].num_cached_tokens) == (0, 128)
    assert results[0].text == results[1].text
    (tmp_path / "file").write_text("no folder")
    nowhere = str(tmp_path / "file" / "there")
    with pytest.raises(imbrex.Error) as caught:
        imbrex.Engine(**{**options, "kv_disk_path": nowhere})
    assert nowhere in caught.value.message
    with pytest.raises(imbrex.Error, match="kv_host_bytes"):
        imbrex.Engine(kv_host_bytes=-1)


# Fault: a type of keys and values that does not reach the library, or that its plan hides.
@pytest.mark.parametrize("kv_dtype, token_bytes", [("auto", 1280), ("fp32", 1280), ("fp16", 640),
                                                   ("bf16", 640), ("int8", 400), ("fp8", 400)])
def test_kv_dtype(kv_dtype, token_bytes):
    with imbrex.Engine(num_threads=1, kv_dtype=kv_dtype) as engine:
        plan = engine.memory_plan()
        expected = "fp32" if kv_dtype == "auto" else kv_dtype
        assert (plan["kv_dtype"], plan["kv_token_bytes"]) == (expected, token_bytes)
        assert engine.generate("Once upon", max_tokens=4).result().num_prompt_tokens > 0


# Fault: what the checkpoint and the engine tell is not what they have.
def test_description(engine):
    described = engine.model.describe()
    assert (described.architecture, described.hidden_size, described.vocab_size) == \
        ("llama", 64, 512)
    assert described.eos_token_ids == (1, 2) and described.file_type is None
    plan = engine.memory_plan()
    assert plan["device"] == "cpu" and plan["num_threads"] == 2 and plan["kv_bytes"] > 0


# Fault: the example does not run, or its errors are tracebacks.
def test_example():
    program = os.path.join(ROOT, "python", "examples", "generate.py")
    environment = dict(os.environ, PYTHONPATH=os.path.join(ROOT, "python"))
    code = ("import sys, imbrex, runpy; imbrex.load(sys.argv[1]); sys.argv[:2] = []; "
            "runpy.run_path(sys.argv[0])")
    library = imbrex._library.library()._name
    for arguments, status, output in ((["One day"], 0, "One day, a little"),
                                      (["One day", "/none"], 1, "NOT_FOUND: /none")):
        result = subprocess.run([sys.executable, "-c", code, library, program, *arguments],
                                capture_output=True, text=True, env=environment, timeout=60)
        assert result.returncode == status, result.stderr
        assert (result.stdout + result.stderr).startswith(output)


# Fault: a reader that has enough, such as head, gets a traceback from the example.
def test_example_into_closed_pipe():
    program = os.path.join(ROOT, "python", "examples", "generate.py")
    environment = dict(os.environ, PYTHONPATH=os.path.join(ROOT, "python"))
    code = ("import sys, imbrex, runpy; imbrex.load(sys.argv[1]); sys.argv[:2] = []; "
            "runpy.run_path(sys.argv[0])")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        result = subprocess.run([sys.executable, "-c", code, imbrex._library.library()._name,
                                 program], stdout=output, stderr=subprocess.PIPE, text=True,
                                env=environment, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
