import numpy as np
import pytest
import torch
from training.members import SCALE, SHIFT, Recorder, batch, build, expert, figures, held_out, losses_of, noisy

from ddm_lightning.config.experiment import TimestepsConfig, TrainConfig
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.path import PATHS
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.roles import ROLES
from ddm_lightning.shards.datamodule import steps
from ddm_lightning.training.objective import Averages, Distillation, Position

NUM_TIMES = 8


def test_timesteps_follow_their_density_and_are_shifted_for_the_resolution():
    """SD3 (2403.03206), section 5.3.2: t becomes 3t / (1 + 2t)."""
    plain, shifted = (
        noisy(expert(timesteps=TimestepsConfig(mean=0.5, std=0.8, shift=shift)), batch(4000)).t.double().numpy()
        for shift in (1.0, 3.0)
    )
    logit = np.log(plain) - np.log1p(-plain)

    assert (logit.mean(), logit.std()) == (pytest.approx(0.5, abs=0.05), pytest.approx(0.8, abs=0.04))

    np.testing.assert_allclose(shifted, 3 * plain / (1 + 2 * plain), rtol=1e-4)


def test_a_shape_of_a_quarter_of_the_tokens_has_half_the_shift():
    """SD3, eq. 23; batches are of 4 x 4 cells."""
    timesteps = TimestepsConfig(shift=2.0, shift_by_tokens=True)
    found = noisy(expert(timesteps=timesteps, x_shape=(3, 8, 8)), batch()).t
    assert torch.equal(found, noisy(expert(timesteps=TimestepsConfig(shift=1.0)), batch()).t)
    own = noisy(expert(timesteps=timesteps), batch()).t
    assert torch.equal(own, noisy(expert(timesteps=TimestepsConfig(shift=2.0)), batch()).t)


@pytest.mark.parametrize("path", ["linear", "cosine", "vp"])
def test_an_expert_of_some_noise_levels_trains_and_validates_on_them_alone(path):
    """Its interval is of the linear path's t = sigma/(alpha + sigma), whatever path it trains on."""
    objective = expert(interval=(0.4, 0.7), path=path, timesteps=TimestepsConfig(shift=3.0))
    drawn_at = noisy(objective, batch(4000)).t.double()
    _, t = PATHS[path].to_linear(drawn_at, drawn_at)

    assert (t.min().item(), t.max().item()) == (pytest.approx(0.4, abs=2e-3), pytest.approx(0.7, abs=2e-3))

    objective.validate(batch(), 0, Position(0))
    fixed = {name.rpartition("_t")[2] for name in objective.held_out_figures() if "_t" in name}
    middles = torch.arange(NUM_TIMES).double() / NUM_TIMES + 1 / 16
    wanted = middles[((linear := PATHS[path].to_linear(middles, middles)[1]) >= 0.4) & (linear < 0.7)]

    assert fixed == {f"{middle:.3f}" for middle in wanted.tolist()} and len(fixed) > 0
    assert expert(interval=(0.9, 0.92)).timesteps == {0: pytest.approx(0.91)}  # none of the fixed ones


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 1.0])
def test_conditions_are_dropped_as_often_as_asked(dropout):
    num = 500
    steps = 40
    kept = torch.cat(
        [noisy(expert(condition_dropout=dropout), batch(num), step).condition.keep for step in range(steps)]
    )
    spread = 4 * np.sqrt(dropout * (1 - dropout) / (num * steps))

    assert abs((~kept).double().mean().item() - dropout) <= spread


def test_dropping_is_independent_of_noise_and_time():
    """A generator used twice from its beginning would tie the three together."""
    noised = noisy(expert(condition_dropout=0.5), batch(4000))
    keep = noised.condition.keep.double().numpy()
    for other in (noised.t.double().numpy(), noised.noise[:, 0, 0, 0].double().numpy()):
        assert abs(np.corrcoef(keep, other)[0, 1]) < 0.06


