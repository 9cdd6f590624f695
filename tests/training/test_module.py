"""An objective in the steps of a Trainer."""

import pytest
import torch
from lightning.pytorch.plugins import Precision
from training.members import Recorder, batch, expert, fitted, losses_of, noisy

from ddm_lightning.config.experiment import InitConfig, IslandConfig, TrainConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.training.ema import unsharded_ema
from ddm_lightning.training.objective import NUM_VALIDATION_TIMESTEPS, time_suffix


class Scaled(Precision):
    """A gradient scaler beside plain float32, which ``16-mixed`` has on GPUs alone."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def pre_backward(self, tensor, module):
        return super().pre_backward(self.scaler.scale(tensor), module)

    def optimizer_step(self, optimizer, model, closure, **_):
        closure()
        self._after_closure(model, optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()


@pytest.mark.parametrize("limit", [None, 1e-3, 100.0])
@pytest.mark.parametrize("plugins", [[], [Scaled()]])
def test_gradients_are_clipped_by_their_global_norm(limit, plugins):
    """AdamW's first moment after one step is a tenth of the gradient."""
    network = Recorder()
    other = Recorder()
    _, loss = losses_of(expert(other), batch())
    loss.backward()
    norm = other.gain.grad.abs().item()
    train = TrainConfig(1, 1, gradient_clip_norm=limit)
    module, trainer = fitted(expert(network, train=train), batch(), plugins=plugins)
    moment = trainer.optimizers[0].state[network.gain]["exp_avg"].abs().item()

    assert 10 * moment == pytest.approx(norm if limit is None else min(limit, norm), rel=1e-4)
    assert module.averages["train/gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert module.guard.num_skipped == 0


def test_the_loss_is_averaged_by_time_in_training():
    network = Recorder()
    module, _ = fitted(expert(network), batch())
    ((_, t, _),) = network.calls
    losses, loss = losses_of(expert(Recorder()), batch())
    expected = {"train/loss": loss.item()}
    for part in range(NUM_VALIDATION_TIMESTEPS):
        within = (t >= part / NUM_VALIDATION_TIMESTEPS) & (t < (part + 1) / NUM_VALIDATION_TIMESTEPS)
        if within.any():
            expected[f"train/loss{time_suffix(part)}"] = losses["loss"][within].mean().item()

    assert {name: value for name, value in module.averages.items() if "loss" in name} == pytest.approx(expected)


def test_batches_that_a_trainer_accumulates_over_draw_noise_of_their_own():
    """The first of a step what it draws without others."""
    network = Recorder()
    fitted(expert(network), *[batch()] * 4, max_steps=2, accumulate_grad_batches=2)
    times = [t for _, t, _ in network.calls]

    assert len({tuple(t.tolist()) for t in times}) == 4

    for step in range(2):
        assert torch.equal(times[2 * step], noisy(expert(), step=step).t)


@pytest.mark.parametrize(("source", "kept"), [(None, 0.0), (InitConfig("elsewhere"), 0.1)])
def test_the_average_starts_from_given_weights_and_not_from_random_ones(source, kept):
    """Its decay in the first step is (1 + 0) / (10 + 0)."""
    network = Recorder()
    train = TrainConfig(1, 1, learning_rate=0.1, ema_decay=0.9)
    _, trainer = fitted(expert(network, train=train, init_from=source), batch())
    average = unsharded_ema(network, trainer.optimizers[0])["gain"].item()

    assert average == pytest.approx(kept * 0.7 + (1 - kept) * network.gain.item(), abs=1e-6)
    assert abs(network.gain.item() - 0.7) > 0.05


def test_weights_over_timesteps_count_in_micro_batches_as_in_the_whole_batch():
    gains = []
    for loss, size in (("prediction", None), ("velocity", None), ("velocity", 4)):
        network = Recorder("x_0")
        train = TrainConfig(2, 1, learning_rate=0.1, gradient_clip_norm=None)
        island = IslandConfig(micro_batch_size=size)
        fitted(expert(network, train=train, loss=loss), batch(), batch(), island=island)
        gains.append(network.gain.item())

    assert gains[1] == pytest.approx(gains[2], rel=1e-5)
    assert gains[1] != pytest.approx(gains[0], rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "island", "words"),
    [
        (torch.float32, IslandConfig(attention="cudnn"), r"'cudnn' has no kernel for torch\.float32 on cpu"),
        (torch.bfloat16, None, r"'gain' is torch\.bfloat16: it must be built in float32"),
    ],
    ids=["attention", "half"],
)
def test_what_cannot_train_here_is_refused_before_the_first_step(dtype, island, words):
    network = Recorder().to(dtype)
    with pytest.raises(UserError, match=words):
        fitted(expert(network), batch(), island=island)

    assert not network.calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_machine_without_a_compiler_is_refused_before_the_first_step():
    from torch._inductor import config

    module = Recorder()
    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(
            UserError, match=r"'island.compile' = true: .*no-such-compiler.*; install .* island.compile=false"
        ),
    ):
        fitted(expert(module), batch(), island=IslandConfig(accelerator="cpu", compile=True))

    assert not module.calls

    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(UserError, match=r"'sample.compile' = true: .*no-such-compiler"),
    ):
        Ensemble([module], None, [1.0]).compile()
