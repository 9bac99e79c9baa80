"""The committed digests: this machine's CPU and GPU give the bits of those that wrote them."""

import json

import digest_cases
import make_digests
import pytest
import torch
from digest_cases import CASES, digest_of
from exact_arithmetic import FLOATS

import truncdet

INPUT_DIGEST = "2215af1f44c00eeb"
COMMITTED = json.loads(make_digests.DIGESTS.read_text(encoding="utf-8"))


def check(name, device, committed):
    got = digest_of(name, device)
    assert got == committed[name], f"{name} on {device}: {got}, committed {committed[name]}"


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_bits_are_the_committed_ones(device, name):
    check(name, device, COMMITTED)


def test_every_case_is_committed_and_no_other():
    assert sorted(CASES) == list(COMMITTED)
    # In the other types `exact` changes nothing here; all else differs.
    assert len(set(COMMITTED.values())) == len(COMMITTED) - 2 * (len(FLOATS) - 1)


def test_one_changed_bit_fails(monkeypatch):
    name = "index_add/float32"
    right = CASES[name]

    def wrong(device):
        tensors = right(device)
        tensors[0].view(torch.int32)[0, 0] ^= 1
        return tensors

    monkeypatch.setitem(digest_cases.CASES, name, wrong)
    with pytest.raises(AssertionError, match=r"^index_add/float32 on cpu: "):
        check(name, torch.device("cpu"), COMMITTED)


def test_a_wrong_digest_fails():
    name = "snap/float32"
    with pytest.raises(AssertionError, match=r"^snap/float32 on cpu: [0-9a-f]{16}, committed 0123"):
        check(name, torch.device("cpu"), {**COMMITTED, name: "0123456789abcdef"})


def test_inputs_do_not_come_from_a_generator():
    """The formulas alone decide: any seed, the same digest."""
    name = "roi_align/avg/mask_head/float32"
    for seed in (1, 2):
        torch.manual_seed(seed)
        check(name, torch.device("cpu"), COMMITTED)
    x = digest_cases.values((3, 2), 5, torch.float64)
    assert truncdet.digest(x).hex == INPUT_DIGEST


def test_the_generator_of_the_file_writes_the_committed_bytes(tmp_path, monkeypatch, capsys):
    few = {name: CASES[name] for name in ("snap/float32", "truncate/float16")}
    monkeypatch.setattr(make_digests, "CASES", few)
    path = tmp_path / "digests.json"
    make_digests.main("cpu", path)
    assert json.loads(path.read_text()) == {name: COMMITTED[name] for name in few}
    assert capsys.readouterr().out == "2 digests of the cpu written to digests.json\n"
    assert [file.name for file in tmp_path.iterdir()] == ["digests.json"]