@pytest.mark.parametrize(("kind", "size", "name"), [("text", 6, "text"), ("class", 5, "label")])
def test_the_condition_is_the_batchs(kind, size, name):
    condition = noisy(expert(condition=ConditionSpec(kind, size)), batch()).condition

    assert torch.equal(condition.values, batch()[name])
    assert noisy(expert(condition=ConditionSpec("none", 0)), batch()).condition is None


@pytest.mark.parametrize("is_stored", [False, True], ids=["pixels", "stored"])
def test_half_of_the_images_are_mirrored_when_asked(is_stored):
    """By their own encoding where it is stored: the mirrored latent is not the latent of the mirrored image."""
    num = 400
    given = batch(num)
    mirrored = given["x_0"].flip(3)
    if is_stored:
        mirrored = given["x_0_flipped"] = 255 - batch(num, seed=1)["x_0"]

    plain = noisy(expert(train=TrainConfig(1, 1)), given).x_0
    found = noisy(expert(train=TrainConfig(1, 1, horizontal_flip=True)), given).x_0

    assert torch.equal(plain, (given["x_0"].float() - SHIFT) * SCALE)

    same = (found == plain).flatten(1).all(1)
    flipped = (found == (mirrored.float() - SHIFT) * SCALE).flatten(1).all(1)

    assert bool((same ^ flipped).all())
    assert 150 < int(flipped.sum()) < 250

    # The same samples as where the shards hold no such column.
    other = noisy(expert(train=TrainConfig(1, 1, horizontal_flip=True)), batch(num)).x_0
    assert torch.equal(flipped, (other != plain).flatten(1).any(1))


POSTERIOR = StoredForm("posterior", {"scale": [0.5, 2.0, 1.0], "shift": [0.0, -1.0, 3.0]})


def posterior_batch(num=6):
    drawn = torch.Generator().manual_seed(3)
    mean = torch.randn(num, 3, 4, 4, generator=drawn)
    spread = torch.rand(num, 3, 4, 4, generator=drawn) + 0.5
    return {**batch(num), "x_0": torch.cat([mean, spread], 1).half()}


def test_equal_keys_repeat_the_step():
    """Of a posterior, too."""

    def drawn(seed):
        torch.manual_seed(seed)  # the global generator has no part in it
        noised = noisy(expert(stored=POSTERIOR, condition_dropout=0.5), posterior_batch(), 5, 1)
        return noised.x_0, noised.noise, noised.t, noised.condition.keep

    assert all(torch.equal(a, b) for a, b in zip(drawn(1), drawn(2), strict=True))


def test_draws_of_a_posterior_have_its_mean_and_spread_and_nothing_of_the_noise():
    stored = {name: values[:1].expand(4000, *values.shape[1:]) for name, values in posterior_batch().items()}
    noised = noisy(expert(stored=POSTERIOR), stored)
    mean = POSTERIOR.mean(stored["x_0"][:1])[0].numpy()
    spread = POSTERIOR.std(stored["x_0"][:1])[0].numpy()
    z = (noised.x_0.numpy() - mean) / spread

    assert np.abs(z.mean(0)).max() < 5 / np.sqrt(4000) and np.abs(z.std(0) - 1).max() < 5 / np.sqrt(8000)

    for other in (noised.noise.numpy()[:, 1, 2, 2], noised.noise.numpy()[:, 0, 0, 0], noised.t.numpy()):
        assert abs(np.corrcoef(z[:, 0, 0, 0], other)[0, 1]) < 0.08


def test_validation_looks_at_the_mean_of_a_posterior():
    stored = posterior_batch()
    mean = (stored["x_0"][:, :3].double().numpy() - np.reshape([0.0, -1.0, 3.0], (3, 1, 1))) * np.reshape(
        [0.5, 2.0, 1.0], (3, 1, 1)
    )
    objective = expert(stored=POSTERIOR)
    for found in (held_out(objective, stored, 2, 3).x_0, objective.x_0(stored)):
        np.testing.assert_allclose(found.numpy(), mean, rtol=1e-6, atol=1e-6)


