"""Which method a run's config is, in words, and the order and look of the methods."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from callbacks.methods.initialization import STRATEGIES

from ... import moe as moe_package
from ...figures import COLORS

BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, BLACK, _ = COLORS
FAMILIES = {
    "dense": BLACK,
    "top-k": BLUE,
    "top-p": SKY,
    "loss-free balancing": SKY,
    "Default MoE": ORANGE,
    "TC-MoE": GREEN,
    "top-any": PINK,
    "DynMoE": VERMILION,
}
"""Colour of a family of methods; the order is that of tables. Members differ in line style."""


@dataclass(frozen=True, order=True)
class Method:
    """A method, as a config describes it.

    Attributes:
        rank: place of its family in a table.
        size: place in the family.
        label: in words, what published.yaml calls it too; the part before the comma is the family.
    """

    rank: int
    size: float
    label: str

    @property
    def family(self) -> str:
        """What has a colour of its own."""
        return self.label.partition(",")[0]

    @property
    def color(self) -> str:
        """The family's; black for one that is not known here."""
        return FAMILIES.get(self.family, BLACK)


def method_of(config: dict[str, Any]) -> Method:
    """The method of a resolved config."""
    network = _part(_part(config, "model"), "network")
    moe = _part(network, "moe")
    callbacks = _part(config, "trainer").get("callbacks") or []
    extra = {_class(each): each.get("init_args") or {} for each in callbacks if _class(each)}
    label, size = "dense", 0.0
    if _has_experts(network):
        label = _router_label(_part(moe, "router", whole=True), _part(moe, "router"))
        numbers = re.findall(r"\d+(?:\.\d+)?", label)
        size = float(numbers[-1]) if numbers else 0.0
        if moe.get("default_vectors", "none") != "none":
            label = _with(label, "top-k", "Default MoE", " + default vectors")
        if "LossFreeBalance" in extra:
            label = _with(label, "top-k", "loss-free balancing", " + loss-free balancing")
        if "AdaptiveExperts" in extra:
            start = str(extra["AdaptiveExperts"].get("initialization", "?"))
            words = getattr(STRATEGIES.get(start), "label", start)
            size = float([*STRATEGIES, start].index(start))
            label = _with(label, "top-any, fixed experts", f"DynMoE, {words}", f", {words}")
            losses = _part(config, "model").get("losses") or {}
            more = [each for each in ("load_balance", "efficiency") if each in losses]
            if more:
                size += 10
                names = " and ".join({"load_balance": "balance"}.get(each, each) for each in more)
                label += f" + {names} loss{'es' * (len(more) > 1)}"
    family = label.partition(",")[0]
    known = list(FAMILIES)
    return Method(known.index(family) if family in known else len(known), size, label)


def _has_experts(network: dict[str, Any]) -> bool:
    return bool(network.get("moe_blocks", network.get("moe")))  # networks by name have no list


def _router_label(router: dict[str, Any], init_args: dict[str, Any]) -> str:
    """What the router's class calls itself, of one of the product's; else the class's name."""
    name = _class(router)
    ours = str(router.get("class_path")).startswith("app.moe.")
    found = getattr(moe_package, name, None) if ours else None
    if not isinstance(found, type) or not issubclass(found, moe_package.Router):
        return name or "unknown method"
    return found.label(**init_args)


def _with(label: str, plain: str, replaced: str, added: str) -> str:
    """A label with a method's part: the known combination has a name, others are named by both."""
    return label.replace(plain, replaced) if label.startswith(plain) else label + added


def network_of(config: dict[str, Any]) -> dict[str, Any]:
    """Class, width, depth and number of MoE layers of a resolved config's network."""
    whole = _part(_part(config, "model"), "network", whole=True)
    network = _part(_part(config, "model"), "network")
    return {
        "class": _class(whole),
        "dim": network.get("dim"),
        "depth": network.get("depth"),
        "moe_layers": len(network.get("moe_blocks") or []),
    }


def data_of(config: dict[str, Any]) -> str:
    """Class of a resolved config's data module."""
    return _class(config.get("data")) or "unknown data"


def _part(config: dict[str, Any], key: str, whole: bool = False) -> dict[str, Any]:
    """A section of a config; of a class, its arguments (or with `whole`, the class as well)."""
    value = config.get(key)
    if not isinstance(value, dict):
        return {}
    return value if whole or "class_path" not in value else (value.get("init_args") or {})


def _class(value: Any) -> str:
    return (
        value["class_path"].rpartition(".")[2]
        if isinstance(value, dict) and value.get("class_path")
        else ""
    )
