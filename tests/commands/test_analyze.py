"""`python -m app analyze`: measures against naive loops, and the command from end to end."""

import json
import math
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from app.cli.main import main as app
from app.commands.analyze import command as analyze
from app.commands.analyze import measures
from app.commands.analyze.measures import (
    contributions,
    default_distances,
    expert_affinity,
    ratio_error_E,
    router_saturation,
)
from app.commands.analyze.sample import Sample, draw_sample, readable
from app.commands.analyze.tables import print_table
from app.moe import MoEBlock, Ternary, TopAny, TopK, TopP
from data.text.tokenizers import BPETokenizer, ByteTokenizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
D, SLOTS, ACTIVE, CLASSES = 6, 6, 5, 4
ROUTERS = {
    "topk": partial(TopK, k=2),
    "topp": partial(TopP, p=0.5),
    "topany": partial(TopAny, fallback="none"),
    "ternary": partial(Ternary, k=2, gates="selected"),
}


class Tiny(nn.Module):
    """Two MoE layers in float64, five of six slots active; vectors (n, S, D) to logits of classes,
    or token ids (n, S) to logits of tokens (n, S, V)."""

    def __init__(self, seed: int, router=ROUTERS["topk"], text: bool = False, **block) -> None:
        super().__init__()
        torch.manual_seed(seed)
        make = partial(MoEBlock, D, 8, router, num_experts=ACTIVE, max_experts=SLOTS, **block)
        self.blocks = nn.ModuleList([make(), make()])
        self.embed = nn.Embedding(9, D)
        self.head = nn.Linear(D, 9 if text else CLASSES)
        self.text = text
        self.double().eval()
        for parameter in self.parameters():
            parameter.data.normal_(std=0.6)
        for each in self.blocks:
            if each.default_vectors != "none":
                each.default_ED.normal_(std=0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs) if self.text else inputs
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) if self.text else self.head(x.mean(1))


def images(count: int = 5) -> Sample:
    return Sample(torch.randn(count, 3, D).double(), torch.randint(CLASSES, (count,)))


def text() -> Sample:
    """Four sequences of seven tokens out of nine, the last with two places that are no token."""
    batch = torch.randint(9, (4, 8))
    batch[-1, 5:] = -100
    return Sample(batch[:, :-1], batch[:, 1:])


def in_batches(sample: Sample, size: int = 2):
    return lambda: sample.batches(size, torch.device("cpu"))


def expert_output(block: MoEBlock, x_D: Tensor, slot: int) -> Tensor:
    return block.experts.expert(F.linear, x_D, *(w[slot] for w in block.experts.parameters()))


def naive_forward(network: Tiny, one: Tensor, mask: tuple[int, int] | None):
    """One sample, token by token: its logits, and per layer the inputs and the experts taken."""
    x_TD = network.embed(one.clamp_min(0)) if network.text else one
    seen = []
    for layer, block in enumerate(network.blocks):
        inputs, taken, rows = [], [], []
        for x_D in x_TD:
            routing = block.router(x_D[None], block.active_E)
            y_D = torch.zeros(D).double()
            for slot in range(SLOTS):
                if routing.mask_TE[0, slot] and mask != (layer, slot):
                    y_D += routing.gates_TE[0, slot] * expert_output(block, x_D, slot)
                elif not routing.mask_TE[0, slot] and block.default_vectors != "none":
                    y_D += routing.probs_TE[0, slot] * block.default_ED[slot]
            inputs.append(x_D)
            taken.append({s for s in range(SLOTS) if routing.mask_TE[0, s]})
            rows.append(x_D + y_D)
        x_TD = torch.stack(rows)
        seen.append((inputs, taken))
    return network.head(x_TD if network.text else x_TD.mean(0)), seen


def naive_losses(network: Tiny, sample: Sample, mask=None) -> list[tuple[float, int]]:
    """Summed loss and number of predictions of each sample."""
    losses = []
    for one, target in zip(sample.inputs, sample.targets, strict=True):
        logits = naive_forward(network, one, mask)[0].reshape(-1, network.head.out_features)
        terms = [
            math.log(sum(math.exp(z) for z in row.tolist())) - float(row[wanted])
            for row, wanted in zip(logits, target.reshape(-1).tolist(), strict=True)
            if wanted >= 0
        ]
        losses.append((sum(terms), len(terms)))
    return losses


