"""Do the tests notice a fault? Changes one thing at a time in what keeps the account, and runs the quick tests on it.

    python tests/mutants.py [accountant] [clipping] [ledger]

The changes are cosmic-ray's, with one substitute for each arithmetic operator, and of each comparison its boundary and
its negation; texts, SQL among them, are left alone. A mutant that no test notices has its reason in `mutants.toml`: it
fails this command to have none there, to keep one there that is out of date, or to have fewer than nine in ten noticed.

Each mutant runs in a copy of the tree, in a fork of a process that has loaded what the tests import: to load it anew
for each would take most of the time.
"""

import difflib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

HERE = Path(__file__).parent
LEAST_NOTICED = 0.9

#: Each module's tests, those that notice most first; what is slow for the faults it finds is left out.
TESTS = {
    "accountant": ("test_accountant", "test_plan", "test_policy"),
    "clipping": ("test_clipping", "test_rules", "test_plan"),
    "ledger": ("test_ledger", "test_verify"),
}
_SLOW = "not tight_figure and not 100_000 and not no_damage and not 500_edits"

_ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Pow_Mul", "FloorDiv_Mul", "Mod_Mul")
_COMPARISONS = (
    "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot",
    "IsNot_Is",
)  # fmt: skip
_OPERATORS = [
    *(f"core/ReplaceBinaryOperator_{name}" for name in _ARITHMETIC),
    *(f"core/ReplaceComparisonOperator_{name}" for name in _COMPARISONS),
    *(f"core/ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub")),
    *(f"core/{name}" for name in (
        "AddNot", "NumberReplacer", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue", "RemoveDecorator", "ZeroIterationForLoop",
    )),
]  # fmt: skip
#: What the tests import, but for the package itself.
_HEAVY = (
    "dp_accounting.pld", "dp_accounting.rdp", "flwr.app", "hypothesis", "opacus", "opacus.accountants.analysis.rdp",
    "pydantic", "pytest", "safetensors.torch", "scipy.integrate", "scipy.stats", "torch",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A module's source with one thing changed; `change` is the line before and after."""

    module: str
    source: str
    change: str


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """All mutants of a module, each change once."""
    nodes, seen = list(ast_nodes(get_ast(source))), set()
    for name in _OPERATORS:
        operator = get_operator(name)()
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        for occurrence in range(count):
            mutated = mutate_code(source, operator, occurrence)
            if mutated and mutated not in seen:
                seen.add(mutated)
                yield Mutant(module, mutated, _change(source, mutated))


def _change(before: str, after: str) -> str:
    lines = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[:2] in ("- ", "+ ")]
    removed, added = (" ".join(line[2:] for line in lines if line[0] == sign).split() for sign in "-+")
    return f"{' '.join(removed)} => {' '.join(added) or 'nothing'}"


def notices(module: str, limit: float) -> bool:
    """Whether the module's tests fail, or take longer than `limit` seconds, on the tree as it is now."""
    child = os.fork()
    if not child:
        os.setsid()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1), os.dup2(sink, 2)
        status = 1
        try:
            status = _run(module)
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status != 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _run(module: str) -> int:
    import pytest
    from hypothesis import settings

    settings.register_profile("same", derandomize=True, database=None, deadline=None)
    settings.load_profile("same")
    quiet = ("--noconftest", "--assert=plain", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov")
    runs = (pytest.main(["-x", *quiet, "-k", _SLOW, f"tests/privacy/{name}.py"]) for name in TESTS[module])
    return int(any(runs))  # a file of tests is read only if those before it have noticed nothing


def main(modules: list[str]) -> int:
    """Print what became of the mutants; 1 where it is not well."""
    root = HERE.parent
    groups = tomllib.loads((HERE / "mutants.toml").read_text())
    reasons = {
        module: {change: group["reason"] for group in of_module for change in group["changes"]}
        for module, of_module in groups.items()
    }
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, kept.split("\0")):
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((root / name).read_bytes())
        os.chdir(folder)
        sys.path[0] = os.environ["PYTHONPATH"] = folder
        # files that change within a second may be taken for the same as their compiled ones
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        for name in _HEAVY:
            importlib.import_module(name)
        for module in modules or TESTS:
            problems += _examine(module, reasons.get(module, {}))
    print(*problems, sep="\n")
    return 1 if problems else 0


def _examine(module: str, reasons: dict[str, str]) -> list[str]:
    file = Path("fl_dpgan", "privacy", f"{module}.py")
    source, began = file.read_text(), time.monotonic()
    if notices(module, 600.0):
        return [f"{module}: the tests fail as it is"]
    limit = 10 + 10 * (time.monotonic() - began)
    made, survivors = 0, []
    for mutant in mutants(module, source):
        file.write_text(mutant.source)
        made += 1
        if not notices(module, limit):
            survivors.append(mutant.change)
            print(f"- `{mutant.change}`: {reasons.get(mutant.change, '?')}", flush=True)
    file.write_text(source)
    noticed = 1 - len(survivors) / made
    print(f"{module}: {made} mutants, {len(survivors)} not noticed: {noticed:.1%} noticed", flush=True)
    problems = [f"{module}: no reason for {change}" for change in survivors if change not in reasons]
    problems += [f"{module}: noticed, or not made: {change}" for change in reasons if change not in survivors]
    return problems + ([f"{module}: too few are noticed"] if noticed < LEAST_NOTICED else [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
