"""The rows of the public operators: complete, true of the kernels, and named by the remedies."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from pathlib import Path

import pytest
from truncdet.integrations._aten_table import BY_NAME, OPERATORS

import truncdet
from truncdet._frameworks import FRAMEWORKS
from truncdet._operators import BY_KERNEL, ROWS, OperatorRow, instead_of
from truncdet._strict_table import TABLE

# What is public and no operator.
OTHERS = {
    *("Audit", "Digest", "TruncdetError", "Verdict", "audit", "build_info", "check", "compare"),
    *("convert", "deterministic", "digest", "disable", "doctor", "enable", "generator", "record"),
    *("status", "truncate"),
}
TIERS = re.compile(r"(T0|T1( T2)?( T3o)?( T3c)?)$")


def public() -> set[str]:
    return {
        prefix + name
        for prefix, module in (("", truncdet), ("render.", truncdet.render))
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value)
    }


def test_every_public_operator_has_one_row() -> None:
    names = [name for row in ROWS for name in (row.name, *row.also)]
    assert len(names) == len(set(names))
    assert set(names) == public() - OTHERS and public() >= OTHERS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_says_what_there_is_to_say(row: OperatorRow) -> None:
    assert inspect.isfunction(attrgetter(row.name)(truncdet))
    assert all(isinstance(cell, str) and cell.isascii() and "|" not in cell for cell in texts(row))
    assert set(row.patches) <= {"aten", *FRAMEWORKS} - {"torch"}
    for text in (row.forward.partition(";")[0], row.backward.partition(";")[0]):
        plain = text in (
            "PyTorch's own",
            "PyTorch's values",
            "none",
            "straight through",
            "its input",
        )
        assert plain or TIERS.match(text), text
    assert row.tier.startswith(("T0", "T1", "straight"))


def texts(row: OperatorRow) -> list[str]:
    cells = (row.replaces, row.devices, row.dtypes, row.error, row.memory, row.tier)
    return [*cells, row.forward, row.backward]


def test_rows_and_patch_name_each_other() -> None:
    by = {operator.by.removeprefix("truncdet.") for operator in OPERATORS.values()}
    rows = {row.name for row in ROWS if "aten" in row.patches}
    # These are made of others: their originals call scatter_add, index_add, nll_loss and so on.
    made = {"gather", "index_select", "scatter", "adaptive_avg_pool1d", "cross_entropy"}
    assert rows - by == made
    assert by <= rows
    for kernel, row in BY_KERNEL.items():
        assert ("aten" in row.patches) == kernel.startswith("aten::")
        assert not kernel.startswith("aten::") or kernel in BY_NAME


def test_kernels_are_those_of_the_strict_checker() -> None:
    assert BY_KERNEL.keys() <= TABLE.keys()
    assert len(BY_KERNEL) == sum(len(row.kernels) for row in ROWS)
    for kernel in BY_KERNEL:
        assert f"truncdet.{BY_KERNEL[kernel].name}" in TABLE[kernel].fix
    covered = {kernel for kernel in TABLE if kernel in BY_NAME}
    assert covered - BY_KERNEL.keys() == {"aten::_embedding_bag_backward"}


def test_remedies_name_only_what_exists_and_every_entry_has_one() -> None:
    for kernel, entry in TABLE.items():
        assert entry.fix, kernel
        for name in re.findall(r"truncdet\.(\w+)", entry.fix):
            assert hasattr(truncdet, name), (kernel, name)


def test_a_remedy_is_the_switch_or_the_function() -> None:
    assert instead_of("aten::index_add") == "truncdet.enable() or truncdet.index_add"
    assert instead_of("aten::median") is None
    assert TABLE["aten::put"].fix.startswith("truncdet.enable() or truncdet.index_put; without")


def test_status_lists_the_same_rows() -> None:
    table = truncdet.status().as_dict()
    assert [row["name"] for row in table["operators"]] == [row.name for row in ROWS]
    assert set(table["operators"][0]) == set(OperatorRow._fields)
    own = {row.operator: row for row in truncdet.status().rows if row.framework == "truncdet"}
    assert [*own] == [f"truncdet.{row.name}" for row in ROWS]
    assert {row.covered_by for row in own.values()} == {"own kernel"}
    assert [row.tier for row in own.values()] == [row.tier for row in ROWS]


def test_the_readme_explains_every_letter() -> None:
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    assert "\n**F**: " in text and "\n**W**, " in text
    for row in ROWS:
        assert f"| `{row.name}`" in text, row.name
