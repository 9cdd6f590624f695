from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from training.members import SCALE, SHIFT, Recorder, at, batch, build, expert

from ddm_lightning.config.experiment import TimestepsConfig, TrainConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.encoders.stored import StoredForm
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.shards.datamodule import steps
from ddm_lightning.training.optimizer import build_optimizer
from ddm_lightning.training.roles import ExpertModule

NUM_TIMES = 8


def drawn(module, num=6):
    noised = module.noisy_batch(batch(num))
    return noised.noise, noised.t, noised.condition.keep


def test_equal_keys_repeat_the_step_and_nothing_else_does():
    module = expert(step=5, rank=1, condition_dropout=0.5)
    torch.manual_seed(1)
    first = drawn(module)
    torch.manual_seed(2)  # the global generator has no part in it
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(module), strict=True))
    others = [
        drawn(expert(step=6, rank=1, condition_dropout=0.5)),
        drawn(expert(step=5, rank=0, condition_dropout=0.5)),
        drawn(expert(step=5, rank=1, condition_dropout=0.5, seed=8)),
        drawn(expert(step=5, rank=1, condition_dropout=0.5, name="expert-1")),
    ]
    for noise, t, _ in others:
        assert not torch.equal(noise, first[0])
        assert not torch.equal(t, first[1])


def test_the_batch_lies_on_the_straight_path():
    noised = expert().noisy_batch(batch())
    x_0 = (batch()["x_0"].numpy().astype(np.float64) - 127.5) / 127.5
    t = noised.t.double().numpy()[:, None, None, None]
    np.testing.assert_allclose(noised.x_0.numpy(), x_0, atol=1e-6)
    np.testing.assert_allclose(noised.x_t.numpy(), (1 - t) * x_0 + t * noised.noise.double().numpy(), atol=1e-6)
    assert noised.x_t.dtype == noised.t.dtype == torch.float32
    assert x_0.min() >= -1
    assert x_0.max() <= 1


def test_timesteps_follow_their_density_and_are_shifted_for_the_resolution():
    """SD3 (2403.03206), section 5.3.2: t becomes 3t / (1 + 2t)."""
    plain, shifted = (
        expert(timesteps=TimestepsConfig(mean=0.5, std=0.8, shift=shift)).noisy_batch(batch(4000)).t.double().numpy()
        for shift in (1.0, 3.0)
    )
    logit = np.log(plain) - np.log1p(-plain)
    assert (logit.mean(), logit.std()) == (pytest.approx(0.5, abs=0.05), pytest.approx(0.8, abs=0.04))
    np.testing.assert_allclose(shifted, 3 * plain / (1 + 2 * plain), rtol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 1.0])
def test_conditions_are_dropped_as_often_as_asked(dropout):
    num, steps = 500, 40
    kept = torch.cat(
        [expert(step=step, condition_dropout=dropout).noisy_batch(batch(num)).condition.keep for step in range(steps)]
    )
    spread = 4 * np.sqrt(dropout * (1 - dropout) / (num * steps))
    assert abs((~kept).double().mean().item() - dropout) <= spread


def test_dropping_is_independent_of_noise_and_time():
    """A generator used twice from its beginning would tie the three together."""
    noised = expert(condition_dropout=0.5).noisy_batch(batch(4000))
    keep = noised.condition.keep.double().numpy()
    for other in (noised.t.double().numpy(), noised.noise[:, 0, 0, 0].double().numpy()):
        assert abs(np.corrcoef(keep, other)[0, 1]) < 0.06


@pytest.mark.parametrize(("kind", "size", "name"), [("text", 6, "text"), ("class", 5, "label")])
def test_the_condition_is_the_batchs(kind, size, name):
    condition = expert(condition=ConditionSpec(kind, size)).noisy_batch(batch()).condition
    assert torch.equal(condition.values, batch()[name])
    assert expert(condition=ConditionSpec("none", 0)).noisy_batch(batch()).condition is None