# ---- measures against loops


@torch.no_grad()
@pytest.mark.parametrize("kind", ["images", "text"])
@pytest.mark.parametrize("router", ROUTERS)
def test_masking_an_expert(router, kind):
    network = Tiny(1, ROUTERS[router], text=kind == "text")
    sample = text() if kind == "text" else images()
    found = contributions(network, in_batches(sample))
    base = naive_losses(network, sample)
    count = sum(n for _, n in base)
    assert found.loss == pytest.approx(sum(loss for loss, _ in base) / count, rel=1e-10)
    moved = 0
    for layer in range(2):
        change_E, error_E = found.change[f"blocks.{layer}"], found.error[f"blocks.{layer}"]
        for slot in range(ACTIVE):
            closed = naive_losses(network, sample, (layer, slot))
            rest = [c - b for (c, _), (b, _) in zip(closed, base, strict=True)]
            mean = sum(rest) / count
            assert float(change_E[slot]) == pytest.approx(mean, abs=1e-10)
            square = sum((r - mean * n) ** 2 for r, (_, n) in zip(rest, base, strict=True))
            samples = len(sample)
            error = math.sqrt(square * samples / (samples - 1)) / count
            assert float(error_E[slot]) == pytest.approx(error, abs=1e-10)
            moved += abs(mean) > 1e-3
        assert change_E[ACTIVE:].isnan().all()
    assert moved >= 4


@torch.no_grad()
def test_a_default_vector_does_not_step_in():
    network = Tiny(2, default_vectors="ema")
    sample = images()
    found = contributions(network, in_batches(sample))
    base, closed = naive_losses(network, sample), naive_losses(network, sample, (1, 3))
    change = sum(c - b for (c, _), (b, _) in zip(closed, base, strict=True)) / len(sample)
    assert float(found.change["blocks.1"][3]) == pytest.approx(change, abs=1e-10)


def test_standard_error_of_equal_counts():
    values_nE = torch.randn(7, 3).double()
    error_E = ratio_error_E(5 * values_nE, torch.full((7,), 5.0).double())
    torch.testing.assert_close(error_E, values_nE.std(0) / math.sqrt(7))
    assert ratio_error_E(values_nE[:1], torch.ones(1)).isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["images", "text"])
@pytest.mark.parametrize("router", ROUTERS)
def test_saturation_by_sets(router, kind):
    earlier, later = (Tiny(3, ROUTERS[router], text=kind == "text") for _ in range(2))
    for parameter in later.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    sample = text() if kind == "text" else images(8)
    born = {"blocks.1": {2}}
    found = router_saturation(earlier, later, in_batches(sample), born)
    for layer in range(2):
        pairs, tokens = [], 0
        for one in sample.inputs:
            before = naive_forward(earlier, one, None)[1][layer][1]
            after = naive_forward(later, one, None)[1][layer][1]
            real = [True] * len(one) if kind == "images" else (one >= 0).tolist()
            tokens += sum(real)
            pairs += [(a, b) for a, b, r in zip(before, after, real, strict=True) if r and b]
        same = set(range(ACTIVE)) - (born["blocks.1"] if layer else set())
        each, n = found[f"blocks.{layer}"], len(pairs)
        share = sum(len(a & b & same) / len(b) for a, b in pairs) / n
        assert each.saturation == pytest.approx(share, abs=1e-12)
        random = sum(len(a) / ACTIVE * len(b & same) / len(b) for a, b in pairs) / n
        assert each.random == pytest.approx(random, abs=1e-12)
        dealt = sum(len(a & b & same) / len(b) for a, _ in pairs for _, b in pairs) / n**2
        assert each.random_loads == pytest.approx(dealt, abs=1e-12)
        assert each.skipped == pytest.approx(1 - n / tokens, abs=1e-12)
        assert 0 < each.saturation < 1


def test_saturation_with_itself_and_at_random():
    network = Tiny(5, ROUTERS["topany"])
    sample = images(40)
    for each in router_saturation(network, network, in_batches(sample)).values():
        assert each.saturation == 1.0
    found = router_saturation(Tiny(5), Tiny(6), in_batches(sample))
    assert found["blocks.0"].random == pytest.approx(2 / ACTIVE, abs=1e-12)


