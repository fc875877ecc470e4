"""The page: what it says, that it needs nothing else, and that it shows text as text."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
import yaml

from lightning_fl.report import find_runs, group, read_run, report
from lightning_fl.report.clients import participation
from lightning_fl.report.curves import cost
from lightning_fl.report.groups import Group
from lightning_fl.report.one_run import about_run
from lightning_fl.report.scores import with_derived
from lightning_fl.report.several_runs import about_groups
from lightning_fl.report.write import html
from lightning_fl.types import FederationError

VOID = {"meta", "img", "br"}
PNG = b"\x89PNG\r\n"


@pytest.fixture
def undrawn(monkeypatch, picture):
    """Pictures are not drawn, for tests that look at words."""
    monkeypatch.setattr("lightning_fl.report.page.png", lambda figure: picture)


class Page(HTMLParser):
    """Checks that every element ends, and gathers what is on the page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(path):
    text = path.read_text()
    page = Page(text)
    # Nothing that a browser would fetch or run.
    assert not {"script", "link", "iframe", "object", "embed", "base", "svg"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name == "src":
            assert value.startswith("data:image/png;base64,")
            assert base64.b64decode(value.partition(",")[2]).startswith(PNG)
        if name == "href":
            assert value.startswith("#")
    assert "http:" not in text
    assert "https:" not in text
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    return page


def test_a_page_says_what_was_run_and_how_it_went(folder, picture):
    path = folder(
        faults__csv="round,client,fault\n3,1,nan\n",
        partition__png=picture,
        aggregator__png=picture,
    )
    assert report(path) == path / "report.html"
    text = page_of(path / "report.html").text
    for words in (
        "2 clients hold 5 samples, split by ByLabel(classes_per_client=1).",
        "In each of 4 rounds all 2 were sampled, each with 10 local steps on batches of 32.",
        "The model is MLPClassifier with 7,510 parameters.",
        "FedAvg aggregates the client updates; Schedule sets the hyperparameters.",
        "val_acc was 0.5 in the last round, best in round 3 (0.75).",
        "Clients uploaded 7.0 MB and downloaded 8.0 MB.",
        "1 of 8 client updates were dropped (1 non-finite values).",
        "is 0.75, with a standard deviation of 0.25.",
        "The mean of the worst tenth is 0.5.",
        "own training samples",
        "Constant in all rounds: lr 0.1, local steps per client 10.",
        "torch 2.14.1",
        "Figure of the aggregator: the tree of clusters",
    ):
        assert words in text
    assert "unfinished" not in text
    pictures = sorted(p.name for p in (path / "report").iterdir())
    assert pictures == [
        "accuracy.png",
        "aggregator.png",
        "clients.png",
        "cost.png",
        "participation.png",
        "partition.png",
    ]
    assert all((path / "report" / name).read_bytes().startswith(PNG) for name in pictures)


def test_the_same_run_gives_the_same_bytes_and_old_pictures_go(folder):
    path = folder()
    made = []
    for _ in range(2):
        report(path)
        files = [path / "report.html", *sorted((path / "report").iterdir())]
        made.append([file.read_bytes() for file in files])
        (path / "report" / "policy.png").write_bytes(b"of an earlier report")
    assert made[0] == made[1]
    report(path)
    assert not (path / "report" / "policy.png").exists()


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def test_files_are_shown_as_text_never_as_markup(folder, config, tmp_path):
    told = {"state": EVIL, "network": EVIL, "aggregator": EVIL, "machine": {EVIL: EVIL}}
    files = {
        "config__yaml": config(data__class_path=EVIL) + f"{json.dumps(EVIL)}: {json.dumps(EVIL)}\n",
        "environment__json": json.dumps(told | {"rounds": 9, "versions": {EVIL: EVIL}}),
        "partition__json": json.dumps(
            {"rule": EVIL, "parameters": {EVIL: EVIL}, "clients": [[0]], "class_counts": [{}]}
        ),
        "rounds__csv": f"round,val_acc,$\\frac{{$ {EVIL},_\n1,0.5,1,2\n2,0.6,2,1\n",
        "faults__csv": f"round,client,fault\n1,0,$\\frac{{{EVIL}\n",
    }
    path = folder(**files)
    page = page_of(report(path, title=EVIL))
    assert EVIL in page.text
    other = folder("other/version_0", config__yaml=config(data__class_path="x"))
    assert EVIL in page_of(report([path, other], tmp_path / "both.html")).text


def test_an_unfinished_run_says_so(folder, undrawn):
    told = json.dumps({"state": "started", "rounds": 60})
    page = about_run(read_run(folder(environment__json=told, participation__csv=None)))
    (warning,) = page.warnings
    assert "unfinished: 4 rounds of 60 done; it was interrupted or is still running" in warning
    assert ("rounds", "4 of 60") in page.figures


def test_what_could_not_be_read_is_said(folder, undrawn):
    page = about_run(read_run(folder(config__yaml="a: [1")))
    assert "digits/version_0: config.yaml is skipped" in page.warnings[0]


def test_a_table_alone_makes_a_page(folder):
    others = ("config__yaml", "environment__json", "partition__json", "participation__csv")
    rounds = "round\n1\n2\n"
    path = folder(**dict.fromkeys(others), rounds__csv=rounds)
    text = Page(html(about_run(read_run(path)))).text
    assert "The module logged neither accuracy nor loss." in text
    assert "--trainer.callbacks+=PersonalizedEvaluation" in text
    assert "Versions and machine are unknown" in text


def test_numbers_that_are_not_finite_are_gaps(folder):
    cells = ["nan", "inf", "-inf", "1e308", "-1e308"]
    rounds = "round,clients,num_steps,bytes_up,val_acc,train_loss,dropped\n" + "".join(
        f"{i},{cell},{cell},{cell},{cell},{cell},{cell}\n" for i, cell in enumerate(cells, 1)
    )
    page = about_run(read_run(folder(rounds__csv=rounds)))
    Page(html(page))
    rounds += "6,2,4,10,0.5,1e-9,0\n7,2,4,10,0.5,1e29,0\n"
    page = about_run(read_run(folder("b/version_0", rounds__csv=rounds)))
    assert ("best val_acc (round 6)", "0.5") in page.figures


def test_scores_on_test_samples_go_first(folder, undrawn):
    clients = "client,train_samples,test_samples,server,personal\n0,3,1,0.5,1.0\n1,2,3,0.25,1.0\n"
    page = about_run(read_run(folder(clients__csv=clients)))
    (section,) = (s for s in page.sections if s.title == "Clients")
    assert "accuracy of clients on their own test samples is 0.375" in section.text[0]
    # Weighted by test samples: (0.5 + 3 * 0.25) / 4.
    assert section.tables[0].rows[0] == [
        "server",
        "0.375",
        "0.3125",
        "0.125",
        "0.375",
        "0.25",
        "0.25",
    ]
    assert section.tables[1].rows[0] == ["1", "2", "4", "1", "0.25", "1"]


def test_why_clients_were_not_measured_is_said(folder, undrawn):
    told = json.dumps({"no train_acc": "NotImplementedError: no forward"})
    page = about_run(read_run(folder(environment__json=told, participation__csv=None)))
    (section,) = (s for s in page.sections if s.title == "Clients")
    assert "(NotImplementedError: no forward)" in section.text[0]


@pytest.fixture
def two_groups(folder, config):
    """Two seeds each of two numbers of clients; final accuracies 0.2, 0.4 and 0.7, 0.9."""
    for i, (share, last) in enumerate(((0.1, 0.2), (0.1, 0.4), (1.0, 0.7), (1.0, 0.9))):
        told = {"state": "finished", "rounds": 2, "seed": i % 2}
        path = folder(
            f"digits/version_{i}",
            accuracies=(0.1, last),
            config__yaml=config(seed_everything=i % 2, federation__client_fraction=share),
            environment__json=json.dumps(told),
        )
    return path.parent


def test_runs_are_compared_group_by_group(two_groups, tmp_path):
    text = page_of(report(two_groups, tmp_path / "new" / "both.html", title="Mine")).text
    assert "4 runs in 2 groups. Runs of a group differ only in the seed." in text
    assert "Groups differ in federation.client_fraction." in text
    assert "client_fraction=1.0 has the best final val_acc, 0.80 ± 0.14." in text
    assert "client_fraction=0.1 0, 1 2 0.30 ± 0.14 0.30 ± 0.14" in text
    assert (tmp_path / "new" / "both" / "accuracy.png").is_file()


def test_the_comparison_lists_every_run_and_what_differs(two_groups, undrawn):
    folders, _ = find_runs([two_groups])
    page = about_groups(group([read_run(folder) for folder in folders]))
    tables = {t.head[0]: t for section in page.sections for t in section.tables}
    head = ["group", "seeds", "rounds", "final val_acc", "best val_acc", "worst tenth of clients"]
    assert tables["group"].head == [*head, "updates dropped", "upload and download"]
    assert tables["option"].rows == [["federation.client_fraction", "0.1", "1"]]
    assert [row[0] for row in tables["run"].rows] == [f"digits/version_{i}" for i in range(4)]
    assert [row[4] for row in tables["run"].rows] == ["0.2", "0.4", "0.7", "0.9"]


def test_runs_that_have_nothing_in_common_can_be_compared(folder, config):
    paths = [
        folder("a/version_0", rounds__csv="round,loss\n1,2\n2,1\n", config__yaml=None),
        folder("b/version_0", participation__csv=None, environment__json=None),
        folder("c/version_0", rounds__csv="round\n1\n", config__yaml=config(model=3)),
    ]
    page = about_groups(group([read_run(path) for path in paths]), left_out=["x: no round"])
    assert "x: no round" in Page(html(page)).text


def test_many_columns_do_not_flood_the_page(folder, undrawn):
    names = [f"figure{i}" for i in range(200)]
    rows = [",".join([str(r), *(str(r * i) for i in range(200))]) for r in (1, 2)]
    path = folder(rounds__csv="\n".join([",".join(["round", *names]), *rows]))
    page = about_run(read_run(path))
    (section,) = (s for s in page.sections if s.title.startswith("Hyper"))
    assert "Not drawn: figure13, figure14" in " ".join(section.text)


@pytest.mark.parametrize("name", ["report.txt", "report", "folder.html"])
def test_only_a_page_is_written_to(folder, tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(FederationError, match=r"ends in \.html, got"):
        report(folder(), tmp_path / name)


def test_a_place_that_cannot_be_written_to_is_an_error(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FederationError, match="could not be written"):
        report(folder(), tmp_path / "file" / "report.html")


def test_no_runs_are_an_error():
    with pytest.raises(FederationError, match="no run to report"):
        report([])


def test_callbacks_are_named_with_what_is_not_their_default(folder):
    callbacks = [
        {"class_path": "lightning_fl.callbacks.ClientFaults", "init_args": {"dropout": 0.2}},
        {"class_path": "yours.Watch", "init_args": {"every": 3, "path": None}},
        {"class_path": "lightning_fl.callbacks.LabelFlip", "init_args": {"clients": 0.2}},
    ]
    config = yaml.safe_dump({"trainer": {"callbacks": callbacks, "callbacks_dir": "x"}})
    page = about_run(read_run(folder(config__yaml=config)))
    assert (
        "Callbacks: ClientFaults(dropout=0.2), Watch(every=3), LabelFlip." in Page(html(page)).text
    )


def test_privacy_and_backdoors_are_said_in_words(folder):
    def text(rounds, name="a"):
        return Page(html(about_run(read_run(folder(name, rounds__csv=rounds))))).text

    said = text("round,clients,epsilon,delta,backdoor_acc\n1,2,1.5,0.001,0.2\n2,2,2.5,0.001,0.25\n")
    assert "over all rounds: epsilon 2.5 with delta 0.001." in said
    assert "The backdoor was successful on 25 % of the validation samples" in said
    assert "no noise was added" in text("round,clients,epsilon,delta\n1,2,inf,0.001\n", "b")


def test_what_one_group_alone_has_is_said_of_it_alone(folder):
    one = "round,clients,clip_norm,epsilon\n1,2,0.5,1.0\n2,2,0.5,2.0\n"
    runs = [read_run(folder("a/version_0", rounds__csv=one))]
    config = yaml.safe_dump({"federation": {"aggregator": "FedAvg"}})
    other = folder("b/version_0", rounds__csv="round,clients\n1,2\n2,2\n", config__yaml=config)
    runs.append(read_run(other))
    groups = group(runs)
    said = Page(html(about_groups(groups))).text
    assert f"clip_norm 0.5 ({groups[0].name})" in said
    assert "epsilon" in said


@pytest.fixture
def panels(monkeypatch, undrawn):
    """The panels of each figure and the labels of their horizontal axes, in place of pictures."""
    seen = []
    for place in ("curves.lines", "clients.stacked"):
        monkeypatch.setattr(
            f"lightning_fl.report.{place}",
            lambda drawn, across="round", order=(): seen.append((drawn, across)),
        )
    return seen


def labels(drawn):
    return {panel: [line.label for line in shown] for panel, shown in drawn.items()}


def test_one_run_has_its_columns_in_one_panel_and_groups_have_a_panel_per_column(folder, panels):
    rounds = (
        "round,clients,bytes_up,bytes_down,virtual_time,val_acc\n1,2,2e6,1e6,5,0.5\n2,2,2e6,0,9,1\n"
    )
    run = with_derived(read_run(folder(rounds__csv=rounds)))
    cost([Group("a", [run])])
    cost([Group("a", [run]), Group("b", [run])])
    (alone, across), (several, _) = panels
    assert labels(alone) == {
        "MB so far": ["MB up", "MB up and down"],
        "virtual time (s)": ["virtual_time"],
        "val_acc, by traffic": ["val_acc, by traffic"],
        "val_acc, by virtual time": ["val_acc, by virtual time"],
    }
    assert list(across.values()) == ["round", "round", "MB up and down", "virtual time (s)"]
    assert [list(line.y) for line in alone["MB so far"]] == [[2, 4], [3, 5]]
    (by_traffic,) = alone["val_acc, by traffic"]
    assert (list(by_traffic.x), list(by_traffic.y)) == ([3, 5], [0.5, 1])
    assert labels(several)["MB up and down"] == ["a", "b"]


def test_faults_are_drawn_by_kind_and_drops_by_cause(folder, panels):
    participation(read_run(folder(faults__csv="round,client,fault\n3,1,nan\n3,0,late\n1,0,nan\n")))
    participation(read_run(folder("b/version_0")))
    (faults, _), (drops, across) = panels
    assert faults["clients with a fault"] == {"nan": {1: 1, 3: 1}, "late": {3: 1}}
    assert drops["updates dropped"] == {"non-finite values": {3: 1}}
    assert drops["rounds of the client"] == {
        "update arrived": {0: 4, 1: 3},
        "update dropped": {0: 0, 1: 1},
    }
    assert across == ["round", "client"]


def test_groups_are_compared_at_equal_virtual_time_if_all_have_a_clock(folder, panels):
    def timed(name, *times):
        lines = [f"{i},2,{t},{0.1 * i:.1f}" for i, t in enumerate(times, 1)]
        table = "\n".join(["round,clients,virtual_time,val_acc", *lines]) + "\n"
        return Group(name, [read_run(folder(f"{name}/version_0", rounds__csv=table))])

    waits, asynchronous = timed("waits", 50, 100), timed("asynchronous", 20, 40, 60, 80)
    untimed = Group("untimed", [read_run(folder("c/version_0"))])
    said = Page(html(about_groups([waits, asynchronous]))).text
    assert "val_acc after 1 min 20 s of virtual time" in said
    drawn, across = next(p for p in panels if "val_acc, by virtual time" in p[0])
    assert across["val_acc, by virtual time"] == "virtual time (s)"
    assert [list(line.x) for line in drawn["val_acc, by virtual time"]] == [
        *([50, 100], [20, 40, 60, 80])
    ]
    panels.clear()
    section = cost([waits, untimed])
    assert "Some runs have no virtual time" in section.text[0]
    assert "val_acc, by virtual time" not in panels[0][0]