def test_half_of_the_images_are_mirrored_left_to_right_when_asked():
    plain = expert(train=TrainConfig(1, 1)).noisy_batch(batch(400)).x_0
    mirrored = expert(train=TrainConfig(1, 1, horizontal_flip=True)).noisy_batch(batch(400)).x_0
    same = (mirrored == plain).flatten(1).all(1)
    flipped = (mirrored == plain.flip(3)).flatten(1).all(1)
    assert bool((same ^ flipped).all())
    assert 150 < int(flipped.sum()) < 250


def test_the_mirrored_images_own_encoding_is_used_where_it_is_stored():
    """An encoder is not symmetric: the mirrored latent is not the latent of the mirrored image."""
    num = 400
    stored = batch(num)
    stored["x_0_flipped"] = 255 - batch(num, seed=1)["x_0"]
    module = expert(train=TrainConfig(1, 1, horizontal_flip=True))
    found = module.noisy_batch(stored).x_0
    itself = (found == (stored["x_0"].float() - SHIFT) * SCALE).flatten(1).all(1)
    flipped = (found == (stored["x_0_flipped"].float() - SHIFT) * SCALE).flatten(1).all(1)
    assert bool((itself ^ flipped).all())
    assert 150 < int(flipped.sum()) < 250
    # The same samples as where the shards hold no such column, and none without the setting.
    mirrored = module.noisy_batch(batch(num)).x_0
    assert torch.equal(flipped, (mirrored != (batch(num)["x_0"].float() - SHIFT) * SCALE).flatten(1).any(1))
    plain = expert(train=TrainConfig(1, 1)).noisy_batch(stored).x_0
    assert torch.equal(plain, (stored["x_0"].float() - SHIFT) * SCALE)


POSTERIOR = StoredForm("posterior", {"scale": [0.5, 2.0, 1.0], "shift": [0.0, -1.0, 3.0]})


def posterior_batch(num=6):
    drawn = torch.Generator().manual_seed(3)
    mean, spread = torch.randn(num, 3, 4, 4, generator=drawn), torch.rand(num, 3, 4, 4, generator=drawn) + 0.5
    return {**batch(num), "x_0": torch.cat([mean, spread], 1).half()}


def test_a_posterior_is_drawn_anew_at_each_step_by_the_keyed_generator():
    stored = posterior_batch()

    def x_0(step=5, rank=1, **changes):
        return expert(step=step, rank=rank, stored=POSTERIOR, **changes).noisy_batch(stored).x_0

    torch.manual_seed(1)
    first = x_0()
    torch.manual_seed(2)
    assert torch.equal(first, x_0()), "a resumed step draws what it drew"
    for other in (x_0(step=6), x_0(rank=0), x_0(seed=8), x_0(name="expert-1")):
        assert not torch.isclose(other, first).any(1).all()
    noised = expert(step=5, rank=1, stored=POSTERIOR).noisy_batch(stored)
    t = noised.t[:, None, None, None]
    torch.testing.assert_close(noised.x_t, (1 - t) * noised.x_0 + t * noised.noise)


def test_draws_of_a_posterior_have_its_mean_and_spread_and_nothing_of_the_noise():
    stored = {name: values[:1].expand(4000, *values.shape[1:]) for name, values in posterior_batch().items()}
    noised = expert(stored=POSTERIOR).noisy_batch(stored)
    mean, spread = POSTERIOR.mean(stored["x_0"][:1])[0].numpy(), POSTERIOR.std(stored["x_0"][:1])[0].numpy()
    z = (noised.x_0.numpy() - mean) / spread
    assert np.abs(z.mean(0)).max() < 5 / np.sqrt(4000) and np.abs(z.std(0) - 1).max() < 5 / np.sqrt(8000)
    for other in (noised.noise.numpy()[:, 1, 2, 2], noised.noise.numpy()[:, 0, 0, 0], noised.t.numpy()):
        assert abs(np.corrcoef(z[:, 0, 0, 0], other)[0, 1]) < 0.08


