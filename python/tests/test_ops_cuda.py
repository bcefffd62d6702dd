# SPDX-License-Identifier: Apache-2.0
"""imbrex.ops on a GPU."""
import threading

import pytest

import imbrex
from torch_cases import (HAS_GPU, assert_near, make_weights, make_x, needs_gpu, needs_two_gpus,
                         reference, torch)

pytestmark = needs_gpu
if HAS_GPU:
    from imbrex import ops
    BF16 = torch.bfloat16


def case(num_tokens, hidden, intermediate, device="cuda"):
    x = make_x(num_tokens, hidden, dtype=BF16, device=device)
    return (x, *make_weights(hidden, intermediate, BF16, device))


# Fault: a wrong product; padding or neighbours are written.
@pytest.mark.parametrize("shape", [(1, 64, 16), (65, 200, 72), (300, 896, 1040)])
def test_swiglu(shape):
    x, gate, up = case(*shape)
    expected = reference(x, gate, up)
    assert_near(ops.swiglu(x, gate, up), expected, BF16)
    # Two allocations, and both orders in one.
    assert_near(ops.swiglu(x, gate.clone(), up.clone()), expected, BF16)
    assert_near(ops.swiglu(x, gate_up=torch.cat([gate, up])), expected, BF16)
    assert_near(ops.swiglu(x, gate_up=torch.cat([up, gate]), up_first=True), expected, BF16)
    padded = torch.full((shape[0], shape[1] + 16), float("nan"), dtype=BF16, device="cuda")
    padded[:, 8:-8] = x
    assert_near(ops.swiglu(padded[:, 8:-8], gate, up), expected, BF16)
    assert_near(ops.linear(x, gate), x.cpu().double() @ gate.cpu().double().T, BF16)


# Fault: the variant that was asked for is not the one that runs, or computes something else.
def test_plans():
    x, gate, up = case(300, 896, 1040)
    expected = reference(x, gate, up)
    schedules = {one["schedule"] for one in ops.variants() if not one["is_portable"]}
    assert len(schedules) > 1
    for schedule in schedules:
        plan = ops.choose_plan(300, 896, 1040, schedule=schedule)
        assert plan.schedule == schedule
        assert_near(ops.swiglu(x, gate, up, plan=plan), expected, BF16)
    with pytest.raises(imbrex.Error) as caught:
        ops.choose_plan(300, 896, 1040, schedule="none such")
    assert caught.value.status == imbrex.Status.UNSUPPORTED


# Fault: rules of the kernels come out as a failure of the GPU, or as wrong numbers.
@pytest.mark.parametrize("call, message", [
    (lambda x, g, u: ops.swiglu(x[:, 1:], g[:, 1:], u[:, 1:]), "16"),
    (lambda x, g, u: ops.swiglu(x, g[:9], u[:9]), "multiple of 8"),
])
def test_refusals(call, message):
    with pytest.raises(imbrex.Error) as caught:
        call(*case(64, 128, 64))
    assert message in caught.value.message
    with pytest.raises(TypeError):
        ops.swiglu(*(tensor.float() for tensor in case(64, 128, 64)))
    with pytest.raises(ValueError):
        x, gate, up = case(64, 128, 64)
        ops.swiglu(x, gate.cpu(), up)
    torch.cuda.synchronize()


# Fault: a launch goes to another stream than the current one, and reads x before it is there.
def test_current_stream():
    x, gate, up = case(256, 896, 1040)
    expected = reference(x, gate, up)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.full_like(x, float("nan"))
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        y = ops.swiglu(late, gate, up)
    stream.synchronize()
    assert_near(y, expected, BF16)


# Fault: a captured launch keeps what was on the host, or two replays share memory.
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=needs_two_gpus)])
@pytest.mark.parametrize("options", [{}, {"schedule": "gate_first"}, {"alpha": 1.702}])
def test_graphs_on_two_streams(device, options):
    options = dict(options)
    if "schedule" in options:
        options["plan"] = ops.choose_plan(200, 896, 1040, schedule=options.pop("schedule"),
                                          device=torch.device(device).index)
    with torch.cuda.device(device):
        check_graphs_on_two_streams(device, options)


