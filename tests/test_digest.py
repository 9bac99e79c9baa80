"""digest: sees every bit, place, dtype, shape and key; blind to order, strides and device."""

import subprocess
import sys
from collections import OrderedDict

import pytest
import torch

import truncdet._digest as module
from truncdet import Digest, digest

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def random_words(shape, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        return (data[..., 0] % 2).to(torch.bool).to(device)
    return data.view(dtype)[..., 0].to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_single_bit_changes_it(dtype, device):
    x = random_words((5,), dtype, device)
    seen = {digest(x).hex}
    raw = x.view(torch.uint8)
    flips = [1] if dtype is torch.bool else [1 << bit for bit in range(8)]
    for byte in range(raw.numel()):
        for flip in flips:
            raw[byte] ^= flip
            seen.add(digest(x).hex)
            raw[byte] ^= flip
    assert len(seen) == 1 + raw.numel() * len(flips)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_swap_of_unequal_elements_changes_it(dtype, device):
    x = torch.arange(2 if dtype is torch.bool else 6).to(dtype)
    before = digest(x.to(device))
    index = list(range(len(x)))
    for i in range(len(x)):
        for j in range(i):
            swapped = index.copy()
            swapped[i], swapped[j] = j, i
            other = torch.stack([x[k] for k in swapped])
            assert digest(other.to(device)) != before, (i, j)


def test_repeated_values_do_not_cancel(device):
    digests = {digest(torch.zeros(n, device=device)).hex for n in range(50)}
    assert len(digests) == 50
    ones = {digest(torch.ones(n, dtype=torch.int64, device=device)).hex for n in range(50)}
    assert len(ones | digests) == 100


def test_negative_zero_and_nan_payloads_count(device):
    words = [0, -(2**31), 0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000]
    x = torch.tensor(words, dtype=torch.int32, device=device).view(torch.float32)
    assert len({digest(value) for value in x}) == len(words)
    numbers = [0.0, -0.0, float("nan"), 1.0, 1, True, "1", b"1", None, 0, False, 1j, [], (1,), {}]
    assert len({digest({"a": number}) for number in numbers}) == len(numbers)


def test_dtype_and_shape_and_key_count(device):
    zeros = [torch.zeros(4, dtype=dtype, device=device) for dtype in DTYPES]
    assert len({digest(z) for z in zeros}) == len(DTYPES)
    shapes = [(), (1,), (1, 1), (4,), (2, 2), (1, 4), (4, 1), (0,), (0, 4), (4, 0), (0, 0)]
    assert len({digest(torch.zeros(s, device=device)) for s in shapes}) == len(shapes)
    x = torch.ones(3, device=device)
    nests = [x, {"a": x}, {"b": x}, {"a": {"a": x}}, [x], [[x]], {0: x}, {"0": x}, [x, x]]
    nests += [{"a": x, "b": {}}, {"a": x, "b": []}, {"a": {"b": x}}, {"ab": x}, {"a": [x]}]
    assert len({digest(n) for n in nests}) == len(nests)


def test_values_that_trade_keys_change_it(device):
    x, y = torch.ones(3, device=device), torch.zeros(3, device=device)
    assert digest({"a": x, "b": y}) != digest({"a": y, "b": x})
    assert digest([x, y]) != digest([y, x])


def test_insertion_order_and_mapping_type_do_not_count(device):
    x, y = torch.ones(3, device=device), torch.zeros(2, 2, device=device)
    forward = {"a": x, "b": {"c": y, "d": 1}, "e": "text"}
    backward = OrderedDict([("e", "text"), ("b", OrderedDict([("d", 1), ("c", y)])), ("a", x)])
    assert digest(forward) == digest(backward)
    assert digest([x, y]) == digest((x, y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 24, 1000])
def test_strides_and_chunks_do_not_count(dtype, chunk, device, monkeypatch):
    x = random_words((4, 3, 5, 6), dtype, device)
    expected = digest(x)
    every_other = torch.zeros(4, 3, 5, 6, 2, dtype=dtype, device=device)[..., 0].copy_(x)
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert digest(x) == expected
    views = [
        x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        every_other,
    ]
    for view in views:
        assert not view.is_contiguous()
        assert digest(view) == expected
    row = x[0, 0, 0]
    assert digest(row.expand(9, 6)) == digest(row.repeat(9, 1))


def test_conjugate_and_negative_views_are_resolved(device):
    x = random_words((6,), torch.complex64, device)
    assert digest(x.conj()) == digest(x.conj().resolve_conj()) != digest(x)
    assert digest(x.conj().imag) == digest(-(x.imag.clone())) != digest(x.imag)


def test_temporaries_stay_bounded():
    # Address space is capped in a child: the hashed tensor is far larger than what is left.
    code = (
        "import resource, torch\n"
        "from truncdet import digest\n"
        "torch.set_num_threads(1)\n"
        "x = torch.zeros(1 << 27, dtype=torch.uint8).view(1 << 13, 1 << 14).t()\n"
        "digest(torch.zeros(1 << 20)).hex\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)\n"
        "digest(x).hex\n"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_values_are_recorded(device):
    # Pins the definition: a change here is a change of bits and belongs into the changelog.
    assert digest(torch.arange(4.0, device=device)).hex == "c5c83ccc57bb38ec"
    words = torch.arange(15, device=device).view(3, 5).to(torch.bfloat16)
    state = {"weight": words, "step": 3, "groups": [{"lr": 0.1, "nesterov": False}]}
    assert digest(state).hex == "0304fa77e99b4ac8"


def test_definition_written_out_in_python():
    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output of splitmix64, seed 0
    x = random_words((40,), torch.int64)
    total = sum(mix((int(b) + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i, b in enumerate(x))
    salt = module._salt(b"", "torch.int64(40,)")
    assert int(digest(x)) == mix(mix((total + salt) % 2**64))


def test_optimizer_state_is_covered(device):
    model = torch.nn.Linear(3, 2, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    model(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    before = digest(optimizer.state_dict())
    assert digest(optimizer.state_dict()) == before
    with torch.no_grad():
        optimizer.state[model.bias]["exp_avg"][1] += 1
    assert digest(optimizer.state_dict()) != before
    optimizer.state[model.bias]["exp_avg"][1] -= 1
    optimizer.param_groups[0]["lr"] *= 2
    assert digest(optimizer.state_dict()) != before


def test_reading_and_comparing(device):
    d = digest(torch.ones(3, device=device))
    assert isinstance(d, Digest) and d.value.shape == () and d.value.dtype == torch.int64
    assert d.value.device.type == device.type
    assert str(d) == d.hex == f"{int(d):016x}" and f"{d}" == d.hex and d.hex in repr(d)
    assert hash(d) == hash(digest(torch.ones(3, device=device)))
    assert d != d.hex and d != int(d)


@pytest.mark.cuda
def test_cuda_equals_cpu_and_does_not_wait():
    state = {"a": random_words((300, 41), torch.float32), "step": torch.tensor(3.0), "n": 1}
    expected = digest(state).hex
    moved = {**state, "a": state["a"].cuda()}  # AdamW keeps its step on the CPU
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = digest(moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.hex == expected


def test_flush_denormal_does_not_count(device):
    x = torch.full((4,), 1e-40, device=device)
    expected = digest(x).hex
    torch.set_flush_denormal(True)
    try:
        assert digest(x).hex == expected
    finally:
        torch.set_flush_denormal(False)


def test_parameters_need_no_detach():
    x = torch.ones(3, requires_grad=True)
    assert digest(x) == digest(x.detach()) == digest(torch.nn.Parameter(x.detach()))


@pytest.mark.parametrize(
    "obj, text",
    [
        ({1, 2}, "digest: obj must be a tensor, mapping, sequence, number, str, bytes or None"),
        ({"a": [object()]}, r"digest: obj\['a'\]\[0\] must be a tensor, .*, got object"),
        ({2.5: 1}, "digest: keys of obj must be str or int, got float"),
        ({"a": {(): 1}}, r"digest: keys of obj\['a'\] must be str or int, got tuple"),
        ([torch.eye(2).to_sparse()], r"digest: obj\[0\] must be dense, got a sparse"),
        (torch.ones(2, device="meta"), "digest: obj must have data, got a meta tensor"),
    ],
)
def test_errors_name_the_place(obj, text):
    with pytest.raises(TypeError, match=text):
        digest(obj)