def test_validation_looks_at_the_mean_of_a_posterior():
    stored = posterior_batch()
    mean = (stored["x_0"][:, :3].double().numpy() - np.reshape([0.0, -1.0, 3.0], (3, 1, 1))) * np.reshape(
        [0.5, 2.0, 1.0], (3, 1, 1)
    )
    for step in (0, 9):
        module = expert(step=step, stored=POSTERIOR)
        np.testing.assert_allclose(module.noisy_validation_batch(stored, 2, 3).x_0.numpy(), mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(module.normalised(stored).numpy(), mean, rtol=1e-6, atol=1e-6)


class OnlineText:
    """Counts the ids of a caption: what a text network does in a way that can be checked."""

    def vectors_of_stored(self, stored):
        return torch.nn.functional.one_hot(stored["text_ids"].long(), 6).sum(1).float()


def test_token_ids_become_vectors_while_training():
    stored = {name: values for name, values in batch().items() if name != "text"}
    stored["text_ids"] = torch.tensor([[0, 1], [5, 5], [2, 3], [4, 0], [1, 1], [3, 5]], dtype=torch.int32)
    expected = np.zeros((6, 6), np.float32)
    for row, ids in enumerate(stored["text_ids"].tolist()):
        for number in ids:
            expected[row, number] += 1
    module = expert(caption_encoder=OnlineText())
    np.testing.assert_array_equal(module.noisy_batch(stored).condition.values.numpy(), expected)
    np.testing.assert_array_equal(module.noisy_validation_batch(stored, 0, 0).condition.values.numpy(), expected)
    # Vectors that are stored win: they are not computed twice.
    both = {**stored, "text": batch()["text"]}
    assert torch.equal(module.noisy_batch(both).condition.values, both["text"])
    unconditional = expert(caption_encoder=OnlineText(), condition=ConditionSpec("none", 0))
    assert unconditional.noisy_batch(stored).condition is None


def test_validation_is_the_same_at_every_step_and_for_every_member():
    first = [expert().noisy_validation_batch(batch(), 2, index) for index in range(NUM_TIMES)]
    later = [expert(step=99, name="expert-3").noisy_validation_batch(batch(), 2, index) for index in range(NUM_TIMES)]
    for index, (a, b) in enumerate(zip(first, later, strict=True)):
        assert torch.equal(a.noise, b.noise)
        assert torch.equal(a.x_t, b.x_t)
        np.testing.assert_allclose(a.t.numpy(), (index + 0.5) / NUM_TIMES)
        assert bool(a.condition.keep.all())
    noises = {noised.noise.numpy().tobytes() for noised in first}
    noises.add(expert().noisy_validation_batch(batch(), 3, 0).noise.numpy().tobytes())
    assert len(noises) == NUM_TIMES + 1


@pytest.mark.parametrize("num_held_out", [24, 20, 21])  # the last step is full, and is not
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("edge", [4, 6])  # torch draws numbers of multiples of 16 otherwise than others
def test_a_held_out_sample_has_the_same_noise_on_any_number_of_ranks(num_ranks, num_held_out, edge):
    whole, size = batch(num_held_out), 8
    whole["x_0"] = torch.zeros(num_held_out, 3, edge, edge, dtype=torch.uint8)

    def noises(ranks_of_step):
        found = {}
        for rank in range(ranks_of_step):
            module = expert(rank=rank, num_ranks=ranks_of_step, batch_size=size)
            dealt = steps(np.arange(num_held_out), rank, ranks_of_step, size // ranks_of_step, full=False)
            for index, rows in enumerate(dealt):
                noised = module.noisy_validation_batch({name: column[rows] for name, column in whole.items()}, index, 5)
                # The first ones come once more where ranks would have unequally many.
                found = dict(zip(rows.tolist(), noised.noise, strict=True)) | found
        return torch.stack([found[row] for row in range(num_held_out)])

    one = noises(1)
    assert len(one.unique(dim=0)) == num_held_out
    assert torch.equal(noises(num_ranks), one)


def test_the_loss_can_be_that_of_the_velocity():
    plain, weighted = (expert(Recorder("x_0"), loss=loss) for loss in ("prediction", "velocity"))
    noised, found = plain.noisy_batch(batch()), weighted.training_step(batch(), 0)
    each = plain.compute_losses(noised, batch())["loss"]
    assert found.item() == pytest.approx((each / noised.t.clamp(min=0.05) ** 2).mean().item(), rel=1e-5)


@pytest.mark.parametrize("prediction", ["velocity", "epsilon", "x_0"])
def test_the_loss_is_the_mean_squared_error_of_what_is_predicted(prediction):
    network = Recorder(prediction)
    module = expert(network)
    loss = module.training_step(batch(), 0)
    ((x_t, t, _),) = network.calls
    x_0 = batch()["x_0"].double().numpy() * SCALE - SHIFT * SCALE
    times = t.double().numpy()[:, None, None, None]
    noise = (x_t.double().numpy() - (1 - times) * x_0) / times
    target = {"velocity": noise - x_0, "epsilon": noise, "x_0": x_0}[prediction]
    assert loss.item() == pytest.approx(np.mean((0.7 * x_t.double().numpy() - target) ** 2), rel=1e-4)
    loss.backward()
    assert network.gain.grad is not None
    squares = (0.7 * x_t.double().numpy() - target) ** 2
    expected = {"train/loss": loss.item()}
    for part in range(NUM_TIMES):
        within = (t.numpy() >= part / NUM_TIMES) & (t.numpy() < (part + 1) / NUM_TIMES)
        if within.any():
            expected[f"train/loss_t{(part + 0.5) / NUM_TIMES:.3f}"] = squares[within].mean()
    assert module.drain("train/") == pytest.approx(expected, rel=1e-4)


def test_held_out_losses_weigh_samples_and_not_batches():
    network = Recorder()
    module = expert(network)
    batches = [batch(6, seed=1), batch(2, seed=2)]
    for index, part in enumerate(batches):
        module.validation_step(part, index)
    squares = {index: [] for index in range(NUM_TIMES)}
    for call, (x_t, t, condition) in enumerate(network.calls):
        part = batches[call // NUM_TIMES]
        x_0 = (part["x_0"].double() - SHIFT) * SCALE
        times = t.double()[:, None, None, None]
        noise = (x_t.double() - (1 - times) * x_0) / times
        squares[call % NUM_TIMES] += (0.7 * x_t.double() - (noise - x_0)).square().mean((1, 2, 3)).tolist()
        assert bool(condition.keep.all())
    figures = module.drain("held_out/")
    for index, values in squares.items():
        assert len(values) == 8
        assert figures[f"held_out/loss_t{(index + 0.5) / 8:.3f}"] == pytest.approx(np.mean(values), rel=1e-4)
    assert figures["held_out/loss"] == pytest.approx(np.mean(list(squares.values())), rel=1e-4)
    assert len(figures) == 1 + NUM_TIMES


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_averages_are_drained_by_prefix_without_what_is_not_finite(value):
    module = expert()
    for one in (1.0, value, 6.0):
        module.accumulate("train/a", torch.tensor(one))
    module.accumulate("train/b_by_time", torch.tensor([2.0, value, 0.0]), torch.tensor([4, 5, 0]))
    module.accumulate("train/c", torch.tensor(value))
    module.accumulate("held_out/d", torch.tensor(10.0), 4)
    assert module.drain("train/") == {"train/a": 3.5, "train/b_t0.167": 0.5}
    assert module.drain("train/") == {}, "averages start anew"
    assert module.drain("held_out/") == {"held_out/d": 2.5}


def test_where_a_gradient_scaler_leaves_out_steps_nothing_is_kept_of_them():
    module, optimizer = expert(), SimpleNamespace()
    for step in range(3):
        at(module, step)
        module.trainer.scaler = object()
        module.training_step(batch(), 0).backward()
        module.configure_gradient_clipping(optimizer)
    assert module.guard._seen == [] and not hasattr(optimizer, "found_inf")


def test_a_networks_own_dropout_is_keyed_by_the_step():
    def draw(step, rank=0):
        module = expert(step=step, rank=rank)
        module.on_train_batch_start(batch(), 0)
        return torch.rand(4)

    torch.manual_seed(5)
    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    assert not torch.equal(draw(3), draw(3, rank=1))


@pytest.mark.parametrize("limit", [None, 0.5, 100.0])
def test_gradients_are_clipped_by_their_global_norm(limit):
    """AdamW's first moment after one step is a tenth of the gradient."""
    network = Recorder()
    network.other = torch.nn.Parameter(torch.ones(3))
    module = expert(network, train=TrainConfig(1, 1, gradient_clip_norm=limit))
    network.gain.grad, network.other.grad = torch.tensor(2.0), torch.tensor([1.0, 2.0, 4.0])
    optimizer = build_optimizer(network, module.member.train)
    module.configure_gradient_clipping(optimizer)
    optimizer.step()
    assert optimizer.found_inf == 0
    factor = 0.1 if limit is None else 0.1 * min(1.0, limit / 5.0)
    moments = {name: optimizer.state[p]["exp_avg"].numpy() for name, p in network.named_parameters()}
    np.testing.assert_allclose(moments["other"], factor * np.array([1.0, 2.0, 4.0]), rtol=1e-6)
    assert moments["gain"] == pytest.approx(2.0 * factor, rel=1e-6)
    assert module.drain("train/") == {"train/gradient_norm": pytest.approx(5.0)}


@pytest.mark.parametrize("limit", [0.05, None])
def test_a_scaled_gradient_is_clipped_by_its_own_norm(limit):
    """The fused optimizer and a scaler beside plain float32: the same limit, the same step."""
    ends = []
    for scale in (None, 1024.0):
        module = expert(train=TrainConfig(1, 1, gradient_clip_norm=limit, learning_rate=0.1))
        optimizer = build_optimizer(module.network, module.member.train)
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        module.trainer.scaler = scaler
        loss = 3 * module.network.gain
        (loss if scaler is None else scaler.scale(loss)).backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        moment = optimizer.state[module.network.gain]["exp_avg"].item()  # a tenth of the gradient
        assert 10 * moment == pytest.approx(3.0 if limit is None else limit, rel=1e-4)
        ends.append(module.network.gain.item())
        assert module.drain("train/")["train/gradient_norm"] == pytest.approx(3.0)
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


def plain_trainer(**settings):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(accelerator="cpu", limit_val_batches=0, **dict.fromkeys(quiet, False), **settings)


def test_batches_that_a_trainer_accumulates_over_draw_noise_of_their_own():
    """The first of a step what it draws without others."""
    network = Recorder()
    batches = DataLoader([batch()] * 4, batch_size=None)
    trainer = plain_trainer(max_steps=2, accumulate_grad_batches=2)
    trainer.fit(build(ExpertModule, network), batches, batches)
    times = [t for _, t, _ in network.calls]
    assert len({tuple(t.tolist()) for t in times}) == 4
    for step in range(2):
        assert torch.equal(times[2 * step], expert(step=step).noisy_batch(batch()).t)


def test_weights_over_timesteps_count_in_micro_batches_as_in_the_whole_batch():
    gains = []
    for changes in ({}, {"loss": "velocity"}, {"loss": "velocity", "micro_batch_size": 4}):
        network = Recorder("x_0")
        batches = DataLoader([batch()] * 2, batch_size=None)
        train = TrainConfig(2, 1, learning_rate=0.1, gradient_clip_norm=None)
        plain_trainer(max_steps=2).fit(build(ExpertModule, network, train=train, **changes), batches, batches)
        gains.append(network.gain.item())
    assert gains[1] == pytest.approx(gains[2], rel=1e-5)
    assert gains[1] != pytest.approx(gains[0], rel=1e-5)


def test_attention_that_cannot_run_here_is_refused_before_the_first_step():
    network = Recorder()
    batches = DataLoader([batch()], batch_size=None)
    with pytest.raises(UserError, match=r"'cudnn' has no kernel for torch\.float32 on cpu"):
        plain_trainer(max_steps=1).fit(build(ExpertModule, network, attention="cudnn"), batches, batches)
    assert not network.calls
