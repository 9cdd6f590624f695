import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.metrics import silhouette_samples

from ddm_lightning.partition.columns import Rows
from ddm_lightning.prepare import report
from ddm_lightning.prepare.prepared import Thumbnails
from ddm_lightning.prepare.report import (
    ReportData,
    choose_images,
    cluster_grid,
    compute_silhouettes,
    measure,
    to_metric_space,
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
    texts = [f"{captions} {row}" if captions else "" for row in rows]
    index = {"num_read": len(clusters), "broken": {}, "filtered": {}, "num_without_caption": 0}
    data = ReportData(
        title="a title",
        attribution="drawn by somebody",
        seed=0,
        thumbnails=Thumbnails(images[rows], clusters[rows], texts),
        features=Rows([features[:20], features[20:]]),
        clusters=clusters,
        metric=metric,
        counts=np.bincount(clusters, minlength=len(sizes)),
        index={name: changes.pop(name, value) for name, value in index.items()},
    )
    return replace(data, **changes)


def write(path, data):
    write_report(path, data)
    return Page(path)


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
    measured = measure(data)
    features = to_metric_space(data.features[:], metric).numpy()
    members = [data.clusters == k for k in range(4)]
    centroids = np.stack([features[chosen].mean(0) for chosen in members])
    between = cdist(centroids, centroids, METRICS[metric])
    np.testing.assert_allclose(measured.centroid_distances, between, atol=1e-6)
    silhouettes = silhouette_samples(features, data.clusters, metric=METRICS[metric])
    np.testing.assert_allclose(measured.cluster_silhouettes, [silhouettes[chosen].mean() for chosen in members])
    assert measured.silhouette == pytest.approx(silhouettes.mean())


def test_a_large_data_set_is_measured_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_ROWS", 30)
    data = data_of((300, 200))

    first, same, other = (measure(replace(data, seed=seed)) for seed in (0, 0, 1))

    assert first.num_rows == 30
    assert first.silhouette == same.silhouette != other.silhouette
    assert "30 samples, chosen at random" in write(tmp_path / "report.html", data).text


def test_the_page_stands_alone_and_is_well_formed(tmp_path):
    data = data_of(
        broken={"truncated image": 3, "empty file": 11},
        num_read=180,
        filtered={"not min_side >= 256": 30, "no aesthetic": 70},
        displaced=(0.02, 0.005),
        num_without_caption=11,
        facts={"source": "some images", "features": "some network"},
    )
    page = write(tmp_path / "report.html", data)
    assert {"script", "link", "iframe", "object"}.isdisjoint(page.tags)
    images = page.values("src", "srcset")
    assert len(images) == 36 + 25 + 1
    assert all(re.fullmatch(r"data:image/webp;base64,[\w+/=]+", image) for image in images)
    ids = page.values("id")
    assert len(set(ids)) == len(ids) == 3
    assert {f"#{name}" for name in ids} == set(page.values("href"))
    assert "url(" not in page.html and "http://" not in page.html and "@import" not in page.html
    for words in (
        "66 samples in 3 clusters. The largest has 1.818 times the mean size.",
        "source some images",
        "skipped 14 (7.78%)",
        "largest over mean 1.818",
        "without a caption 11 (16.67%)",
        "measured on 66 samples, all of them",
        "displaced 2.0% of the samples are nearer to another cluster's mean: 0.5% because clusters are balanced, 1.5% "
        "because each fine cell is assigned as a whole",
        "empty file 11 6.11% truncated image 3 1.67%",
        "no aesthetic 70 38.89% not min_side >= 256 30 16.67% skipped 14 7.78% prepared 66 36.67% read 180 100.00%",
        "drawn by somebody",
    ):
        assert words in page.text, words


def test_shapes_of_images_are_listed_if_there_are_several(tmp_path):
    rows = {"4x16": (26, 0.125, [20, 5, 1]), "16x4": (40, 0.0, [20, 20, 0]), "all": (66, 0.05, [40, 25, 1])}
    page = write(tmp_path / "report.html", data_of(buckets=rows))
    heading = "height x width samples share cropped away cluster 0 cluster 1 cluster 2"
    lines = "4x16 26 39.4% 12.5% 20 5 1 16x4 40 60.6% 0.0% 20 20 0 all 66 100.0% 5.0% 40 25 1"
    assert f"Shapes of images {heading} {lines}" in page.text
    assert "Shapes" not in write(tmp_path / "squares.html", data_of()).text


def test_html_in_captions_and_names_is_escaped(tmp_path):
    evil = """</bdi><script>alert("1")</script><img src=x onerror='alert(2)'>" onload="alert(3)"""
    data = data_of(captions=evil, facts={evil: evil}, broken={evil: 1})
    page = write(tmp_path / "report.html", replace(data, title=evil, attribution=evil))

    assert "script" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("alert(2)") >= 8 + 6
    assert any(evil in value for value in page.values("alt"))


def test_long_and_strange_captions_become_short_lines(tmp_path):
    page = write(tmp_path / "report.html", data_of((40, 30), captions="\n\x00 " + "word " * 20_000))
    assert {len(title) for title in page.values("title")} == {120}
    assert all(title.endswith("…") for title in page.values("title"))


def test_the_seed_chooses_the_images_and_nothing_else_differs(tmp_path):
    first, same, other = (write(tmp_path / "report.html", data_of(seed=seed)).html for seed in (1, 1, 2))

    assert first == same != other


@pytest.mark.parametrize(
    ("sizes", "words", "absent"),
    [
        ((30,), "30 samples in 1 cluster. Key figures", "Nearest centroids"),
        ((30, 0, 20), "0 samples · 0.0% of all · 0.000 times the mean · silhouette –", "30 samples · 100"),
    ],
)
def test_what_a_lone_or_an_empty_cluster_lacks_is_no_number(tmp_path, sizes, words, absent):
    text = write(tmp_path / "report.html", data_of(sizes)).text

    assert words in text
    assert "nan" not in text and absent not in text


def test_missing_thumbnails_and_captions_are_named(tmp_path):
    data = data_of((30, 20), captions="")
    some = np.flatnonzero(data.clusters == 0)[:5]

    page = write(tmp_path / "some.html", data_of((30, 20), captions="", thumbnails=some))
    empty = write(tmp_path / "none.html", data_of((30, 20), thumbnails=[], attribution=""))

    assert page.text.count("No thumbnails of this cluster were kept") == 1
    assert page.values("title") == [] and "li" not in page.tags
    assert "None: every sample of the source was read." in page.text
    assert empty.text.count("No thumbnails of this cluster were kept") == 2
    assert "footer" not in empty.tags


def test_each_image_is_chosen_once_in_its_own_cluster():
    clusters = np.repeat([0, 1], [40, 30])
    shown = choose_images(clusters, 2, 0, max_images=36)
    assert [len(indices) for indices in shown] == [36, 30]
    for cluster, indices in enumerate(shown):
        assert len(set(indices)) == len(indices)
        assert (clusters[indices] == cluster).all()


def test_many_clusters_are_shown_with_fewer_images_each(tmp_path):
    page = write(tmp_path / "report.html", data_of([20] * 100))
    assert page.tags.count("img") == 100 * 11


def test_the_grid_of_all_clusters_counts_all_samples():
    grids = [cluster_grid(data_of((20, 10), counts=np.array(counts))).tobytes() for counts in ([20, 10], [2000, 1000])]

    assert grids[0] != grids[1]
