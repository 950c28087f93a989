"""What the pictures show: colours, marks and text against the routing that they were made from."""

import re
from functools import partial
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from app.figures import COLORS
from app.moe import Ternary, TopAny, TopK
from app.tasks.samples import ImageSamples, TextSamples, spread
from callbacks import RoutingMonitor, RoutingPictures
from callbacks.routing import pictures as routing_pictures
from callbacks.routing.figures import load_figure, similarity_figure, taking_figure
from callbacks.routing.history import RoutingHistory
from callbacks.routing.samples import Choices, patches_picture, tokens_html, tokens_picture
from tests.callbacks.callback_support import (
    Toy,
    digits,
    fit,
    make_trainer,
    same,
    tokens,
    toy_block,
    vision_task,
)


def test_history_is_bounded_and_loses_nothing():
    history, active = RoutingHistory(limit=8), torch.ones(3, dtype=torch.bool)
    for i in range(1, 101):
        history.add(10 * i, torch.tensor([i, 1, 0]), active)
        assert len(history.steps) <= 8 and history.steps[-1] == 10 * i
        assert torch.stack(history.loads).sum(0).tolist() == [i * (i + 1) / 2, i, 0]
        if i == 37:
            history = RoutingHistory.from_state_dict(history.state_dict())
            history.limit = 8
    widths = np.diff([0, *history.steps])
    assert len(set(widths[:-1])) == 1 and widths[-1] <= widths[0]
    assert len(history.steps) >= 4


@pytest.mark.parametrize("router", [TopAny, TopK, partial(Ternary, k=2)])
def test_the_expert_that_stands_for_a_token(router):
    """Token by token: the largest gate, or the nearest of equals; none where none was chosen."""
    torch.manual_seed(0)
    block = toy_block(router, 5, 5).eval()
    if router is TopAny:
        with torch.no_grad():
            block.router.threshold.fill_(0.5)
    block(torch.randn(4, 6, 8))
    routing = block.routing
    choices = Choices.of(routing, [1, 3], 6)
    for i, row in enumerate((1, 3)):
        for place in range(6):
            token = row * 6 + place
            taken = routing.mask_TE[token].nonzero().flatten().tolist()
            rank = getattr(routing, "similarity_TE", routing.gates_TE.abs())[token].tolist()
            best = max(taken, key=lambda e: rank[e], default=-1)
            if routing.unrouted_T()[token]:
                best = -1
            assert choices.first_BS[i, place] == best
            gates = choices.gates_BSE[i, place]
            assert (~gates.isnan()).nonzero().flatten().tolist() == taken
    assert (choices.first_BS < 0).any() or router is TopK


def as_choices(first: list[list[int]], experts: int) -> Choices:
    first_BS = torch.tensor(first)
    gates_BSE = torch.full((*first_BS.shape, experts), torch.nan)
    for i, row in enumerate(first):
        for j, slot in enumerate(row):
            if slot >= 0:
                gates_BSE[i, j, slot] = 0.5
    return Choices(first_BS, gates_BSE)


def test_patches_have_their_experts_colour():
    """A class token in front; two by three patches; a token without expert is white."""
    first = [[0, 0, 1, 2, 3, -1, 5]]
    samples = ImageSamples([0], np.zeros((1, 4, 6, 1), np.uint8), ["cat"], (2, 3), 1)
    picture = patches_picture(samples, {"blocks.1": as_choices(first, 6)}, "")
    for slot in (0, 1, 2, 3, 5):
        color = [round(255 * c) for c in to_rgb(COLORS[slot])]
        columns = np.nonzero((picture == color).all(-1))[1]
        patches = columns < 260  # left of the legend
        assert patches.sum() > 30 * 30
    # Of many experts, colours repeat and numbers tell them apart.
    one = patches_picture(samples, {"l": as_choices([[0, 8, 8, 8, 8, 8, 8]], 64)}, "")
    other = patches_picture(samples, {"l": as_choices([[0, 8, 8, 8, 8, 8, 16]], 64)}, "")
    assert one.shape == other.shape and 20 < (one != other).any(-1).sum() < 4000