def test_saturation_where_no_token_takes_an_expert():
    network = Tiny(7, ROUTERS["topany"])
    with torch.no_grad():
        for block in network.blocks:
            block.router.threshold.fill_(2.0)
    (each, _) = router_saturation(network, network, in_batches(images())).values()
    assert (each.saturation, each.random, each.skipped) == (None, None, 1.0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["images", "text"])
def test_distances_by_loops(kind):
    network = Tiny(8, default_vectors="ema", text=kind == "text")
    network.blocks[1].default_ED[2] = 0.0  # never updated
    sample = text() if kind == "text" else images()
    found = default_distances(network, in_batches(sample))
    for layer, block in enumerate(network.blocks):
        sums = {(slot, own): [] for slot in range(SLOTS) for own in (True, False)}
        for one in sample.inputs:
            inputs, taken = naive_forward(network, one, None)[1][layer]
            for place, (x_D, experts) in enumerate(zip(inputs, taken, strict=True)):
                if kind == "text" and one[place] < 0:
                    continue
                for slot in range(ACTIVE):
                    v_D = block.default_ED[slot]
                    gap = (expert_output(block, x_D, slot) - v_D).norm() / v_D.norm()
                    sums[slot, slot in experts].append(float(gap))
        each = found[f"blocks.{layer}"]
        for slot in range(SLOTS):
            for own, value in ((True, each.own_E[slot]), (False, each.others_E[slot])):
                gaps = sums[slot, own]
                if (layer, slot) == (1, 2) or not gaps:
                    assert value.isnan()
                else:
                    assert float(value) == pytest.approx(sum(gaps) / len(gaps), rel=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["images", "text"])
def test_affinity_by_counting(kind):
    network = Tiny(9, ROUTERS["topp"], text=kind == "text")
    sample = text() if kind == "text" else images(9)
    found = expert_affinity(network, sample, in_batches(sample))
    for layer in range(2):
        tokens, pairs = Counter(), Counter()
        for one, target in zip(sample.inputs, sample.targets, strict=True):
            for place, experts in enumerate(naive_forward(network, one, None)[1][layer][1]):
                group = int(one[place]) if kind == "text" else int(target)
                if group >= 0:
                    tokens[group] += 1
                    pairs.update((group, slot) for slot in experts)
        name = f"blocks.{layer}"
        assert set(found.group_G.tolist()) == set(tokens)
        for row, group in enumerate(found.group_G.tolist()):
            assert found.tokens[name][row] == tokens[group]
            for slot in range(SLOTS):
                share = pairs[group, slot] / tokens[group]
                assert float(found.share[name][row, slot]) == pytest.approx(share)
        load = sum(n for (_, slot), n in pairs.items() if slot == 1) / sum(tokens.values())
        assert float(found.load[name][1]) == pytest.approx(load)
        if kind == "text":
            counts = found.tokens[name].tolist()
            assert counts == sorted(counts, reverse=True)


def test_the_network_stays_as_it_is():
    network = Tiny(10, default_vectors="ema")
    state = {name: value.clone() for name, value in network.state_dict().items()}
    sample = images()
    contributions(network, in_batches(sample))
    default_distances(network, in_batches(sample))
    with pytest.raises(RuntimeError), measures.masked(network.blocks[0], 1):
        raise RuntimeError
    assert all(torch.equal(state[name], value) for name, value in network.state_dict().items())
    for block in network.blocks:
        assert not block._forward_pre_hooks and not block.router._forward_hooks


# ---- samples, names and tables


