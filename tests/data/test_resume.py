"""A Lightning run that was stopped sees the batches that it would have seen uninterrupted."""

import contextlib

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from data import DigitsData

EPOCHS, BATCHES = 3, 4


class Recorder(LightningModule):
    """Notes a fingerprint of every training batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        at = (self.trainer.current_epoch, batch_idx)
        self.seen.append((*at, images.double().sum().item(), labels.tolist()))
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.weight.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Estimating(Recorder):
    """Asks for the number of steps where Lightning then sets up the loaders too early (its issue
    20550): before it has read where a resumed run stands."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == EPOCHS * BATCHES
        return super().configure_optimizers()


class Stop(Callback):
    """Ends a run without ceremony, as a kill would."""

    def __init__(self, epoch, batch):
        self.at = (epoch, batch)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            raise KeyboardInterrupt


def run(folder, callbacks=(), ckpt_path=None, max_epochs=EPOCHS, task=Recorder, **options):
    torch.manual_seed(0)
    model = task()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = DigitsData(batch_size=1437 // BATCHES, randaugment_ops=1)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(model, data, ckpt_path=ckpt_path)
    return model.seen


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    seen = run(tmp_path_factory.mktemp("whole"))
    assert [at[:2] for at in seen] == [(e, b) for e in range(EPOCHS) for b in range(BATCHES)]
    assert len({fingerprint for *_, fingerprint, _ in seen}) == len(seen)
    return seen


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 7, 8])
def test_resume_after_any_step(tmp_path, uninterrupted, steps):
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    run(tmp_path, [checkpoint])
    path = tmp_path / f"step={steps}.ckpt"
    assert run(tmp_path, ckpt_path=path) == uninterrupted[steps:]


@pytest.mark.parametrize("steps", [2, 4, 7])
def test_resume_of_a_task_that_asks_for_the_number_of_steps(tmp_path, uninterrupted, steps):
    """Neither the wrong batches nor the order of another epoch."""
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    run(tmp_path, [checkpoint], task=Estimating)
    resumed = run(tmp_path, ckpt_path=tmp_path / f"step={steps}.ckpt", task=Estimating)
    assert resumed == uninterrupted[steps:]


@pytest.mark.parametrize("at_train_end", [True, False])
@pytest.mark.parametrize("epoch", [0, 1])
def test_resume_after_an_epoch(tmp_path, uninterrupted, epoch, at_train_end):
    checkpoint = ModelCheckpoint(
        tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=at_train_end
    )
    run(tmp_path, [checkpoint])
    seen = run(tmp_path, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
    assert seen == uninterrupted[(epoch + 1) * BATCHES :]


def test_resume_after_a_kill(tmp_path, uninterrupted):
    checkpoint = ModelCheckpoint(tmp_path, "last", every_n_train_steps=2)
    run(tmp_path, [checkpoint, Stop(1, 3)])
    assert run(tmp_path, ckpt_path=tmp_path / "last.ckpt") == uninterrupted[6:]


def test_more_epochs_after_the_end(tmp_path, uninterrupted):
    checkpoint = ModelCheckpoint(tmp_path, "last")
    run(tmp_path, [checkpoint], max_epochs=2)
    assert run(tmp_path, ckpt_path=tmp_path / "last.ckpt") == uninterrupted[8:]


def test_resume_with_limited_batches(tmp_path, uninterrupted):
    """An epoch cut short is followed by the next, not by its own rest."""
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"limit_train_batches": 3}
    whole = run(tmp_path, [checkpoint], **options)
    assert whole == [seen for seen in uninterrupted if seen[1] < 3]
    for steps in (2, 3, 4):
        assert run(tmp_path, ckpt_path=tmp_path / f"step={steps}.ckpt", **options) == whole[steps:]


@pytest.mark.parametrize("steps", [2, 4, 6])
def test_resume_after_validation_within_an_epoch(tmp_path, uninterrupted, steps):
    checkpoint = ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, monitor="val/loss", save_on_train_epoch_end=False
    )
    options = {"val_check_interval": 2}
    run(tmp_path, [checkpoint], **options)
    path = tmp_path / f"step={steps}.ckpt"
    assert run(tmp_path, ckpt_path=path, **options) == uninterrupted[steps:]
