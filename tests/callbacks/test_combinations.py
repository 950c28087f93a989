"""Every router, in both modalities, with and without default vectors and adaptive experts.

Each combination trains three steps, or refuses before the first with one clear sentence.
"""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from app.models import Decoder
from app.moe import Dense, MoEBlock, SwiGLUExperts, Ternary, TopAny, TopK, TopP
from app.tasks import LanguageModeling
from callbacks import AdaptiveExperts, DefaultVectors, RoutingMonitor
from data import TextData
from tests.callbacks.callback_support import Recorder, digits, make_trainer, vision_task

ROUTERS = {
    "dense": Dense,
    "top-k": TopK,
    "top-k normalised": partial(TopK, normalize=True),
    "top-k sparsemixer": partial(TopK, estimator="sparsemixer"),
    "top-k noisy": partial(TopK, noise=True),
    "top-p": TopP,
    "top-any": TopAny,
    "ternary selected": partial(Ternary, gates="selected"),
    "ternary always null": partial(Ternary, gates="always_null"),
    "ternary raw": partial(Ternary, gates="raw"),
}
# What refuses, and the gist of what it says.
NO_VECTORS = {
    "dense": "every expert is executed",
    "top-k normalised": "set normalize: false",
    "top-any": "use a softmax router",
    "ternary selected": "set gates: raw",
    "ternary always null": "set gates: raw",
}
NOT_ADAPTIVE = {
    "dense": "none is ever unused or missing",
    "ternary selected": "use TopAny, TopK or TopP",
    "ternary always null": "use TopAny, TopK or TopP",
    "ternary raw": "use TopAny, TopK or TopP",
}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    return folder


def language_task(router, block):
    torch.manual_seed(0)
    moe = partial(
        MoEBlock, router=router, experts=SwiGLUExperts, num_experts=4, max_experts=6, **block
    )
    network = Decoder(
        dim=16, depth=2, num_heads=2, hidden=32, max_length=16, moe=moe, moe_blocks=[0, 1]
    )
    return LanguageModeling(network, partial(torch.optim.AdamW, lr=1e-3), sample_tokens=0)


def train(folder, book, router, modality, vectors, adaptive):
    block = {"default_vectors": "ema"} if vectors else {}
    if modality == "vision":
        task, data = vision_task(ROUTERS[router], 4, 6, block=block), digits()
    else:
        task = language_task(ROUTERS[router], block)
        data = TextData(
            str(book / "book.txt"), block_size=16, batch_size=8, cache_dir=str(book / "cache")
        )
    callbacks = [Recorder(), RoutingMonitor(1)]
    callbacks += [DefaultVectors(0.9)] if vectors else []
    callbacks += [AdaptiveExperts(window_steps=(0, 2, 2))] if adaptive else []
    start = {name: p.detach().clone() for name, p in task.named_parameters()}
    options = {"limit_train_batches": 3, "limit_val_batches": 1}
    trainer = make_trainer(folder, *callbacks, max_steps=3, **options)
    trainer.fit(task, data)
    return task, start, callbacks


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("vectors", [False, True], ids=["plain", "default-vectors"])
@pytest.mark.parametrize("modality", ["vision", "language"])
@pytest.mark.parametrize("router", list(ROUTERS))
def test_trains_or_refuses(tmp_path, book, router, modality, vectors, adaptive):
    """Three finite steps that move the experts and the router, or one sentence."""
    reason = NO_VECTORS.get(router) if vectors else None
    kind = ValueError
    if reason is None and adaptive:
        reason, kind = NOT_ADAPTIVE.get(router), MisconfigurationException
    if reason is not None:
        with pytest.raises(kind) as error:
            train(tmp_path, book, router, modality, vectors, adaptive)
        message = str(error.value)
        cls = getattr(ROUTERS[router], "func", ROUTERS[router])
        assert "can't be combined with the router" in message and cls.__name__ in message
        assert reason in message and "\n" not in message
        return
    task, start, callbacks = train(tmp_path, book, router, modality, vectors, adaptive)
    assert len(callbacks[0].losses) == 3
    assert all(torch.isfinite(torch.tensor(callbacks[0].losses)))
    for name, parameter in task.named_parameters():
        assert parameter.isfinite().all(), name
    for name in ("up", "down"):
        moved = task.blocks["blocks.1"].experts.get_parameter(name)
        full = next(key for key in start if key.endswith(f"blocks.1.mlp.experts.{name}"))
        assert not torch.equal(moved, start[full])
    if vectors:
        for block in task.blocks.values():
            seen = block.default_seen_E
            assert seen.any() and not (seen & ~block.active_E).any()
            assert block.default_ED[seen].abs().sum(1).min() > 0
            assert not block.default_ED[~seen].any()
    if adaptive and router == "top-any":
        assert callbacks[-1].events