def test_a_sample_is_spread_over_sorted_data():
    def loader(size):
        labels = torch.arange(10).repeat_interleave(40)
        return zip(torch.arange(400.0)[:, None].split(size), labels.split(size), strict=True)

    sample = draw_sample(loader(64), 100)
    places = sample.inputs[:, 0].long()
    assert len(sample) == 100 == len(places.unique())
    assert torch.equal(places, places.sort().values)
    assert torch.equal(sample.targets, places // 40)
    assert sample.targets.bincount(minlength=10).min() >= 3
    assert torch.equal(draw_sample(loader(7), 100).inputs, sample.inputs)  # however batched
    assert not torch.equal(draw_sample(loader(64), 100, seed=1).inputs, sample.inputs)
    assert len(draw_sample(loader(64), 1000)) == 400
    sequences = draw_sample([torch.arange(12).view(2, 6)], 5)
    assert torch.equal(sequences.inputs, torch.arange(12).view(2, 6)[:, :-1])
    assert torch.equal(sequences.targets, torch.arange(12).view(2, 6)[:, 1:])


def test_tokens_can_be_read():
    tokens = ByteTokenizer()
    assert [readable(tokens, t) for t in (101, 32, 10, 226)] == ["'e'", "' '", r"'\n'", "0xe2"]
    bpe = BPETokenizer.train(["the cat and the dog and the bird"] * 9, 300)
    (the,) = bpe.encode(" the")
    assert readable(bpe, int(the)) == "' the'"
    assert readable(bpe, bpe.end_of_text) == "end of text"


@pytest.mark.parametrize("width", [30, 40, 80])
def test_a_narrow_terminal_cuts_nothing(width, capsys):
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    header = ["layer", "expert", *(f"column{i}" for i in range(6))]
    rows = [["blocks.1", str(e), *(f"{e}.{i:04d}" for i in range(6))] for e in range(3)]
    print_table(console, "A title", header, rows, keys=2)
    out = capsys.readouterr().out
    for cell in [*header[2:], *(cell for row in rows for cell in row[2:])]:
        assert len(re.findall(rf"(?<!\S){re.escape(cell)}(?!\S)", out)) == 1
    assert max(map(len, out.splitlines())) <= width
    assert out.count("expert") == {30: 6, 40: 3, 80: 1}[width]


# ---- the command


def fit(folder: Path, name: str, config: str, *more: str) -> Path:
    """A few steps, with checkpoints on the way; the folder of the checkpoints."""
    file = folder / f"{name}.yaml"
    file.write_text(config)
    flags = [f"--config={file}", f"--runs={folder}", f"--name={name}", "--trainer.accelerator=cpu"]
    flags += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    flags += ["--checkpoint.every_n_train_steps=4", "--checkpoint.save_top_k=-1"]
    flags += ["--checkpoint.save_on_train_epoch_end=false", "--trainer.limit_val_batches=1"]
    assert app(["fit", *flags, *more]) == 0
    return folder / name / "version_0" / "checkpoints"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """DynMoE on digits: twelve steps, experts born after the fourth."""
    config = f"""
base: [{CONFIGS}/recipes/digits.yaml, {CONFIGS}/methods/topany.yaml]
model:
  init_args:
    network:
      init_args:
        dim: 32
        moe:
          init_args: {{max_experts: 8}}
trainer:
  callbacks+: [{{class_path: callbacks.AdaptiveExperts, init_args: {{window_steps: [1, 5, 6]}}}}]
"""
    return fit(tmp_path_factory.mktemp("digits"), "digits", config, "--trainer.max_steps=12")


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    """Default MoE on a text."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "book.txt").write_text("the cat sat on the mat, and [the dog] on $5 logs.\n" * 60)
    config = f"""
base: [{CONFIGS}/recipes/shakespeare.yaml, {CONFIGS}/methods/default.yaml]
"""
    sizes = {"dim": 16, "depth": 2, "num_heads": 2, "max_length": 16, "moe_blocks": "[0,1]"}
    flags = [f"--model.network.{key}={value}" for key, value in sizes.items()]
    flags += ["--model.sample_tokens=0", "--data.dataset=null", "--data.block_size=16"]
    flags += [f"--data.files={folder / 'book.txt'}", f"--data.cache_dir={folder / 'cache'}"]
    return fit(folder, "lm", config, *flags, "--data.batch_size=16", "--trainer.max_steps=8")


def run(*argv: object) -> int:
    try:
        return app(["analyze", *map(str, argv), "--device=cpu"])
    except SystemExit as stop:
        return stop.code


def one_line(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def at_step(checkpoints: Path, step: int) -> Path:
    (path,) = checkpoints.glob(f"*step={step}.ckpt")
    return path


def test_command_on_images(digits, tmp_path, capsys):
    """Any order of the checkpoints; the JSON holds what the screen shows."""
    paths = [at_step(digits, step) for step in (12, 4, 8)]
    report, out = tmp_path / "new" / "report.json", tmp_path / "pictures"
    options = ["--samples=90", f"--json={report}", f"--out={out}"]
    assert run("--ckpt_path", *paths, *options) == 0
    shown, result = capsys.readouterr().out, json.loads(report.read_text())
    assert (result["step"], result["samples"]) == (12, 90)
    assert [each["step"] for each in result["saturation"]] == [4, 8]
    assert list(result["experts"]) == ["blocks.1", "blocks.2"]
    for layer, experts in result["experts"].items():
        held = torch.load(paths[0], weights_only=True)["state_dict"]
        active_E = held[f"network.{layer}.mlp.active_E"]
        assert [e["expert"] for e in experts] == active_E.nonzero().flatten().tolist()
        for expert in experts:
            assert f"{expert['contribution']:+z.5f}" in shown
        affinity = result["affinity"]["layers"][layer]
        assert len(affinity["share"]) == 10 == len(result["affinity"]["names"])
        assert sum(affinity["tokens"]) == 90 * 16  # patches
    assert f"{result['saturation'][0]['layers']['blocks.1']['saturation']:.3f}" in shown
    names = {f"{kind}_blocks.{i}.png" for kind in ("experts", "affinity") for i in (1, 2)}
    assert {file.name for file in out.iterdir()} == names | {"saturation.png"}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in out.iterdir())
    assert report.parent.joinpath("report.json.tmp").exists() is False


def test_saturation_of_a_checkpoint_with_itself(digits, tmp_path, capsys):
    last = digits / "last.ckpt"
    report = tmp_path / "report.json"
    options = ["--samples=20", f"--json={report}", f"--out={tmp_path}"]
    assert run("--ckpt_path", last, last, *options) == 0
    (same,) = json.loads(report.read_text())["saturation"]
    assert [layer["saturation"] for layer in same["layers"].values()] == [1.0, 1.0]


def test_an_expert_born_in_between_is_a_new_one(digits):
    """The births that the checkpoints hold, and none between a checkpoint and itself."""
    first, last = analyze.read_checkpoints([at_step(digits, 4), at_step(digits, 12)])
    assert (first.step, last.step) == (4, 12)
    events = last.births()
    assert events and not first.births()
    born = analyze._born_between(first, last)
    assert {(layer, slot) for layer, slots in born.items() for slot in slots} == {
        (event["layer"], event["slot"]) for event in events
    }
    assert analyze._born_between(last, last) == {}


def test_the_loss_is_that_of_validation(digits, tmp_path, capsys):
    """On all samples, what `validate` says."""
    path = digits / "last.ckpt"
    report = tmp_path / "report.json"
    options = ["--samples=10000", f"--json={report}", f"--out={tmp_path}"]
    assert run("--ckpt_path", path, *options) == 0
    capsys.readouterr()
    flags = ["--trainer.limit_val_batches=1.0", "--trainer.accelerator=cpu"]
    assert app(["validate", f"--ckpt_path={path}", *flags]) == 0
    (loss,) = re.findall(r"val/loss\D+([\d.]+)", capsys.readouterr().out)
    assert json.loads(report.read_text())["loss"] == pytest.approx(float(loss), abs=1e-4)


def test_command_on_text(language, tmp_path, capsys):
    """Default vectors have distances; tokens can be read; the default folder is the run's."""
    report = tmp_path / "report.json"
    paths = [at_step(language, 4), language / "last.ckpt"]
    assert run("--ckpt_path", *paths, "--samples=10", f"--json={report}") == 0
    shown, result = capsys.readouterr().out, json.loads(report.read_text())
    assert "others" in shown and "' '" in shown and "10 validation sequences" in shown
    assert result["affinity"]["of"] == "token" and "'['" in result["affinity"]["names"]
    distances = [e["distance_own"] for rows in result["experts"].values() for e in rows]
    assert all(value is None or value > 0 for value in distances) and any(distances)
    folder = language.parent / "analysis"
    assert (folder / "affinity_blocks.0.png").is_file() and str(folder) in shown
    assert not list(folder.glob("*.tmp"))


def test_data_that_has_moved(language, tmp_path, capsys):
    """`--data.files` reads the text elsewhere; a wrong name or value is one line."""
    path, moved = language / "last.ckpt", tmp_path / "moved.txt"
    moved.write_text("a quite different text, of other words\n" * 60)
    out = [f"--out={tmp_path}", "--samples=4", f"--data.cache_dir={tmp_path / 'cache'}"]
    options = ["--data.files", moved, f"--json={tmp_path / 'r.json'}"]
    assert run("--ckpt_path", path, *out, *options) == 0
    assert "'q'" in json.loads((tmp_path / "r.json").read_text())["affinity"]["names"]
    capsys.readouterr()
    assert run("--ckpt_path", path, "--data.files=none.txt", *out) == 2
    assert "none.txt" in one_line(capsys)
    assert run("--ckpt_path", path, "--data.root=x", *out) == 2
    assert "--data.root: data.TextData has no such setting; it has files" in one_line(capsys)
    assert run("--ckpt_path", path, "--data.seed=x", *out) == 2
    one_line(capsys)
    assert run("--ckpt_path", path, "--data.block_size=99", *out) == 2
    assert "max_length" in one_line(capsys)
    assert run("--ckpt_path", path, "--verbose") == 2
    assert "--verbose" in capsys.readouterr().err


def changed(source: Path, folder: Path, change) -> Path:
    content = torch.load(source, weights_only=True)
    content["config"] = change(content["config"])
    path = folder / "changed.ckpt"
    torch.save(content, path)
    return path


def test_mistakes(digits, language, tmp_path, capsys):
    last, out = digits / "last.ckpt", f"--out={tmp_path / 'out'}"
    assert run("--ckpt_path", tmp_path / "none.ckpt", out) == 2
    assert "there is no checkpoint" in one_line(capsys)
    (tmp_path / "cut.ckpt").write_bytes(last.read_bytes()[:5000])
    assert run("--ckpt_path", tmp_path / "cut.ckpt", last, out) == 2
    assert "cut.ckpt is damaged" in one_line(capsys)
    other = changed(last, tmp_path, lambda text: text.replace("dim: 32", "dim: 48"))
    assert run("--ckpt_path", other, last, out) == 2
    message = one_line(capsys)
    assert "of another model: model.network.dim is" in message and "48" in message
    assert run("--ckpt_path", at_step(language, 4), last, out) == 2
    assert "of another model" in one_line(capsys)
    assert not (tmp_path / "out").exists()  # all before anything was done
    (tmp_path / "file").write_text("")
    assert run("--ckpt_path", last, f"--out={tmp_path / 'file'}") == 2
    assert "out: cannot write" in one_line(capsys)


def test_a_model_without_experts(tmp_path, capsys):
    config = f"base: [{CONFIGS}/recipes/digits.yaml, {CONFIGS}/methods/dense.yaml]\n"
    checkpoints = fit(tmp_path, "dense", config, "--trainer.max_steps=1")
    assert run("--ckpt_path", checkpoints / "last.ckpt") == 2
    assert "has no MoE layer" in one_line(capsys)


def test_runs_of_other_seeds_are_noticed(digits, tmp_path, capsys):
    def reseed(text: str) -> str:
        return text.replace("seed_everything: 0", "seed_everything: 7")

    other = changed(digits / "last.ckpt", tmp_path, reseed)
    options = ["--samples=5", f"--out={tmp_path}"]
    assert run("--ckpt_path", digits / "last.ckpt", other, *options) == 0
    assert "note: the checkpoints are of runs with the seeds ['0', '7']" in one_line(capsys)


@pytest.mark.parametrize("place", ["contributions", "draw", "write_json"])
def test_interrupted(digits, tmp_path, monkeypatch, capsys, place):
    """While masking, drawing or writing: status 130, and no file is half written."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    if place == "contributions":
        monkeypatch.setattr(analyze, place, interrupted)
    elif place == "draw":
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", interrupted)
    else:
        monkeypatch.setattr("app.files.os.replace", interrupted)
    options = ["--samples=5", f"--out={tmp_path / 'out'}", f"--json={tmp_path / 'r.json'}"]
    assert run("--ckpt_path", digits / "last.ckpt", *options) == 130
    assert one_line(capsys) == "interrupted\n"
    assert list((tmp_path / "out").iterdir()) == []
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == (
        ["r.json"] if place == "draw" else []
    )