def test_sixteen_by_sixteen_patches_of_64_experts_fit():
    first = torch.randint(0, 64, (8, 256)).tolist()
    samples = ImageSamples(
        list(range(8)), np.zeros((8, 64, 64, 3), np.uint8), ["x"] * 8, (16,) * 2, 0
    )
    layers = {f"blocks.{i}": as_choices(first, 64) for i in range(4)}
    height, width, _ = patches_picture(samples, layers, " (4 of 100 layers)").shape
    assert height < 1500 and width < 3500


class Words(HTMLParser):
    """The marked tokens of a page: (classes, tip, text)."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.inside, self.paragraph = [], None, False

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "p":
            self.paragraph = attrs.get("class") == "text"
        if tag == "span" and self.paragraph:
            self.found.append([attrs["class"], attrs["title"], ""])
        self.inside = tag

    def handle_data(self, data):
        if self.paragraph and self.inside == "span":
            self.found[-1][2] += data

    def handle_endtag(self, tag):
        self.inside = "span" if tag == "sup" else None


def test_the_page_of_text():
    """Escaped, white space to be seen, places that are no token left out, experts in words."""
    pieces = ["<b>", " &", "\n", "\t", "é", ""]
    samples = TextSamples([0], [pieces])
    choices = as_choices([[0, 0, 11, -1, 2, 2]], 12)
    page = tokens_html(samples, {"blocks.<3>": choices}, "Tokens & more")
    words = Words()
    words.feed(page)
    assert [(kind, text) for kind, _, text in words.found] == [
        ("e0", "<b>"), ("e0", "·&"), ("e11", "⏎"), ("none", "→"), ("e2", "é"),
    ]  # fmt: skip
    assert [tip for _, tip, _ in words.found][2:4] == ["expert 11: 0.50", "no expert"]
    assert "blocks.&lt;3&gt;" in page and "Tokens &amp; more" in page and "<b>" not in page
    assert page.count("<sup>0</sup>") == 1, "a run has its number once"
    assert re.search(r"span\.none\{[^}]*outline", page) and "print-color-adjust" in page
    picture = tokens_picture(samples, {"blocks.3": choices}, "")
    assert picture.ndim == 3 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 5


def test_marks_of_the_heat_map():
    """Births and deaths at their step and slot; only slots that ever held an expert have a row."""
    history = RoutingHistory()
    for step, active in ((10, [1, 1, 0, 0, 0, 1]), (20, [1, 0, 1, 0, 0, 1])):
        active_E = torch.tensor(active, dtype=torch.bool)
        history.add(step, torch.arange(6.0) * active_E, active_E)
    events = [
        {"event": "birth", "slot": 2, "step": 12},
        {"event": "death", "slot": 1, "step": 12},
        {"event": "birth", "slot": 4, "step": 20},
    ]
    figure = load_figure("blocks.7", history, events)
    axes = figure.axes[0]
    births, deaths = axes.lines
    assert births.get_xydata().tolist() == [[12, 2], [20, 3]]
    assert deaths.get_xydata().tolist() == [[12, 1]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2", "4", "5"]
    shown = axes.collections[0].get_array()
    assert shown[4].tolist() == pytest.approx([5 / 2, 5 / (7 / 3)])  # mean loads 2 and 7/3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "no expert", "birth", "death",
    ]  # fmt: skip


def test_bars_and_matrix():
    shares = {"training": {"a": torch.tensor([0.25, 0.0, 0.5, 0.25])}}
    figure = taking_figure(shares, ["a"], "")
    bars = [bar.get_height() for bar in figure.axes[0].patches]
    assert bars == [25, 0, 50, 25]
    pooled = taking_figure({"training": {"a": torch.full((17,), 1 / 17)}}, ["a"], "").axes[0]
    assert pooled.get_xticklabels()[-1].get_text() == "8+"
    assert pooled.patches[-1].get_height() == pytest.approx(100 * 9 / 17)
    active_E = torch.tensor([True, False, True])
    similarity_RR = torch.tensor([[1.0, 0.5, -0.3], [0.5, 1.0, 0.9], [-0.3, 0.9, 1.0]])
    axes = similarity_figure("a", similarity_RR, active_E).axes[0]
    assert axes.images[0].get_array().filled(0).tolist() == [
        [0, pytest.approx(-0.3)],
        [pytest.approx(-0.3), 0],
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2"]


def drawn(folder, **options):
    """Trains four epochs with pictures; returns the callback and the steps that it drew at."""
    steps, fit_options = [], options.pop("fit", {})

    class Counting(RoutingPictures):
        def _draw(self, trainer):
            steps.append(trainer.global_step)
            super()._draw(trainer)

    pictures = Counting(**options)
    saving = ModelCheckpoint(None, "{step}", every_n_train_steps=1, save_top_k=-1)
    task = vision_task()
    trainer = make_trainer(
        folder, RoutingMonitor(2), pictures, saving, max_epochs=4, limit_train_batches=3,
        limit_val_batches=2,
    )  # fmt: skip
    trainer.fit(task, digits(), **fit_options)
    return pictures, steps


def test_when_pictures_are_drawn(tmp_path, monkeypatch):
    """First and last always, the rest as the time allows; the clock is the test's."""
    now = [0.0]
    monkeypatch.setattr(routing_pictures.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        RoutingPictures, "_pictures", lambda *_: now.__setitem__(0, now[0] + 1) or ()
    )
    assert drawn(tmp_path / "a", time_share=0.01)[1] == [3, 12]
    assert drawn(tmp_path / "b", time_share=1.0)[1] == [3, 6, 9, 12]
    assert drawn(tmp_path / "c", enabled=False)[1] == []


