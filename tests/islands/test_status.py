"""What ``status`` says of islands: a dead process never trains, whatever its clock says; the table and the page."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from shards.mds import WARNINGS
from tiny_runs import TINY
from torch.utils.tensorboard import SummaryWriter

from ddm_lightning.cli import status as command
from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core import remote
from ddm_lightning.islands import lease, status
from ddm_lightning.islands.page import read_curves, write_page
from ddm_lightning.islands.status import Status, Watch, _figure, rows_of
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import MemberStatus

pytestmark = WARNINGS
METRICS = {"train/loss": 0.25, "train/mfu": 0.413}


@pytest.fixture
def run(tmp_path):
    return Run(load_experiment(TINY, [f"run_dir={tmp_path / 'here'}", f"remote={tmp_path / 'store'}"]))


@pytest.fixture
def clock(monkeypatch):
    """This machine's clocks, which stand still until somebody moves them."""
    clock = SimpleNamespace(now=1e9, ahead=0.0)
    moved = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now - 5e8)
    monkeypatch.setattr(status, "time", moved)
    theirs = SimpleNamespace(time=lambda: clock.now + clock.ahead)
    monkeypatch.setattr(lease, "time", theirs)
    return clock


def start(run, monkeypatch, name="expert-0", **fields):
    """The training of a member on another machine, as far as its heartbeat goes."""
    with monkeypatch.context() as patched:
        patched.setattr(lease, "_machine", lambda: "another start of another machine")
        held = lease.claim(name, f"{run.url}/members/{name}/lease")
    own = {
        "state": "training",
        "step": 20,
        "samples_per_second": 8.0,
        "metrics": METRICS,
        "host": "far-away",
        "device": "H100",
        **fields,
    }
    beats = vars(MemberStatus(name, 100, **{"host": "far-away", **own}))
    held.beat(beats)
    return lambda **more: held.beat(beats, **more)


def printed(table, width):
    stream = io.StringIO()
    Console(width=width, file=stream).print(table)
    return stream.getvalue()


def look(watch, name="expert-0"):
    return next(seen for seen in watch.look() if seen.status.member == name)


@pytest.mark.parametrize("ahead", [-3600.0, -50.0, 0.0, 50.0, 3600.0])
def test_a_dead_process_is_never_training_however_wrong_its_clock(run, clock, monkeypatch, ahead):
    clock.ahead = ahead
    start(run, monkeypatch)
    watch = Watch(run)
    look(watch)
    for passed in (10, 44, 46, 100, 3590, 3640, 3650, 10000):
        clock.now = 1e9 + passed
        assert (look(Watch(run)).health == "training") == (abs(passed - ahead) < lease.STALE_SECONDS)
        assert passed < lease.STALE_SECONDS or look(watch).health == "silent"
        # The older of both ages: who watches for a minute sees that it has been dead for an hour.
        assert look(watch).heartbeat_age == (passed - ahead if passed < lease.STALE_SECONDS else passed - min(ahead, 0))


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_heartbeat_that_changes_is_alive_whatever_its_clock_says(run, clock, monkeypatch, ahead):
    clock.ahead = ahead
    beat, watch = start(run, monkeypatch), Watch(run)
    assert look(watch).health == ("unclear" if ahead > 0 else "silent")
    for _ in range(3):
        clock.now += 10
        beat()
        assert (look(watch).health, look(watch).heartbeat_age) == ("training", 0.0)
    clock.now += 44
    assert (look(watch).health, look(watch).heartbeat_age) == ("training", 44.0)
    clock.now += 1
    assert look(watch).health == "silent"


def test_other_states_need_no_heartbeat(run, clock, monkeypatch):
    start(run, monkeypatch)(released=True)
    start(run, monkeypatch, "expert-1", state="done")
    clock.now += 1e6
    states = {seen.status.member: (seen.health, seen.starts) for seen in Watch(run).look()}
    assert states == {"expert-0": ("stopped", 1), "expert-1": ("done", 1), "router": ("waiting", 0)}
    start(run, monkeypatch)
    assert look(Watch(run)).starts == 2


