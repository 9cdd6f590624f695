import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.distance import cdist
from sklearn.metrics import silhouette_samples

from ddm_lightning.partition.columns import Rows
from ddm_lightning.prepare.report import measures
from ddm_lightning.prepare.report.measures import (
    ReportData,
    choose_rows,
    compute_silhouettes,
    fit_plane,
    measure,
    to_metric_space,
)
from ddm_lightning.prepare.report.page import (
    PAGE,
    choose_images,
    cluster_grid,
    place_images,
    write_report,
)

METRICS = {"spherical": "cosine", "euclidean": "euclidean"}
VOID = {"meta", "img", "source", "br", "link", "input"}


def data_of(sizes=(40, 25, 1), size=6, metric="spherical", captions="a caption", thumbnails=None, **changes):
    """Make clusters around random points; two feature arrays, like two parts."""
    generator = np.random.default_rng(3)
    clusters = generator.permutation(np.repeat(np.arange(len(sizes)), sizes)).astype(np.int32)
    centroids = generator.normal(size=(len(sizes), size)).astype(np.float32)
    features = (centroids[clusters] + 0.7 * generator.normal(size=(len(clusters), size))).astype(np.float32)
    rows = np.arange(len(clusters)) if thumbnails is None else np.asarray(thumbnails, dtype=np.int64)
    images = generator.integers(0, 256, (len(clusters), 8, 8, 3), dtype=np.uint8)
    texts = [f"{captions} {row}" for row in rows] if captions else []
    data = ReportData(
        thumbnails=images[rows],
        thumbnail_rows=rows,
        captions=texts,
        features=Rows([features[:20], features[20:]]),
        clusters=clusters,
        metric=metric,
        counts=np.bincount(clusters, minlength=len(sizes)),
        num_read=len(clusters),
    )
    return replace(data, **changes)


def write(folder, data, seed=0, title="a title", attribution="drawn by somebody"):
    write_report(folder, data, title=title, attribution=attribution, seed=seed)
    return {path.name for path in folder.glob("*.*")}