def test_pictures_of_a_run_and_of_its_second_half(tmp_path):
    """Files and fixed samples; a resumed run goes on with the history as it was."""
    whole, _ = drawn(tmp_path / "whole", samples=5, layers=1)
    folder = tmp_path / "whole" / "log" / "pictures"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "load_blocks.1.png", "similarity_blocks.1.png", "experts_per_token.png", "patches.png",
    }  # fmt: skip
    assert all(imread(path).std() > 0.02 for path in folder.iterdir())
    samples, _ = whole._samples()
    data = digits()
    data.setup("fit")
    batches = [images for images, _ in data.val_dataloader()]
    rows = [spread(180, 3), spread(179, 2)]  # five images from two batches
    expected = torch.cat([data.pixels(b)[r] for b, r in zip(batches, rows, strict=True)])
    assert np.array_equal(samples.pixels, expected.movedim(1, -1).numpy())
    path = tmp_path / "whole" / "log" / "checkpoints" / "step=5.ckpt"
    resumed, _ = drawn(tmp_path / "resumed", samples=5, layers=1, fit={"ckpt_path": path})
    for layer, history in whole.monitor.history.items():
        assert history.steps == [2, 4, 6, 8, 10, 12]
        assert same(resumed.monitor.history[layer].state_dict(), history.state_dict())


def test_of_a_hundred_layers_a_few_are_drawn(tmp_path):
    assert RoutingPictures().layers == 8
    blocks = [toy_block(partial(TopK, k=1)) for _ in range(100)]
    fit(tmp_path, Toy(*blocks), [tokens("0011")], RoutingMonitor(1), RoutingPictures(layers=3))
    names = sorted(path.name for path in (tmp_path / "log" / "pictures").glob("load_*"))
    layers = sorted(int(re.search(r"\d+", name)[0]) for name in names)
    assert layers == [0, 50, 99]


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"time_share must lie in \(0, 1\], got 0"):
        RoutingPictures(time_share=0)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        RoutingPictures(samples=0)
    with pytest.raises(MisconfigurationException, match="add that callback"):
        fit(tmp_path, Toy(toy_block()), [tokens("01")], RoutingPictures())