def test_a_process_of_this_machine_is_asked_directly(run):
    held = lease.claim("expert-0", f"{run.url}/members/expert-0/lease")
    held.beat(vars(MemberStatus("expert-0", 100, "training")))
    assert look(Watch(run)).health == "training"
    held._content.began = "1"  # another process had this id
    held.beat(vars(MemberStatus("expert-0", 100, "training")))
    assert look(Watch(run)).health == "killed"


def test_the_table_has_what_islands_publish(run, clock, monkeypatch):
    start(run, monkeypatch, host="far\x1b[2Jaway")
    (row, *_) = rows_of(Watch(run).look())
    batch = run.experiment.expert.train.global_batch_size // 2
    left = f"{80 * batch / 8.0:g} s"
    wanted = {"state": "training", "step": "20/100", "loss": "0.2500", "samples/s": "8", "MFU": "41.3%", "ETA": left}
    wanted |= {"island": "far[2Jaway", "device": "H100", "starts": "1", "heartbeat": "1 s"}
    assert {key: row[key] for key in wanted} == wanted
    alone = Run(load_experiment(TINY, [f"run_dir={run.folder.root}"]))
    text = printed(Status(alone, Watch(alone).look()), 80)
    assert "expert-0" in text and "…" not in text


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_a_narrow_table_has_whole_columns_and_the_states(run, clock, monkeypatch, width):
    start(run, monkeypatch, host="ip-10-0-0-12.eu-west-1.compute.internal", device="8 x NVIDIA H100 80GB HBM3")
    text = printed(Status(run, Watch(run).look()), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert all(word in text for word in ("expert-0", "expert-1", "router", "training", "waiting"))
    assert ("20/100" in text, "41.3%" in text) == (width >= 40, width >= 80)


@pytest.mark.parametrize("passed", [10, 46])
def test_a_member_that_dies_before_its_own_first_status_is_not_waiting(run, clock, monkeypatch, passed):
    start(run, monkeypatch, state="waiting", step=0, metrics={})
    clock.now += passed
    assert look(Watch(run)).health == ("starting" if passed < lease.STALE_SECONDS else "silent")


def events(folder, first, last, began, value):
    """A file of events as a process whose clock says ``began`` leaves it; it goes on from a checkpoint."""
    with SummaryWriter(folder, purge_step=first if first > 5 else None) as writer:
        for step in range(first, last + 1, 5):
            writer.add_scalar("1_watch/train/loss", value, step)
    (path,) = set(folder.iterdir()) - {*folder.glob("*.moved")}
    path.rename(folder / f"events.out.tfevents.{began}.host.1.0.moved")


@pytest.mark.parametrize("clocks", [(2000, 1000, 3000), (1000, 2000, 3000), (3000, 2000, 1000)])
def test_curves_of_several_starts_do_not_tangle_whatever_their_clocks(run, clocks, capfd):
    folder = Path(run.url) / "members/expert-0/tensorboard"
    events(folder, 5, 100, clocks[0], 1.0)
    events(folder, 65, 150, clocks[1], 2.0)
    events(folder, 105, 200, clocks[2], 3.0)
    assert read_curves("expert-0", run) == {
        "1_watch/train/loss": ([*range(5, 201, 5)], [1.0] * 12 + [2.0] * 8 + [3.0] * 20)
    }
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("num", "has_line"), [(1, False), (2, False), (3, True)])
def test_two_points_are_no_curve(run, clock, monkeypatch, num, has_line):
    start(run, monkeypatch)
    with SummaryWriter(f"{run.url}/members/expert-0/tensorboard") as writer:
        for step in range(num):
            writer.add_scalar("1_watch/train/loss", 1 / (step + 1), step)
    write_page(run.folder.root / "page.html", Watch(run).look(), run)
    text = (run.folder.root / "page.html").read_text(encoding="utf-8")
    assert bool(re.search(r"stroke: #1f77b4[^>]*stroke-width: 1[;\"]|stroke: #1f77b4[^>]*square", text)) == has_line


