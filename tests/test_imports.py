"""Imports point one way, as CONTRIBUTING.md and the folders say; imports in functions count too.

commands -> cli -> callbacks -> runs, tasks -> models -> moe; data stands alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAVES = {"app.errors", "app.files", "app.figures"}  # all may import them
LEVELS = {"app.moe": 0, "app.models": 1, "app.tasks": 2, "app.runs": 2, "callbacks": 3}
LEVELS |= {"app.cli": 4, "app.commands": 5}
LEVELS |= {"app.sharding": 3}  # an older class path of app.tasks.FSDP2
TOP = {"app", "app.__main__"}  # `app.load_model` reaches down in a function; the entry point


def package(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "app" else parts[0]


def imports(source: str, module: list[str]) -> list[str]:
    """Names that a module imports, anywhere in it; `module` is the path of its package."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level + 1] if node.level else []
            stem = [*base, *([node.module] if node.module else [])]
            found += [".".join([*stem, each.name]) for each in node.names]
    return [name for name in found if name.split(".")[0] in ("app", "callbacks", "data")]


def allowed(source: str, target: str) -> bool:
    if source == target or source in TOP:
        return True
    if target in LEAVES:
        return True
    if source in LEAVES or source == "data":
        return False
    if target == "data":
        return LEVELS[source] >= LEVELS["app.cli"]
    return target in LEVELS and LEVELS[target] < LEVELS[source]


def test_imports_point_one_way():
    wrong = []
    for top in ("app", "callbacks", "data"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            source = package(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            for name in imports(path.read_text(encoding="utf-8"), parts[:-1]):
                if not allowed(source, package(name)):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_arrows_up_are_seen():
    assert imports("def f():\n    from ..tasks import base", ["app", "moe"]) == ["app.tasks.base"]
    assert not allowed("app.moe", "app.tasks") and not allowed("app.runs", "app.tasks")
    assert not allowed("data", "app.moe") and not allowed("app.files", "app.moe")
    assert allowed("data", "app.errors") and allowed("app.cli", "data")
