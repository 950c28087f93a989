"""The classification task: optimizer groups, schedule, losses."""

from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from app.errors import ConfigError
from app.models import Decoder, VisionTransformer
from app.moe import MoEBlock, SwiGLUExperts, Ternary, TopAny, TopK
from app.tasks import ImageClassification
from app.tasks.base import parameter_groups
from data import DigitsData

SIZE = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 16, "depth": 2, "heads": 2}


def network(router=TopK, **block) -> VisionTransformer:
    torch.manual_seed(0)
    moe = partial(MoEBlock, router=router, **{"num_experts": 4} | block)
    return VisionTransformer(**SIZE, moe=moe, moe_blocks=[1])


def names_of(model, group) -> set[str]:
    wanted = {id(parameter) for parameter in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in wanted}


def test_weight_decay_is_for_matrices_only():
    model = network(partial(TopAny, learn_temperature=True, mlp_hidden=8), shared_experts=1)
    decayed, rest = parameter_groups(model)
    assert rest["weight_decay"] == 0.0
    assert names_of(model, decayed) == {
        "patch_embed.proj.weight",
        *(f"blocks.{i}.attn.{layer}.weight" for i in (0, 1) for layer in ("qkv", "proj")),
        *(f"blocks.0.mlp.{layer}.weight" for layer in ("fc1", "fc2")),
        *(f"blocks.1.mlp.{part}.{w}" for part in ("experts", "shared") for w in ("up", "down")),
        "head.weight",
    }
    every = [p for p in model.parameters() if p.requires_grad]
    assert len(decayed["params"]) + len(rest["params"]) == len(every)


def test_an_embedding_tied_to_the_output_is_not_decayed():
    moe = partial(MoEBlock, experts=SwiGLUExperts, num_experts=2)
    model = Decoder(
        vocab_size=32, dim=16, depth=2, num_heads=2, tie_embeddings=True, moe=moe, moe_blocks=[1]
    )
    decayed, rest = parameter_groups(model)
    assert any(32 in p.shape for p in rest["params"])
    assert not any(32 in p.shape for p in decayed["params"])


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_learning_rate_warms_up_and_decays(schedule):
    task = ImageClassification(
        network(), partial(torch.optim.AdamW, lr=0.5), schedule=schedule, warmup=0.25
    )
    rates: list[float] = []

    class Recorder(L.Callback):
        def on_train_batch_start(self, trainer, *_) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = L.Trainer(
        max_epochs=2,
        limit_train_batches=8,
        accumulate_grad_batches=2,
        accelerator="cpu",
        callbacks=[Recorder()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(task, DigitsData(batch_size=16))
    steps = rates[::2]  # eight optimizer steps of two batches
    assert steps[:3] == pytest.approx([0.005, 0.5 * (0.01 + 0.99 / 2), 0.5])
    if schedule == "constant":
        assert steps[3:] == pytest.approx([0.5] * 5)
    else:
        assert steps[3:] == sorted(steps[3:], reverse=True)
        assert steps[5] == pytest.approx(0.5 * (0.01 + 0.99 * 0.5))  # half way down


def test_a_schedule_without_an_end_is_refused():
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"trainer\.max_epochs or trainer\.max_steps"):
        trainer.fit(ImageClassification(network()), DigitsData(batch_size=16))


@pytest.mark.parametrize(
    ("router", "losses", "says"),
    [
        (TopK, {"nonsense": 1.0}, "no loss 'nonsense'"),
        (TopK, {"topany": 1.0}, "loss topany is defined for top-any routing only"),
        (TopAny, {"z_loss": 1.0}, "loss z_loss is defined for softmax routing only"),
        (Ternary, {"efficiency": 1.0}, "blocks.1 has a Ternary router"),
    ],
)
def test_losses_that_do_not_fit_the_router_are_refused(router, losses, says):
    with pytest.raises(ValueError, match=says):
        ImageClassification(network(router), losses=losses)


def test_auxiliary_losses_train_but_are_not_in_the_logged_loss():
    weights = {"load_balance": 0.5, "z_loss": 0.25}
    task = ImageClassification(network(), losses=weights, label_smoothing=0.1)
    logged: dict[str, float] = {}
    task.log = lambda name, value, **_: logged.update({name: value})
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    total = task.training_step((images, labels), 0)
    plain = F.cross_entropy(task(images), labels, label_smoothing=0.1)
    torch.testing.assert_close(logged["train/loss"], plain)
    auxiliary = sum(weight * logged[f"train/aux/{name}"] for name, weight in weights.items())
    torch.testing.assert_close(total, plain + auxiliary)
    total.backward()
    assert task.blocks["blocks.1"].router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_mixing_changes_images_and_labels(mixup, cutmix):
    task = ImageClassification(network(), mixup=mixup, cutmix=cutmix)
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    mixed, soft = task.mix(images, labels)
    assert soft.shape == (8, 10)
    torch.testing.assert_close(soft.sum(1), torch.ones(8))
    assert not torch.equal(mixed, images)
    task.log = lambda *_, **__: None
    assert torch.isfinite(task.training_step((images, labels), 0))