class OnlineText:
    """Counts the ids of a caption: what a text network does in a way that can be checked."""

    def vectors_of_stored(self, stored):
        return torch.nn.functional.one_hot(stored["text_ids"].long(), 6).sum(1).float()


def test_token_ids_become_vectors_while_training():
    stored = {name: values for name, values in batch().items() if name != "text"}
    stored["text_ids"] = torch.tensor([[0, 1], [5, 5], [2, 3], [4, 0], [1, 1], [3, 5]], dtype=torch.int32)
    expected = np.eye(6)[stored["text_ids"].numpy()].sum(1)
    objective = expert(caption_encoder=OnlineText())
    np.testing.assert_array_equal(noisy(objective, stored).condition.values.numpy(), expected)
    np.testing.assert_array_equal(held_out(objective, stored, 0, 0).condition.values.numpy(), expected)
    unconditional = expert(caption_encoder=OnlineText(), condition=ConditionSpec("none", 0))

    assert noisy(unconditional, stored).condition is None


def test_validation_is_the_same_for_every_member():
    for index in range(NUM_TIMES):
        first = held_out(expert(), batch(), 2, index)
        later = held_out(expert(name="expert-3"), batch(), 2, index)
        assert torch.equal(first.x_t, later.x_t)
        np.testing.assert_allclose(first.t.numpy(), (index + 0.5) / NUM_TIMES)
        assert bool(first.condition.keep.all())