class Page(HTMLParser):
    """Tags and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "xlink:href")]


def test_the_page_shows_every_curve_and_runs_nothing(run, clock, monkeypatch, capsys):
    for name, steps in (("expert-0", 30), ("expert-1", 20), ("router", 0)):
        start(run, monkeypatch, name, host="<script>alert(1)</script>")
        place = f"{run.url}/members/{name}/tensorboard"
        if steps:
            with SummaryWriter(place) as writer:
                for step in range(steps):
                    writer.add_scalar("1_watch/train/loss", 1 / (step + 1), step)
                writer.add_scalar("4_by_noise_level/train/loss_t0.1", 1.0, 0)
    remote.write(f"{run.url}/members/router/tensorboard/events.out.tfevents.1", b"garbage" * 100)
    write_page(run.folder.root / "page.html", Watch(run).look(), run)
    text = (run.folder.root / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags and "&lt;script&gt;" in text
    assert all(address.startswith("#") for address in page.addresses)
    (drawing,) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    paths = [path.get("d") for path in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}path")]
    assert [num for path in paths if (num := path.count("L") + 1) > 10] == [30, 20]
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["loss"]
    assert all(len(line) < 200 for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [(None, ".4f", "–"), (0.27549, ".4f", "0.2755"), (2354.4, ".0f", "2354"), (2.4654e24, ".4f", "2.5e+24")],
)
def test_figures_fit_their_columns(value, form, shown):
    assert _figure(value, form) == shown


def test_the_progress_of_preparing_is_that_of_all_machines(run):
    assert status.preparing_line(run) is None
    remote.write(f"{run.url}/prepared/parts.json", json.dumps([f"part {n}" for n in range(130)]).encode())
    for name in ("parts/a", "parts/b", "groups/00000"):
        remote.write(f"{run.url}/prepared/{name}.json", b"{}")
        remote.write(f"{run.url}/prepared/{name}/x_0-ab.npy", b"{}")
    remote.write(f"{run.url}/prepared/parts/of-other-settings.json", b"")
    assert status.preparing_line(run) == "prepare: 2 of 130 parts encoded, 1 of 3 groups of shards written"
    remote.write(f"{run.url}/prepared/manifest.json", b"{}")
    assert status.preparing_line(run) is None


@pytest.mark.parametrize("content", [b"{", b"3", b"[" * 100_000])
def test_a_damaged_list_of_parts_is_said(run, content):
    remote.write(f"{run.url}/prepared/parts.json", content)
    assert status.preparing_line(run) == f"prepare: {run.url}/prepared/parts.json is damaged"


@pytest.mark.parametrize(("place", "error"), [("/lease", ConnectionError("reset")), ("/prepared", OSError("expired"))])
def test_watch_waits_for_a_store_that_is_down(run, clock, monkeypatch, capsys, place, error):
    """At the first look, and for every part of the table."""
    monkeypatch.setattr(command, "_WATCH_SECONDS", 0.0)
    for name in run.names:
        start(run, monkeypatch, name, state="done")
    errors, files = [error], remote.files

    def listed(url, recursive=True):
        if url.endswith(place) and errors:
            raise errors.pop()
        return files(url, recursive)

    monkeypatch.setattr(remote, "files", listed)

    assert main(["status", "-c", str(TINY), f"run_dir={run.folder.root}", f"remote={run.url}", "--watch"]) == 0
    out, err = capsys.readouterr()
    assert "done" in out
    assert err == f"note: key 'remote': {error}; check the address and the access to it; tried again until it answers\n"


def test_watch_refuses_a_wrong_address_at_once(tmp_path, capsys):
    own = ["-c", str(TINY), f"run_dir={tmp_path / 'here'}", "remote=moon://bucket"]
    assert main(["status", *own, "--watch"]) == 2
    assert "moon" in capsys.readouterr().err


def test_the_progress_of_preparing_here(tmp_path):
    run = Run(load_experiment(TINY, [f"run_dir={tmp_path}"]))
    for name in ("parts/a/part.json", "groups/00000.json", "parts.json"):
        (tmp_path / "prepared" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "prepared" / name).write_text(json.dumps([1, 2]))
    assert status.preparing_line(run) == "prepare: 1 of 2 parts encoded, 1 of 1 groups of shards written"


def test_buckets_are_named_below_the_table(bucket_prepared, tiny_prepared):
    lines = []
    for prepared in (bucket_prepared, tiny_prepared):
        run = Run(load_experiment(TINY, [f"run_dir={prepared.parent}"]))
        lines.append(status.Status(run, []).caption)

    assert lines[0] == "shapes 4x16: 20, 8x8: 50, 16x4: 30" and not lines[1]
