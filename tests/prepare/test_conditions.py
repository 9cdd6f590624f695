"""A condition that the data do not have is refused, whatever the source; samples without one may be among others."""

import numpy as np
import pytest
from prepare.listed import Listed, experiment_of, plug_in, records
from source_files import encoded, noise, tar_of, write, write_arrow, write_mds, write_parquet
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import ConditionConfig, PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.dry_run import dry_run
from ddm_lightning.prepare.stages import prepare

pytestmark = pytest.mark.usefixtures("quick_prepare")
IMAGES = [encoded(noise(8, 8, 3, seed=seed)) for seed in range(40)]


def folder(at, caption):
    write(str(at), {f"{number:02}.png": image for number, image in enumerate(IMAGES)})
    write(str(at), {"39.txt": caption})
    return "imagefolder", {"path": str(at), "labels": False}


def tars(at, caption, column="txt"):
    files = [(f"{number:02}.png", image) for number, image in enumerate(IMAGES)]
    write(str(at), {"a.tar": tar_of([("00.txt", ""), *files, ("39.txt", caption)])})
    return "webdataset", {"path": str(at), "caption_column": column}


def rows(caption, other=""):
    captions = [*[other] * 39, caption]
    return [{"image": image, "caption": text, "label": 0} for image, text in zip(IMAGES, captions, strict=True)]


def parquet(at, caption, column="caption"):
    write_parquet(at, "a.parquet", rows(caption, None))
    return "parquet", {"path": str(at), "caption_column": column}


def arrow(at, caption):
    write_arrow(at, rows([caption], [""]))
    return "huggingface", {"path": str(at)}


def mds(at, caption):
    write_mds(at, {"image": "bytes", "caption": "str", "label": "int"}, rows(caption))
    return "mds", {"path": str(at)}


def mixed(at, caption):
    (name, params), digits = folder(at, caption), {"name": "made-up"}
    return "mixture", {"sources": [digits, {"name": name, "params": params}]}


@pytest.mark.parametrize("kind", ["text", "tokens"])
@pytest.mark.parametrize("made", [folder, tars, parquet, arrow, mds, mixed])
def test_captions_that_are_all_empty_are_refused_and_one_is_enough(tmp_path, monkeypatch, made, kind):
    plug_in(monkeypatch, SOURCES, Listed({"plain": records(20, caption="")}))
    for caption in ("", "a cat"):
        experiment = experiment_of(PluginConfig(*made(tmp_path / f"data {caption}", caption)))
        experiment.condition.kind, run = kind, tmp_path / "run"
        if not caption:
            for act in (prepare, dry_run):
                with pytest.raises(UserError, match=f"'{kind}': none of .. samples has a caption; tell the"):
                    act(experiment, run)
            assert not run.exists()
            continue
        plan = dry_run(experiment, run)
        num = 60 if made is mixed else 40
        assert f"of {num} samples from all over the source: with a caption 1, different labels" in plan.seen
        if kind == "text":
            assert prepare(experiment, run).num_without_caption == num - 1


@pytest.mark.parametrize("made", [tars, parquet])
def test_a_source_told_to_read_no_captions_has_none(tmp_path, made):
    experiment = experiment_of(PluginConfig(*made(tmp_path / "data", "a cat", None)))
    with pytest.raises(UserError, match="none of 40 samples has a caption"):
        prepare(experiment, tmp_path / "run")
    experiment.condition = ConditionConfig(kind="none")
    assert prepare(experiment, tmp_path / "run").num_without_caption == 40


def test_classes_of_which_only_one_has_samples_are_refused(tmp_path):
    name, params = parquet(tmp_path / "data", "a cat")
    experiment = experiment_of(PluginConfig(name, {**params, "label_column": "label", "num_classes": 10}))
    experiment.condition = ConditionConfig(kind="class")
    with pytest.raises(UserError, match="'class': all of 40 samples have one label; tell the source"):
        prepare(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_sorted_by_class_may_begin_with_a_thousand_of_one(tmp_path, monkeypatch):
    source = Listed({"all": records(1001) + records(3, "b", label=1)}, sized=True)
    experiment = experiment_of(plug_in(monkeypatch, SOURCES, source))
    experiment.condition = ConditionConfig(kind="class")
    assert np.sum(prepare(experiment, tmp_path / "run").class_counts, axis=0).tolist() == [1001, 3, 0, 0]


def test_shards_without_what_another_condition_or_batch_needs_are_refused_later(tmp_path, capsys):
    name, params = parquet(tmp_path / "data", "")
    source = f"{{name: {name}, params: {{path: {params['path']}, caption_column: null}}}}"
    given = ["prepare", "-c", str(TINY), f"run_dir={tmp_path / 'run'}", f"prepare.source={source}"]
    given.append("prepare.partition.max_largest_over_mean=1.5")
    large = ["condition.kind=none", "sample.prompts=[]", "expert.train.global_batch_size=64"]
    assert main([*given, *large]) == 2
    error = capsys.readouterr().err
    assert "key 'expert.train.global_batch_size': a step of expert-" in error
    assert "takes 32 samples, and there are" in error and "prepare.partition.num_clusters" in error
    # The shards are whole.
    assert main(given) == 2
    assert "'condition.kind' = 'text': none of 40 samples has a caption" in capsys.readouterr().err


@pytest.mark.parametrize("names", [("train", "Val"), ("train",), ("training", "test", "validation")])
def test_splits_are_no_classes(tmp_path, names):
    write(str(tmp_path / "in"), {f"{name}/cat/{number}.png": IMAGES[number] for name in names for number in range(18)})
    source = PluginConfig("imagefolder", {"path": str(tmp_path / "in")})
    experiment = experiment_of(source, caption_encoder=None, max_bad_fraction=0)
    experiment.condition = ConditionConfig(kind="class")
    with pytest.raises(UserError, match=f"has no classes, only .*{names[0]}.*; use text or none, or give the folder"):
        dry_run(experiment, tmp_path / "run")
    experiment.condition = ConditionConfig(kind="none")
    assert dry_run(experiment, tmp_path / "run").looked.num_read == 18 * len(names)
    if len(names) > 1:
        write(str(tmp_path / "in"), {"vans/1.png": IMAGES[0]})
        experiment.condition = ConditionConfig(kind="class")
        assert dry_run(experiment, tmp_path / "run").num_labels == len(names) + 1