@pytest.mark.parametrize("num_held_out", [24, 20, 21])  # the last step is full, and is not
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("edge", [4, 6])  # torch draws numbers of multiples of 16 otherwise than others
def test_a_held_out_sample_has_the_same_noise_on_any_number_of_ranks(num_ranks, num_held_out, edge):
    whole = batch(num_held_out)
    size = 8
    whole["x_0"] = torch.zeros(num_held_out, 3, edge, edge, dtype=torch.uint8)

    def noises(ranks_of_step):
        found = {}
        for rank in range(ranks_of_step):
            objective = expert(batch_size=size)
            dealt = steps(np.arange(num_held_out), rank, ranks_of_step, size // ranks_of_step, full=False)
            for index, rows in enumerate(dealt):
                part = {name: column[rows] for name, column in whole.items()}
                noised = held_out(objective, part, index, 5, rank, ranks_of_step)
                # The first ones come once more where ranks would have unequally many.
                found = dict(zip(rows.tolist(), noised.noise, strict=True)) | found

        return torch.stack([found[row] for row in range(num_held_out)])

    one = noises(1)

    assert len(one.unique(dim=0)) == num_held_out
    assert torch.equal(noises(num_ranks), one)


@pytest.mark.parametrize("prediction", ["velocity", "epsilon", "x_0"])
def test_the_loss_is_the_mean_squared_error_of_what_is_predicted(prediction):
    network = Recorder(prediction)
    _, loss = losses_of(expert(network), batch())
    ((x_t, t, _),) = network.calls
    x_0 = batch()["x_0"].double().numpy() * SCALE - SHIFT * SCALE
    times = t.double().numpy()[:, None, None, None]
    noise = (x_t.double().numpy() - (1 - times) * x_0) / times
    target = {"velocity": noise - x_0, "epsilon": noise, "x_0": x_0}[prediction]

    assert loss.item() == pytest.approx(np.mean((0.7 * x_t.double().numpy() - target) ** 2), rel=1e-4)

    loss.backward()
    assert network.gain.grad is not None


def test_held_out_losses_weigh_samples_and_not_batches():
    network = Recorder()
    batches = [batch(6, seed=1), batch(2, seed=2)]
    found = figures(expert(network), *batches)
    squares = {index: [] for index in range(NUM_TIMES)}
    for call, (x_t, t, condition) in enumerate(network.calls):
        part = batches[call // NUM_TIMES]
        x_0 = (part["x_0"].double() - SHIFT) * SCALE
        times = t.double()[:, None, None, None]
        noise = (x_t.double() - (1 - times) * x_0) / times
        squares[call % NUM_TIMES] += (0.7 * x_t.double() - (noise - x_0)).square().mean((1, 2, 3)).tolist()
        assert bool(condition.keep.all())

    for index, values in squares.items():
        assert len(values) == 8
        assert found[f"held_out/loss_t{(index + 0.5) / 8:.3f}"] == pytest.approx(np.mean(values), rel=1e-4)

    assert found["held_out/loss"] == pytest.approx(np.mean(list(squares.values())), rel=1e-4)
    assert len(found) == 1 + NUM_TIMES


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_averages_leave_out_what_is_not_finite(value):
    averages = Averages()
    for one in (1.0, value, 6.0):
        averages.add(torch.tensor(one), "a")

    averages.add(torch.tensor([2.0, value, 0.0]), "b0", "b1", "b2", count=torch.tensor([4, 5, 0]))
    averages.add(torch.tensor(value), "c")
    averages.add(torch.tensor(10.0), "d", count=4)

    assert averages.drain() == {"a": 3.5, "b0": 0.5, "d": 2.5}
    assert averages.drain() == {}, "averages start anew"


@pytest.mark.parametrize("path", ["linear", "cosine", "vp"])
def test_a_batch_lies_on_the_members_path_in_training_and_validation(path):
    objective = expert(path=path)
    x_0 = (batch()["x_0"].double() - 127.5) / 127.5
    noised = noisy(objective)
    for one in (noised, held_out(objective, batch(), 0, 5)):
        torch.testing.assert_close(one.x_0.double(), x_0, rtol=1e-6, atol=1e-6)
        alpha, sigma = (scale[:, None, None, None] for scale in PATHS[path].scales(one.t)[:2])
        torch.testing.assert_close(one.x_t, alpha * one.x_0 + sigma * one.noise)

    straight = noisy(expert())

    assert torch.equal(straight.t, noised.t) and torch.equal(straight.noise, noised.noise)


def test_the_loss_can_be_that_of_the_velocity():
    objective = expert(Recorder("x_0"), loss="velocity")
    noised = noisy(objective)
    losses = objective.compute_losses(noised, batch())
    torch.testing.assert_close(objective.weighted(losses, noised.t), losses["loss"] / noised.t.clamp(min=0.05) ** 2)


def test_the_target_and_the_weights_are_the_paths():
    objective = expert(Recorder(answer=lambda x_t, _: torch.zeros_like(x_t)), path="cosine", loss="velocity")
    noised = noisy(objective)

    losses = objective.compute_losses(noised, batch())

    angle = torch.pi / 2 * noised.t[:, None, None, None]
    target = torch.pi / 2 * (angle.cos() * noised.noise - angle.sin() * noised.x_0)
    expected = target.square().flatten(1).mean(1)
    torch.testing.assert_close(losses["loss"], expected)
    scale = (angle.cos() + angle.sin()).flatten() / (torch.pi / 2)
    torch.testing.assert_close(objective.weighted(losses, noised.t), expected * scale**2)


def test_a_student_on_another_path_asks_its_teacher_on_the_linear_one():
    objective = build(Distillation, Recorder(), name="student", role=ROLES["student"], path="vp")
    asked = []

    def answer(x_t, t):
        asked.append((x_t, t))
        return 2 / 0.7 * x_t

    objective.teacher = Ensemble([Recorder(answer=answer)] * 3, None, [1 / 3] * 3)
    noised = noisy(objective, batch(4))
    x_0, noise = objective.ends(noised, {"cluster": torch.zeros(4, dtype=torch.int64)})
    ((x_t, t),) = asked
    expected_x_t, expected_t = PATHS["vp"].to_linear(noised.x_t, noised.t)

    assert torch.equal(t, expected_t) and torch.equal(x_t, expected_x_t)

    torch.testing.assert_close(noise - x_0, 2 * x_t)
    time = t[:, None, None, None]
    torch.testing.assert_close((1 - time) * x_0 + time * noise, x_t)
