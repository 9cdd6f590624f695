"""ensemble.json: members that belong together are found again; others are refused by name."""

import json
import shutil

import pytest
from artifact_files import edit, put, refused

from ddm_lightning.core.files import sha256_file
from ddm_lightning.ensemble.manifest import read_ensemble, write_ensemble
from ddm_lightning.members.meta import read_meta


@pytest.fixture
def run_dir(tmp_path):
    """A run of two experts and a router, with its ensemble.json."""
    folders = [
        put(tmp_path / "run" / "members" / name / "artifact", name) for name in ("router", "expert-1", "expert-0")
    ]
    write_ensemble(tmp_path / "run", folders, [0.25, 0.75])
    return tmp_path / "run"


def test_ensemble_round_trip_in_order_and_movable(run_dir):
    document = json.loads((run_dir / "ensemble.json").read_text())
    assert document["num_clusters"] == 2 and document["format_version"] == 1
    assert document["members"][0]["path"] == "members/expert-0/artifact"
    moved = run_dir.rename(run_dir.with_name("moved"))
    manifest = read_ensemble(moved / "ensemble.json")
    assert list(manifest.folders) == list(manifest.metas) == ["expert-0", "expert-1", "router"]
    assert manifest.priors == (0.25, 0.75) and manifest.partition_sha256 == "ab" * 32
    assert manifest.metas["router"] == read_meta(moved / "members" / "router" / "artifact")


@pytest.mark.parametrize("path", ["../outside", "/etc", "members/../../outside", "members/link", "members/expert-0\0"])
def test_ensemble_path_that_leaves_its_folder(run_dir, path):
    shutil.copytree(run_dir / "members" / "expert-0" / "artifact", run_dir.parent / "outside")
    (run_dir / "members" / "link").symlink_to(run_dir.parent / "outside")
    manifest = run_dir / "ensemble.json"
    entries = json.loads(manifest.read_text())["members"]
    edit(manifest, members=[{**entries[0], "path": path}, *entries[1:]])
    refused(
        lambda: read_ensemble(manifest), manifest, "path", "fetch it again" if "\0" in path else "leaves its folder"
    )


@pytest.mark.parametrize("link", ["members", "members/expert-1"])
def test_members_may_be_on_another_disk(run_dir, tmp_path, link):
    there = tmp_path / "another disk"
    (run_dir / link).rename(there)
    (run_dir / link).symlink_to(there)
    before = (run_dir / "ensemble.json").read_text()
    write_ensemble(run_dir, list(read_folders(run_dir)), [0.25, 0.75])
    assert (run_dir / "ensemble.json").read_text() == before
    assert list(read_ensemble(run_dir / "ensemble.json").folders) == ["expert-0", "expert-1", "router"]
    # But not what an artifact, or a saved ensemble, brings along.
    artifact = run_dir / "members/expert-1/artifact"
    artifact.rename(there / "elsewhere")
    artifact.symlink_to(tmp_path / "stranger")
    shutil.copytree(there / "elsewhere", tmp_path / "stranger")
    refused(lambda: read_ensemble(run_dir / "ensemble.json"), run_dir / "ensemble.json", "path", "leaves its folder")


def read_folders(run_dir):
    return [run_dir / "members" / name / "artifact" for name in ("expert-0", "expert-1", "router")]


@pytest.mark.parametrize(
    ("member", "changes", "word"),
    [
        ("expert-1", {"x_shape": (3, 8, 8)}, "x_shape"),
        ("router", {"normalisation": {"scale": 1.0, "shift": 0.0}}, "normalisation"),
        ("router", {"num_clusters": 3}, "num_clusters"),
        ("expert-1", {"timestep_shift": 3.0}, "timestep_shift"),
        ("expert-1", {"shift_by_tokens": True}, "shift_by_tokens"),
        ("expert-1", {"caption_encoder": None}, "caption_encoder"),
        ("expert-1", {"partition_sha256": "cd" * 32}, "partition_sha256"),
    ],
)
def test_ensemble_of_members_that_differ(run_dir, member, changes, word):
    folder = put(run_dir / "members" / member / "artifact", member, **changes)
    words = (folder, f"another value of {word}", member, "take members of one run, or fit one of the two again")
    refused(lambda: write_ensemble(run_dir, read_folders(run_dir), [0.25, 0.75]), *words)

    # As a stranger would hand it over: with a manifest whose hashes agree.
    manifest = run_dir / "ensemble.json"
    entries = json.loads(manifest.read_text())["members"]
    for entry in entries:
        entry["member_json_sha256"] = sha256_file(run_dir / entry["path"] / "member.json")

    edit(manifest, members=entries)
    refused(lambda: read_ensemble(manifest), *words)


def test_ensemble_with_a_missing_expert(run_dir):
    manifest = run_dir / "ensemble.json"
    folders = read_folders(run_dir)
    words = ("2 priors of expert-0, expert-1, but lists expert-0, router; fit the missing members",)
    refused(lambda: write_ensemble(run_dir, [folders[0], folders[2]], [0.25, 0.75]), manifest, *words)
    original = manifest.read_text()
    edit(manifest, members=[e for e in json.loads(original)["members"] if e["member"] != "expert-1"])
    refused(lambda: read_ensemble(manifest), manifest, *words)
    manifest.write_text("{")
    refused(lambda: read_ensemble(manifest), manifest, "cannot be read", "fetch it again")
    manifest.unlink()
    refused(lambda: read_ensemble(manifest), manifest, "is missing", "fit the missing members")
    manifest.write_text(original)
    shutil.rmtree(folders[1])
    refused(lambda: read_ensemble(manifest), folders[1] / "member.json", "is missing", "fit the member again")


def test_ensemble_with_wrong_members(run_dir, tmp_path):
    folders = read_folders(run_dir)
    manifest = run_dir / "ensemble.json"
    monolith = put(run_dir / "members" / "monolith" / "artifact", "monolith")
    refused(
        lambda: write_ensemble(run_dir, [*folders, monolith], [0.25, 0.75]),
        manifest,
        "lists expert-0, expert-1, monolith",
    )
    refused(
        lambda: write_ensemble(run_dir, folders, [1.0]), manifest, "1 priors of expert-0, but lists expert-0, expert-1"
    )
    refused(lambda: write_ensemble(run_dir, folders[:1], [1.0]), manifest, "1 priors", "know 2 clusters")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 2}, ("format_version", "install the release")),
        ({"priors": [0.5, 0.6]}, ("'priors'", "sum to 1", "fetch it again")),
        ({"priors": [1.5, -0.5]}, ("'priors[1]'", "positive")),
        ({"priors": [1.0, 0.0]}, ("'priors[1]'", "positive")),
        ({"priors": ...}, ("'priors' is missing",)),
        ({"partition_sha256": "cd"}, ("'partition_sha256' = 'cd': must be 64 hexadecimal", "fetch it again")),
        ({"expert_clusters": []}, ("2 priors of , but lists expert-0",)),
        ({"members": {}}, ("'members'", "a list")),
        ({"members": ["expert-0"]}, ("'members[0]': must be a section of keys",)),
        (
            {"members": [{"member": "expert-0", "path": "members"}]},
            ("'members[0].member_json_sha256' is missing",),
        ),
    ],
)
def test_bad_ensemble_files(run_dir, changes, words):
    manifest = run_dir / "ensemble.json"
    edit(manifest, **changes)
    refused(lambda: read_ensemble(manifest), manifest, *words)
