"""The student: its target is the ensemble's velocity."""

import pytest
import torch
from tiny_runs import TINY, copy_run, settings
from training.members import Recorder, batch, build, expert, figures, losses_of

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.manifest import read_ensemble, write_ensemble
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.members.artifact import read_artifact
from ddm_lightning.members.roles import ROLES
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.training.objective import NUM_VALIDATION_TIMESTEPS, Distillation

SLOPES = torch.tensor([-1.0, 0.5, 2.0])


class Router(torch.nn.Module):
    """Fixed probabilities, whatever it sees."""

    probabilities = torch.tensor([0.2, 0.3, 0.5])

    def forward(self, x_t, _t, _condition):
        return self.probabilities.log().expand(len(x_t), -1)


def student(network, strategy=None):
    """A student of three experts whose velocities are multiples of x_t."""
    objective = build(Distillation, network, name="student", role=ROLES["student"], condition_dropout=0.0)
    experts = [Recorder(answer=lambda x_t, _, slope=slope: slope / 0.7 * x_t) for slope in SLOPES]
    objective.teacher = Ensemble(experts, Router(), [1 / 3] * 3)
    objective.strategy = None if strategy is None else STRATEGIES.build(strategy, {})
    return objective


@pytest.mark.parametrize("prediction", ["velocity", "epsilon", "x_0"])
@pytest.mark.parametrize("strategy", [None, "full", "top-1"])
def test_the_target_is_the_teachers_velocity(prediction, strategy):
    network = Recorder(prediction)
    part = batch(32)
    _, loss = losses_of(student(network, strategy), part)
    ((x_t, t, _),) = network.calls
    slope = {None: SLOPES[part["cluster"]], "full": (SLOPES * Router.probabilities).sum(), "top-1": SLOPES[2]}[strategy]
    velocity = slope.reshape(-1, 1, 1, 1) * x_t
    time = t[:, None, None, None]
    target = {"velocity": velocity, "epsilon": x_t + (1 - time) * velocity, "x_0": x_t - time * velocity}[prediction]

    assert loss.item() == pytest.approx((0.7 * x_t - target).square().mean().item(), rel=1e-4)


def test_the_held_out_loss_is_an_experts():
    losses = [figures(objective, batch(16)) for objective in (student(Recorder()), expert(Recorder()))]

    assert len(losses[0]) == 1 + NUM_VALIDATION_TIMESTEPS
    assert losses[0] == losses[1]


def test_its_teacher_computes_in_the_precision_of_samples(finished_run):
    objective = student(Recorder())
    experiment = load_experiment(TINY, ["sample.precision=bf16-mixed"])
    objective.teach(Run(experiment, RunFolder(finished_run)))

    assert objective.teacher.precision == "bf16-mixed"


def test_a_teacher_without_its_router_is_refused(finished_run, tmp_path):
    run = copy_run(finished_run, tmp_path / "run")
    manifest = read_ensemble(run / "ensemble.json")
    write_ensemble(run, [manifest.folders[name] for name in manifest.experts], manifest.priors)
    with pytest.raises(UserError, match=r"^key 'distill\.teacher' = 'full': needs the router.*; set owner"):
        student(Recorder()).teach(Run(load_experiment(TINY, ["distill.teacher=full"]), RunFolder(run)))


@pytest.mark.slow
def test_an_island_without_the_ensemble_trains_it_by_the_command_line(finished_run, tmp_path, capsys):
    run = tmp_path / "run"
    store = copy_run(finished_run, tmp_path / "store")
    (store / "ensemble.json").unlink()  # assembled where it is needed
    own = [*settings(run), "distill.max_steps=3", "distill.global_batch_size=4", "member=student"]

    assert main(["fit", *own, f"remote={store}"]) == 0

    meta, _ = read_artifact(run / "members" / "student" / "artifact")
    assert (meta.role, meta.step, meta.num_samples) == ("student", 3, 12)

    capsys.readouterr()
    assert main(["fit", *own, "distill.max_steps=4", "distill.teacher=full"]) == 2
    assert "was trained with distill.teacher = 'owner', not 'full'; set it back" in capsys.readouterr().err

    (run / "ensemble.json").unlink()
    assert main(["fit", *own, "distill.max_steps=4"]) == 2
    assert "ensemble.json: the ensemble's manifest is missing; fit the missing members" in capsys.readouterr().err
