import json
from types import SimpleNamespace

import pytest
import sweep
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment, to_yaml
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run_folder import RunFolder


def options(tmp_path, *overrides, **changes):
    settings = {
        "config": str(TINY),
        "overrides": [f"run_dir={tmp_path / 'run'}", *overrides],
        "member": "expert-0",
        "samples": None,
        "seeds": 1,
        "jobs": 2,
        "rates": [0.5, 1.0],
        "batches": [0.5, 2.0],
        "quick": False,
        "prompts": None,
        "json": None,
    }
    return SimpleNamespace(**{**settings, **changes})


def setting(settings, key):
    (value,) = [text.partition("=")[2] for text in settings if text.startswith(f"{key}=")]
    return json.loads(value)


@pytest.mark.parametrize(("member", "section", "share"), [("expert-0", "expert", 2), ("router", "router", 1)])
def test_every_training_sees_as_many_samples(tmp_path, member, section, share):
    """The average lasts for as many samples, too: two steps of a half batch forget what one of a whole does."""
    made = sweep.Sweep(options(tmp_path, "expert.train.warmup_steps=10", "router.train.warmup_steps=10", member=member))
    own = getattr(made.experiment, section).train
    assert made.num_samples == own.max_steps * own.global_batch_size // share
    for point in made.points():
        settings = made.settings(point)
        train = f"{section}.train"
        steps, total = setting(settings, f"{train}.max_steps"), setting(settings, f"{train}.global_batch_size")
        assert steps * total // share == made.num_samples
        assert total == point.batch * share
        decay = setting(settings, f"{train}.ema_decay")
        assert decay**steps == pytest.approx(own.ema_decay**own.max_steps)
        assert setting(settings, f"{train}.warmup_steps") == 10 * steps // own.max_steps
    assert {point.rate / own.learning_rate for point in made.points()} == {0.5, 1.0}


def test_kept_trainings_of_another_experiment_are_refused(tmp_path):
    made = sweep.Sweep(options(tmp_path))
    point = next(made.points())
    run = RunFolder(made.folder / point.name)
    (run.root / "members").mkdir(parents=True)
    run.experiment.write_text(to_yaml(load_experiment(TINY, [*made.settings(point), "expert.network.params.depth=9"])))
    with pytest.raises(UserError, match=r"changed since .*: expert.network.params.depth"):
        made.losses()


def test_batches_that_are_no_number_of_samples(tmp_path):
    with pytest.raises(UserError, match="times 8 samples is not a whole number"):
        sweep.Sweep(options(tmp_path, batches=[0.3]))
    for name in ("seeds", "jobs", "samples", "prompts"):
        with pytest.raises(UserError, match=f"--{name} 0: must be at least 1"):
            sweep.Sweep(options(tmp_path, **{name: 0}))
    for name in ("rates", "batches"):
        for factor in (float("nan"), float("inf"), 0.0, -1.0):
            with pytest.raises(UserError, match="--rates and --batches: give multiples"):
                sweep.Sweep(options(tmp_path, **{name: [1.0, factor]}))
    with pytest.raises(UserError, match="name one member"):
        sweep.Sweep(options(tmp_path, member="all"))


def test_the_lowest_mean_is_best():
    points = {
        sweep.Point(rate, 8, seed): loss
        for rate, seed, loss in ((1.0, 0, 0.5), (1.0, 1, 0.1), (2.0, 0, 0.2), (2.0, 1, 0.2))
    }
    assert sweep.mean_over_seeds(points) == pytest.approx({(1.0, 8): 0.3, (2.0, 8): 0.2})
    assert len(sweep.plot(points, {}, "title").get_axes()) == 1
    assert len(sweep.plot(points, points, "title").get_axes()) == 2


@pytest.mark.slow
@pytest.mark.long
def test_quick_trains_each_pair_once(tmp_path, capsys):
    arguments = ["-c", str(TINY), f"run_dir={tmp_path / 'run'}", "--quick", "--json", str(tmp_path / "sweep.json")]
    arguments += ["--rates", "1", "2", "--batches", "0.5", "1"]
    sweep.main(arguments)
    figures = json.loads((tmp_path / "sweep.json").read_text())["figures"]
    losses = {name: loss for name, loss in figures.items() if name.startswith("loss_")}
    assert len(losses) == 4 and all(loss > 0 for loss in losses.values())
    assert len(set(losses.values())) == 4
    shares = [share for name, share in figures.items() if name.startswith("followed_rate_")]
    assert 0 < figures["followed_by_chance"] < 1
    assert len(shares) == 4 and all(0 <= share <= 1 for share in shares)
    best = f"loss_rate_{figures['best_rate']:g}_batch_{figures['best_batch']}"
    assert losses[best] == min(losses.values())
    assert list((tmp_path / "run").glob("benchmarks/sweep/*/sweep.png"))
    sweep.main(arguments)  # finds all of them trained
    assert json.loads((tmp_path / "sweep.json").read_text())["figures"] == figures