class Page(HTMLParser):
    """Keep tags, attributes and text; fail if the page is not well nested."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def values(self, *names):
        return [value for _, name, value in self.attributes if name in names]


@pytest.mark.parametrize("metric", METRICS)
def test_silhouettes_are_those_of_scikit_learn(metric):
    generator = np.random.default_rng(0)
    features = generator.normal(size=(90, 5))
    features[3] = 0
    features[7] = features[8]
    clusters = generator.integers(0, 4, 90)
    clusters[clusters == 2] = 5  # cluster 2 is empty, and one cluster holds a single sample
    clusters[50] = 2
    ours = compute_silhouettes(to_metric_space(features, metric), torch.from_numpy(clusters), metric)
    np.testing.assert_allclose(ours, silhouette_samples(features, clusters, metric=METRICS[metric]), atol=1e-9)
    assert ours[50] == 0


@pytest.mark.parametrize("metric", METRICS)
def test_samples_in_one_place_have_no_silhouette_and_neither_does_a_single_cluster(metric):
    same = to_metric_space(np.full((30, 7), 0.1), metric)
    assert (compute_silhouettes(same, torch.arange(30) % 3, metric) == 0).all()
    assert compute_silhouettes(same, torch.ones(30, dtype=torch.int64), metric).isnan().all()


@pytest.mark.parametrize("metric", METRICS)
def test_neighbours_are_the_nearest_other_centroids(metric):
    data = data_of((30, 20, 12, 1), metric=metric)
    measured = measure(data, seed=0)
    features = to_metric_space(data.features[:], metric).numpy()
    centroids = np.stack([features[data.clusters == k].mean(0) for k in range(4)])
    expected = np.zeros((4, 4))
    for row, feature in enumerate(features):
        apart = cdist([feature], centroids, METRICS[metric])[0]
        own = data.clusters[row]
        others = [k for k in range(4) if k != own]
        expected[own, min(others, key=lambda k: apart[k])] += 1 / data.counts[own]
    np.testing.assert_allclose(measured.second_choices, expected, atol=1e-12)
    between = cdist(centroids, centroids, METRICS[metric])
    np.testing.assert_allclose(measured.centroid_distances, between, atol=1e-6)
    for k in range(4):
        expected_mean = measured.silhouettes[data.clusters == k].mean()
        assert measured.cluster_silhouettes[k] == pytest.approx(expected_mean)


def test_the_map_is_the_plane_of_the_two_largest_singular_values():
    x = np.random.default_rng(1).normal(size=(50, 6)) * [5, 1, 3, 1, 1, 1] + 4
    plane = fit_plane(torch.from_numpy(x))
    _, singular, axes = np.linalg.svd(x - x.mean(0), full_matrices=False)
    signs = np.sign([axis[np.abs(axis).argmax()] for axis in axes[:2]])
    np.testing.assert_allclose(plane.project(torch.from_numpy(x)), (x - x.mean(0)) @ axes[:2].T * signs, atol=1e-9)
    np.testing.assert_allclose(plane.explained, np.square(singular)[:2] / np.square(singular).sum())


def test_rows_are_chosen_evenly_and_once():
    rows = choose_rows(1000, 400, seed=1)
    assert len(set(rows)) == 400 and (np.diff(rows) > 0).all()
    assert 420 < rows.mean() < 580
    np.testing.assert_array_equal(rows, choose_rows(1000, 400, seed=1))
    assert list(choose_rows(5, 400, seed=1)) == [0, 1, 2, 3, 4]


def test_a_large_data_set_is_measured_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "MAX_ROWS", 30)
    data = data_of((300, 200))
    measured = measure(data, seed=0)
    assert len(measured.rows) == len(measured.silhouettes) == 30
    write(tmp_path / "report", data)
    assert "30 samples, chosen at random" in Page(tmp_path / "report" / PAGE).text


def test_the_page_stands_alone_and_is_well_formed(tmp_path):
    data = data_of(
        broken={"truncated image": 3, "empty file": 11},
        num_read=80,
        displaced=(0.02, 0.005),
        num_without_caption=11,
        num_out_of_cluster=7,
        facts={"source": "some images", "features": "some network"},
    )
    write(tmp_path / "report", data)
    page = Page(tmp_path / "report" / PAGE)
    assert {"script", "link", "iframe", "object"}.isdisjoint(page.tags)
    images = page.values("src", "srcset")
    assert len(images) == 2 + 1 + 36 + 25 + 1
    assert all(re.fullmatch(r"data:image/(png|webp);base64,[\w+/=]+", image) for image in images)
    ids = page.values("id")
    assert len(set(ids)) == len(ids) == 3
    assert {f"#{name}" for name in ids} == set(page.values("href"))
    assert "url(" not in page.html and "http://" not in page.html and "@import" not in page.html
    for words in (
        "66 samples in 3 clusters. The largest has 1.818 times the mean size.",
        "source some images",
        "skipped 14 (17.50%)",
        "largest over mean 1.818",
        "without a caption 11 (16.67%)",
        "out-of-cluster copies 7 samples",
        "measured on 66 samples, all of them",
        "displaced 2.0% of the samples are nearer to another cluster's mean: 0.5% because clusters are balanced, 1.5% "
        "because each fine cell is assigned as a whole",
        "empty file 11 13.75% truncated image 3 3.75%",
        "drawn by somebody",
    ):
        assert words in page.text, words


def test_html_in_captions_and_names_is_escaped(tmp_path):
    evil = """</bdi><script>alert("1")</script><img src=x onerror='alert(2)'>" onload="alert(3)"""
    data = data_of(captions=evil, facts={evil: evil}, broken={evil: 1})
    write(tmp_path / "report", data, title=evil, attribution=evil)
    page = Page(tmp_path / "report" / PAGE)
    assert "script" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("alert(2)") >= 8 + 6
    assert any(evil in value for value in page.values("alt"))


def test_long_and_strange_captions_become_short_lines(tmp_path):
    write(tmp_path / "report", data_of((40, 30), captions="\n\x00 \ud800 " + "word " * 20_000))
    page = Page(tmp_path / "report" / PAGE)
    assert {len(title) for title in page.values("title")} == {120}
    assert all(title.endswith("…") for title in page.values("title"))
    assert "? word word" in page.text


def test_the_same_input_gives_the_same_bytes(tmp_path):
    names, other = (write(tmp_path / name, data_of(), seed) for name, seed in (("a", 1), ("c", 2)))
    assert names == other == write(tmp_path / "b", data_of(), 1)
    assert names == {"sizes.png", "silhouette.png", "map.png", PAGE}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a" / PAGE).read_bytes() != (tmp_path / "c" / PAGE).read_bytes(), "the seed chooses the images"
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    for path in (tmp_path / "a").glob("*.png"):
        Image.open(path).verify()


def test_a_report_replaces_the_one_before(tmp_path):
    write(tmp_path / "report", data_of((20, 20), metric="euclidean"))
    write(tmp_path / "report", data_of((40,), metric="euclidean"))
    assert not (tmp_path / "report" / "silhouette.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_one_cluster_has_neither_neighbours_nor_silhouettes(tmp_path):
    names = write(tmp_path / "report", data_of((30,)))
    assert names == {"sizes.png", "map.png", PAGE}
    text = Page(tmp_path / "report" / PAGE).text
    assert "30 samples in 1 cluster. Key figures" in text
    assert "nan" not in text and "Nearest centroids" not in text


def test_missing_thumbnails_and_captions_are_named(tmp_path):
    data = data_of((30, 20), captions="")
    some = np.flatnonzero(data.clusters == 0)[:5]
    written = write(tmp_path / "some", data_of((30, 20), captions="", thumbnails=some))
    page = Page(tmp_path / "some" / PAGE)
    assert "map.png" in written
    assert page.text.count("No thumbnails of this cluster were kept") == 1
    assert page.values("title") == [] and "li" not in page.tags
    assert "None: every sample of the source was read." in page.text

    written = write(tmp_path / "none", data_of((30, 20), thumbnails=[]), attribution="")
    page = Page(tmp_path / "none" / PAGE)
    assert written == {"sizes.png", "silhouette.png", PAGE}
    assert page.text.count("No thumbnails of this cluster were kept") == 2
    assert "footer" not in page.tags


def test_an_empty_cluster_has_no_silhouette(tmp_path):
    write(tmp_path / "report", data_of((30, 0, 20)))
    text = Page(tmp_path / "report" / PAGE).text
    assert "0 samples · 0.0% of all · 0.000 times the mean · silhouette –" in text
    assert "nan" not in text


def test_many_clusters_are_shown_with_fewer_images_each():
    assert {len(shown) for shown in choose_images(np.arange(2000) % 100, 100, seed=0)} == {11}
    clusters = np.repeat([0, 1], [40, 30])
    shown = choose_images(clusters, 2, seed=0)
    assert [len(indices) for indices in shown] == [36, 30]
    for cluster, indices in enumerate(shown):
        assert len(set(indices)) == len(indices)
        assert (clusters[indices] == cluster).all()


def test_the_map_of_images_shows_the_one_nearest_to_the_centre_of_a_cell():
    colours = np.array([(200, 0, 0), (0, 200, 0), (0, 0, 200), (90, 90, 90)], dtype=np.uint8)
    images = np.ascontiguousarray(np.broadcast_to(colours[:, None, None], (4, 5, 5, 3)))
    # 20 by 14 cells of 48 pixels: the first two images share a cell, and the second is nearer to its centre.
    positions = np.array([[0, 0], [0.5, 0.5], [20, 14], [0, 14]])
    pixels = np.asarray(place_images(images, positions, ["#010203"] * 4))
    assert pixels.shape == (14 * 48, 20 * 48, 3)
    assert (pixels[13 * 48 + 24, 24] == [0, 200, 0]).all()
    assert (pixels[24, 19 * 48 + 24] == [0, 0, 200]).all()
    assert (pixels[24, 24] == [90, 90, 90]).all()
    assert (pixels[2, 24] == [1, 2, 3]).all()
    assert (pixels < 255).any(-1).sum() == 3 * 46 * 46, "the other cells are white"


def test_the_grid_of_all_clusters_counts_all_samples():
    def grid(counts):
        return np.asarray(cluster_grid(data_of((20, 10), counts=np.array(counts)), "t", "a", seed=0))

    assert np.array_equal(grid([20, 10]), grid([20, 10])) and not np.array_equal(grid([20, 10]), grid([2000, 1000]))