def check_graphs_on_two_streams(device, options):
    semantics = {name: value for name, value in options.items() if name != "plan"}
    graphs = []
    for seed in (3, 4):
        x = make_x(200, 896, dtype=BF16, device=device, seed=seed)
        gate, up = make_weights(896, 1040, BF16, device, seed=seed)
        ops.swiglu(x, gate, up, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Without a stream of its own, a capture is on one of the first device that captured.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            y = x
            for _ in range(20):
                y = ops.swiglu(x, gate, up, **options)
        graphs.append((graph, x, gate, up, y, torch.cuda.Stream()))
    for round_idx in range(3):
        torch.cuda.synchronize()
        for graph, x, gate, up, y, stream in graphs:
            with torch.cuda.stream(stream):
                x.copy_(make_x(200, 896, dtype=BF16, seed=10 + round_idx), non_blocking=True)
                y.fill_(float("nan"))
                graph.replay()
        torch.cuda.synchronize()
        for graph, x, gate, up, y, stream in graphs:
            assert_near(y, reference(x, gate, up, **semantics), BF16)


# Fault: Inductor copies, reorders or breaks at the operator; a graph of reduce-overhead is stale.
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    x, gate, up = case(128, 896, 1040)
    both = torch.cat([gate, up])

    @torch.compile(fullgraph=True, mode=mode)
    def forward(x):
        return ops.swiglu(x * 2, gate_up=both) * 0.5

    with torch.inference_mode():
        for seed in range(4):
            x = make_x(128, 896, dtype=BF16, device="cuda", seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            assert_near(forward(x), 0.5 * reference(x * 2, gate, up), BF16)


# Fault: PyTorch's own check of schema, fake kernel and real kernel.
def test_opcheck():
    x, gate, up = case(64, 128, 64)
    torch.library.opcheck(torch.ops.imbrex.swiglu,
                          (x, gate, up, None, None, 0, 0, 1.0, 0.0, 0.0, 0, False, []))


# Fault: threads that launch at once meet in one params struct or in the table of descriptors.
def test_threads():
    cases = [case(64 + 8 * i, 256, 128) for i in range(6)]
    expected = [reference(*one) for one in cases]
    results = [None] * 6

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                results[i] = ops.swiglu(*cases[i])

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected):
        assert_near(found, wanted, BF16)


# Fault: a prepared product is another one, in a graph or for another number of tokens too.
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=needs_two_gpus)])
@pytest.mark.parametrize("options", [{}, {"rounding": "match_unfused"}, {"activation": "gelu"}])
def test_prepared(device, options):
    x, gate, up = case(300, 896, 1040, device=device)
    prepared = ops.PreparedSwiglu(gate, up, **options)
    with torch.inference_mode(), torch.cuda.device(device):
        for rows in (300, 17, 300):
            assert torch.equal(prepared(x[:rows]), ops.swiglu(x[:rows], gate, up, **options))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            y = prepared(x)
        x.normal_()
        graph.replay()
        assert torch.equal(y, ops.swiglu(x, gate, up, **options))
        padded = torch.zeros(300, 904, device=device, dtype=BF16)
        padded[:, :896] = x
        assert torch.equal(prepared(padded[:, :896]), y)
        with pytest.raises(TypeError):
            prepared(x.float())


# Fault: a tensor of the second GPU is handled in the context or on the stream of the first, which
# is the current one here, by whatever kernel is asked for.
@needs_two_gpus
@pytest.mark.parametrize("options", [
    {}, {"schedule": "cooperative"}, {"schedule": "pingpong"}, {"schedule": "gate_first"},
    {"activation": "gelu"}, {"rounding": "match_unfused"}])
def test_second_gpu(options):
    options = dict(options)
    if "schedule" in options:
        options["plan"] = ops.choose_plan(200, 896, 1040, schedule=options.pop("schedule"),
                                          device=1)
    x, gate, up = case(200, 896, 1040, device="cuda:1")
    expected = reference(x, gate, up, activation=options.get("activation", "silu"))
    if "rounding" in options:
        expected = (torch.nn.functional.silu(ops.linear(x, gate)) * ops.linear(x, up)).cpu()
    found = []
    # In this thread, and in one that never used a GPU.
    ours = threading.Thread(target=lambda: found.append(ops.swiglu(x, gate, up, **options)))
    ours.start()
    ours.join()
    found.append(ops.swiglu(x, gate, up, **options))
    assert len(found) == 2 and torch.cuda.current_device() == 0
    for y in found:
        assert y.device == x.device
        assert_near(y, expected, BF16)
    with pytest.raises(ValueError):
        ops.swiglu(x, gate.to("cuda:0"), up, **options)


SEMANTICS = [{"activation": "gelu"}, {"activation": "gelu_tanh"}, {"activation": "relu"},
             {"alpha": 1.702, "limit": 0.7, "up_offset": 1.0}]


# Fault: semantics are other ones on a GPU than on a CPU.
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_semantics(semantics):
    x, gate, up = case(130, 256, 144)
    biases = {"gate_bias": make_x(144, dtype=BF16, device="cuda", seed=5),
              "up_bias": make_x(144, dtype=BF16, device="cuda", seed=6)}
    assert_near(ops.swiglu(x, gate, up, **biases, **semantics),
                reference(x, gate, up, **biases, **semantics), BF16)


# Fault: interleaved rows are paired wrongly.
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("up_first", [False, True])
def test_interleaved(rows, up_first):
    x, gate, up = case(130, 256, 144)
    first, second = (up, gate) if up_first else (gate, up)
    packed = torch.stack([first.reshape(-1, rows, 256), second.reshape(-1, rows, 256)], 1)
    y = ops.swiglu(x, gate_up=packed.reshape(288, 256), interleave_rows=rows, up_first=up_first)
    assert_near(y, reference(x, gate, up), BF16)


# Fault: match_unfused is not what two products and PyTorch's operations give.
def test_match_unfused():
    x, gate, up = case(130, 256, 144)
    separate = torch.nn.functional.silu(ops.linear(x, gate)) * ops.linear(x, up)
    assert torch.equal(ops.swiglu(x, gate, up, rounding="match_unfused"), separate)
