"""Which method a run's config is, in words, and the order and look of the methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...figures import COLORS

BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, BLACK, _ = COLORS
FAMILIES = {
    "dense": BLACK,
    "topk": BLUE,
    "topp": SKY,
    "lossfree": SKY,
    "default": ORANGE,
    "tcmoe": GREEN,
    "topany": PINK,
    "dynmoe": VERMILION,
    "other": BLACK,
}
"""Colour of a family of methods; the order is that of tables. Members differ in line style."""

STARTS = {
    "last_removed": "original",
    "average": "average",
    "weighted_average": "weighted average",
    "most_activated": "most activated",
    "random": "random",
}
"""What DynMoE's discussion calls the ways to initialise a new expert."""


@dataclass(frozen=True, order=True)
class Method:
    """A method, as a config describes it.

    Attributes:
        rank: place of its family in a table.
        size: place in the family.
        key: what published.yaml calls it.
        label: in words.
        family: see `FAMILIES`.
    """

    rank: int
    size: float
    key: str
    label: str
    family: str


def method_of(config: dict[str, Any]) -> Method:
    """The method of a resolved config."""
    network = _part(_part(config, "model"), "network")
    moe = _part(network, "moe")
    router, name = _part(moe, "router"), _class(_part(moe, "router", whole=True))
    callbacks = _part(config, "trainer").get("callbacks") or []
    extra = {_class(each): each.get("init_args") or {} for each in callbacks if _class(each)}
    losses = _part(config, "model").get("losses") or {}
    k = router.get("k", 2)
    if not network.get("moe_blocks"):
        family, size, key, label = "dense", 0, "dense", "dense"
    elif name == "TopAny" and "AdaptiveExperts" in extra:
        start = extra["AdaptiveExperts"].get("initialization", "?")
        family, size, key = "dynmoe", float(list(STARTS).index(start)), f"dynmoe_{start}"
        label = f"DynMoE, {STARTS[start]}"
        if losses.keys() & {"load_balance", "efficiency"}:
            more = [each for each in ("load_balance", "efficiency") if each in losses]
            key, size = f"{key}+{'+'.join(more)}", size + 10
            names = " and ".join({"load_balance": "balance"}.get(each, each) for each in more)
            label += f" + {names} loss{'es' * (len(more) > 1)}"
    elif name == "TopAny":
        family, size, key, label = "topany", 0, "topany", "top-any, fixed experts"
    elif name == "Ternary":
        family, size, key, label = "tcmoe", k, f"tcmoe{k}", f"TC-MoE, k = {k}"
    elif name == "TopP":
        p = router.get("p")
        family, size, key, label = "topp", p or 0, f"topp{p}", f"top-p, p = {p}"
    elif name == "TopK":
        family, size, key, label = "topk", k, f"topk{k}", f"top-k, k = {k}"
        if moe.get("default_vectors", "none") != "none":
            family, key, label = "default", f"default{k}", f"Default MoE, k = {k}"
        elif "LossFreeBalance" in extra:
            family, key, label = "lossfree", f"lossfree{k}", f"loss-free balancing, k = {k}"
    else:
        family, size, key, label = "other", 0, name or "other", name or "unknown method"
    return Method(list(FAMILIES).index(family), size, key, label, family)


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
