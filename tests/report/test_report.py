"""The page: what it says, that it needs nothing else, and that it shows text as text."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from histories import by_round
from lightning_fl.callbacks.client_history import ClientHistory
from lightning_fl.report import Run, find_runs, group, read_run, report, write
from lightning_fl.report.clients import clients, participation
from lightning_fl.report.curves import cost, progress
from lightning_fl.report.groups import Group
from lightning_fl.report.one_run import about_run
from lightning_fl.report.page import Picture
from lightning_fl.report.several_runs import about_groups
from lightning_fl.report.summary import direction, headline, with_derived
from lightning_fl.report.words import NBSP
from lightning_fl.report.write import html
from lightning_fl.types import FederationError

VOID = {"meta", "img", "br"}  # elements without an end


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

    def handle_startendtag(self, tag, attrs):  # in SVG
        self.tags.append(tag)
        self.attributes += attrs

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
    assert not {"link", "iframe", "object", "embed", "base", "foreignobject"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name == "src" or (name == "href" and value.startswith("data:")):
            assert value.startswith("data:image/png;base64,")
            assert base64.b64decode(value.partition(",")[2].strip()).startswith(b"\x89PNG\r\n")
        elif name == "href":
            assert value.startswith("#")
    assert "http:" not in text
    assert "https:" not in text
    assert not re.search(r"url\((?!#)|@import", text)
    # The policy allows the one script of the page, which is the package's, and nothing else.
    script = Path(write.__file__).with_name("page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src"
    assert f"{policy} 'sha256-{digest}'" in text
    assert page.tags.count("script") == 1
    assert f"<script>{script}</script>" in text
    return page


@pytest.fixture
def undrawn(monkeypatch):
    """Pages have no figures, which take most of the time."""
    monkeypatch.setattr(write, "_svg", lambda panel, name: ("", "{}"))


def charts(page):
    """The values that the script shows under the pointer, by the label of the vertical axis."""
    labels = [value for name, value in page.attributes if name == "aria-label"]
    data = [json.loads(value) for name, value in page.attributes if name == "data-chart"]
    return dict(zip(labels, data, strict=True))


def test_a_page_says_what_was_run_and_how_it_went(folder):
    path = folder(faults__csv="round,client,fault\n3,1,nan\n")
    assert report(path) == path / "report.html"
    text = page_of(path / "report.html").text
    for words in (
        "2 clients, 5 samples, split by ByLabel(classes_per_client=1)",
        " · 2 of 2 clients per round · 10 local steps · batches of 32 · ",
        "MLPClassifier with 7,510 parameters · FedAvg · Schedule",
        "final val_acc 0.5",
        "best val_acc (round 3) 0.75",
        "upload 7.0 MB, download 8.0 MB 15.0 MB",
        "updates dropped 1 of 8",
        "Dropped updates by cause: non-finite values 1.",
        "worst tenth of clients, own training samples 0.5",
        "own training samples",
        "Constant in all rounds: lr 0.1, local steps per client 10.",
        "torch 2.14.1",
    ):
        assert words in text
    assert "unfinished" not in text
    assert not (path / "report").exists()


def test_the_same_run_gives_the_same_bytes(folder):
    path = folder()
    assert report(path).read_bytes() == report(path).read_bytes()


EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def test_files_are_shown_as_text_never_as_markup(folder, config, manifest, tmp_path):
    told = dict.fromkeys(("state", "network", "aggregator"), EVIL) | {"parameters": 1, "rounds": 9}
    files = {
        "environment": told | {"machine": {EVIL: EVIL, "threads": 1}, "versions": {EVIL: EVIL}},
        "config__yaml": config(data__class_path=EVIL) + f"{json.dumps(EVIL)}: {json.dumps(EVIL)}\n",
        "partition__json": manifest([1], [{0: 1}], EVIL, **{EVIL: EVIL}),
        "participation__csv": f"client,train_samples,name\n0,1,{EVIL.replace(chr(34), chr(39))}\n",
        "rounds__csv": f"round,val_acc,$\\frac{{$ {EVIL},_\n1,0.5,1,2\n2,0.6,2,1\n",
    }
    path = write_by_round(folder(**files), "1,1", "2,0", legend=f"0=no 1={EVIL.split()[0]}")
    page = page_of(report(path, title=EVIL))
    assert EVIL in page.text
    assert charts(page)["client by round"]["layers"][0]["names"][-1] == EVIL.split()[0]
    assert EVIL.replace('"', "'")[:40] in charts(page)["client by round"]["rows"][0]
    other = folder("other/version_0", config__yaml=config(data__class_path="x"))
    assert EVIL in page_of(report([path, other], tmp_path / "both.html")).text


def test_an_unfinished_run_says_so(folder):
    told = {"state": "KeyboardInterrupt", "rounds": 60}
    page = about_run(read_run(folder(environment=told, participation__csv=None)))
    (warning,) = page.warnings
    assert "is unfinished (KeyboardInterrupt): 4 of 60 rounds are done" in warning
    assert ("rounds", "4 of 60") in page.figures


def test_rounds_that_kept_the_model_and_clients_that_were_often_dropped_are_alarms(folder):
    rounds = "round,clients,kept\n1,2,\n2,2,1\n3,2,1\n"
    lines = [f"{i},{'15'[i == 1]}{'15'[i < 3]}" for i in range(1, 12)]  # dropped in 1 and 2 of 11
    run = read_run(
        write_by_round(folder(rounds__csv=rounds), *lines, legend="0=no 1=arrived 5=late")
    )
    page = about_run(run)
    assert page.alarms == [
        "digits/version_0 kept the global model in 2 rounds: 2, 3.",
        "digits/version_0 dropped clients in more than 10% of their rounds: client 1 in 2 of 11.",
    ]
    assert page.alarms[0] in Page(html(page)).text


def test_the_clients_that_lost_most_are_named_first(folder):
    lines = ["1,2222", "2,1222", "3,1102"]
    names = "client,train_samples,name\n3,1,east\n0,1,north\n"
    path = write_by_round(folder(participation__csv=names), *lines)
    (alarm,) = about_run(read_run(path)).alarms
    assert alarm.endswith(
        "rounds: client 2 in 2 of 2, client 3 (east) in 3 of 3, client 1 in 2 of 3,"
        " client 0 (north) in 1 of 3."
    )


def test_a_run_in_which_every_update_was_dropped_is_never_the_best(folder):
    rounds = "round,clients,dropped,non_finite,kept,val_acc\n1,2,2,2,1,0.9\n2,2,2,2,1,0.9\n"
    lost = {"rounds__csv": rounds}
    lost["client_losses__csv__gz"] = by_round("1,55", "2,55", legend="5=non_finite")
    bare = {"client_losses__csv__gz": None}
    groups = [
        Group(name, [read_run(folder(f"{name}/v", (0.1, last), **bare))])
        for name, last in (("good", 0.2), ("fine", 0.3))
    ]
    for name, files in (("lost", lost), ("bare", lost | bare)):
        groups.append(Group(name, [read_run(folder(f"{name}/v", **files))]))
    page = about_groups(groups)
    assert page.lead[-1].startswith("fine has the best final val_acc, 0.3.")
    assert page.lead[-1].endswith("Runs with an alarm are left out.")
    assert sum("kept the global model in 2 rounds" in text for text in page.alarms) == 2


def test_numbers_that_are_not_finite_are_gaps(folder):
    cells = ["nan", "inf", "-inf", "1e308", "-1e308"]
    rounds = "round,clients,val_acc,train_loss\n" + "".join(
        f"{i},2,{cell},{cell}\n" for i, cell in enumerate(cells, 1)
    )
    page = about_run(read_run(folder(rounds__csv=rounds)))
    Page(html(page))
    assert page.figures[:2] == [("rounds", "5 of 4"), ("final val_acc", "not finite")]
    rounds += "6,2,0.5,1e-9\n7,2,0.5,1e29\n"
    page = about_run(read_run(folder("b/version_0", rounds__csv=rounds)))
    assert ("best val_acc (round 6)", "0.5") in page.figures


def test_the_metric_of_clients_has_its_name(folder):
    files = {"clients__csv": "client,train_samples,test_samples,server\n0,3,1,0.5\n1,2,3,0.25\n"}
    files["environment"] = {"client_metric": "dice"}
    paths = [folder(f"{at}/version_0", **files) for at in "ab"]
    page = about_run(read_run(paths[0]))
    (section,) = (s for s in page.sections if s.title == "Clients")
    assert section.tables[0].rows[0][:2] == ["server", "0.375"]
    assert section.pictures[0].panels[0].ylabel == "dice on own test samples"
    several = about_groups(group([read_run(path) for path in paths]))
    (section,) = (s for s in several.sections if s.title == "Clients")
    assert section.pictures[0].panels[0].ylabel == "dice on own test samples"


def test_scores_on_test_samples_go_first(folder):
    clients = "client,round,train_samples,test_samples,server,personal\n"
    clients += "0,2,3,1,0.5,1.0\n1,2,2,3,0.25,1.0\n"  # the run has gone on for two rounds
    page = about_run(read_run(folder(clients__csv=clients)))
    (section,) = (s for s in page.sections if s.title == "Clients")
    assert section.pictures[0].panels[0].ylabel == "accuracy on own test samples after round 2"
    summary, by_client = section.tables
    # Weighted by test samples: (0.5 + 3 * 0.25) / 4.
    assert summary.rows[0] == ["server", "0.375", "0.3125", "0.125", "0.375", "0.25", "0.25"]
    head = ["client", "training samples", "rounds", "dropped", "non-finite values"]
    assert by_client.head == [*head, "server", "personal"]
    assert by_client.rows == [
        ["1", "2", "4", "1", "1", "0.25", "1"],  # the worst first
        ["0", "3", "4", "0", "0", "0.5", "1"],
    ]
    assert by_client.sortable


def test_why_clients_were_not_measured_is_said(folder):
    told = {"no train_acc": "NotImplementedError: no forward"}
    page = about_run(read_run(folder(environment=told, participation__csv=None)))
    (section,) = (s for s in page.sections if s.title == "Clients")
    assert "(NotImplementedError: no forward)" in section.text[0]


@pytest.fixture
def two_groups(folder, config):
    """Two seeds each of two numbers of clients; final accuracies 0.2, 0.4 and 0.7, 0.9."""
    for i, (share, last) in enumerate(((0.1, 0.2), (0.1, 0.4), (1.0, 0.7), (1.0, 0.9))):
        path = folder(
            f"digits/version_{i}",
            (0.1, last),
            {"state": "finished", "rounds": 2, "seed": i % 2},
            client_losses__csv__gz=by_round("1,11", "2,11"),
            config__yaml=config(seed_everything=i % 2, federation__client_fraction=share),
        )
    return path.parent


@pytest.mark.usefixtures("undrawn")
def test_runs_are_compared_group_by_group(two_groups, tmp_path):
    text = page_of(report(two_groups, tmp_path / "new" / "both.html", title="Mine")).text
    assert "4 runs in 2 groups, which differ in federation.client_fraction." in text
    # Both differences are 0.5: their interval has no width.
    assert "client_fraction=1.0 has the best final val_acc, 0.80 ± 0.14." in text
    assert "do not separate" not in text
    # Final accuracies 0.2 and 0.4: mean 0.3, s = 0.1414, and t = 12.706 for two seeds, so the half
    # width is 12.706 * 0.1414 / sqrt(2) = 1.2706.
    assert "client_fraction=0.1 0, 1 2 0.30 ± 0.14 -0.9706 to 1.571 0.30 ± 0.14" in text
    assert "federation.client_fraction 0.1 1.0" in text
    # Both seeds differ by 0.5, so the interval has no width.
    assert "client_fraction=1.0 0: +0.5, 1: +0.5 +0.5 +0.5 to +0.5" in text
    assert "Thin lines: single seeds." in text


@pytest.mark.usefixtures("undrawn")
def test_runs_are_judged_by_the_metric_that_is_asked_for(folder, tmp_path):
    rounds = "round,clients,val_acc,own_score,err\n1,2,0.5,9,3\n2,2,0.6,8,4\n"
    runs = [folder(f"{name}/version_0", rounds__csv=rounds) for name in ("one", "other")]

    def text(found, **options):
        return Page(report(found, tmp_path / "page.html", **options).read_text()).text

    assert "final own_score 8 best own_score (round 1) 9" in text(runs[0], metric="own_score")
    assert "best own_score (round 2) 8" in text(runs[0], metric="own_score", mode="min")
    assert "best err (round 1) 3" in text(runs[0], metric="err")
    both = text(runs, metric="own_score")
    assert "final own_score" in both
    assert "final val_acc" not in both
    panels = progress([Group("a", [replace(read_run(runs[0]), metric="own_score")])]).pictures[0]
    assert [panel.ylabel for panel in panels.panels] == ["own_score", "accuracy"]
    many = "round," + ",".join(f"acc_{i}" for i in range(8)) + "\n1,0,1,2,3,4,5,6,7\n"
    run = replace(read_run(folder("many", rounds__csv=many)), metric="acc_7")
    assert progress([Group("a", [run])]).text == ["Not drawn: acc_5, acc_6."]
    with pytest.raises(FederationError, match=r"metric must be round, clients, .*, got 'f1'"):
        text(runs, metric="f1")
    with pytest.raises(FederationError, match="mode=min is for a metric: set metric, too"):
        text(runs, mode="min")


@pytest.mark.parametrize("name", ["val_mse", "val_mae", "rmse", "val_nll", "perplexity"])
def test_less_of_an_error_is_better(name):
    assert direction(name) == direction(f"final {name}") == "min"


@pytest.mark.usefixtures("undrawn")
def test_less_of_an_error_is_better_in_a_table_for_a_paper(seeds, tmp_path):
    none = dict.fromkeys(("client_losses__csv__gz", "participation__csv"))
    paths = {
        name: seeds(name, 0, 0, 0, rounds__csv=f"round,clients,rmse,figure\n1,2,{x},{x}\n", **none)
        for name, x in (("good", 1.0), ("bad", 2.0))
    }
    latex, page = tmp_path / "table.tex", tmp_path / "a.html"
    report(paths, page, latex=latex, metric="rmse")
    assert "good has the best final rmse" in page.read_text()
    lines = [line for line in latex.read_text().splitlines() if line.startswith(("good", "bad"))]
    assert [line.count("mathbf") for line in lines] == [1, 0]
    with pytest.raises(FederationError, match="does not tell whether more or less of it is better"):
        report(paths, page, metric="figure")


@pytest.mark.usefixtures("undrawn")
def test_runs_of_a_named_group_that_differ_are_a_warning(two_groups, tmp_path):
    text = page_of(report({"all": two_groups}, tmp_path / "all.html")).text
    assert "4 runs in 1 group. 2 clients," in text
    assert "Runs of all differ not only in the seed: federation.client_fraction." in text
    assert "config.yaml of digits/version_0" in text  # each config with its own seeds
    assert "config.yaml of digits/version_2" in text


def test_a_run_belongs_to_one_group(two_groups, tmp_path):
    named = {"one": two_groups, "": [two_groups / "version_0"]}
    with pytest.raises(FederationError, match="version_0 is in several groups: pass it once"):
        report(named, tmp_path / "twice.html")


def test_the_comparison_lists_every_run_and_what_differs(two_groups):
    folders, _ = find_runs([two_groups])
    page = about_groups(group([read_run(folder) for folder in folders]))
    tables = {t.head[0]: t for section in page.sections for t in section.tables}
    head = ["group", "seeds", "rounds", "final val_acc", "95 % interval", "best val_acc"]
    head += ["worst tenth of clients, own training samples", "updates dropped"]
    head += ["upload and download (MB)"]
    (groups,) = (section for section in page.sections if section.title == "Groups")
    compared, words = groups.tables
    assert compared.head == head
    assert words.head == ["option", "client_fraction=0.1", "client_fraction=1.0"]
    assert r"client\_fraction=0.1 & $0.30 \pm 0.14$ \\" in groups.verbatim[0].content
    assert [row[0] for row in tables["run"].rows] == [f"digits/version_{i}" for i in range(4)]
    assert tables["run"].head[4:6] == ["final val_acc", "best val_acc"]
    assert [row[4] for row in tables["run"].rows] == ["0.2", "0.4", "0.7", "0.9"]
    assert compared.rows[0][-1] == "8"  # a number without a unit, which a click sorts


def test_options_that_a_run_leaves_at_their_default_are_named_so(folder, config):
    term = {"class_path": "x.Proximal", "init_args": {"mu": 0.1}}
    krum = {"class_path": "x.Krum", "init_args": {"f": 1}}
    other = {"federation__client_fraction": 0.5, "federation__aggregator": krum}
    texts = [
        config(federation__client_fraction=None),
        config(**other, model__init_args={"terms": [term]}),
    ]
    runs = [read_run(folder(f"{at}/v", config__yaml=text)) for at, text in enumerate(texts)]
    (section,) = (s for s in about_groups(group(runs)).sections if s.title == "Groups")
    assert sorted(section.tables[1].rows) == [
        ["federation.aggregator", "FedAvg", "Krum"],
        ["federation.aggregator.f", "-", "1"],
        ["federation.client_fraction", "default", "0.5"],
        ["model.terms.0", "-", "Proximal"],
        ["model.terms.0.mu", "-", "0.1"],
    ]


def test_seeds_of_a_script_are_compared(seeds):
    folders = [path for name in "ab" for path in seeds(name, 0.1, 0.2, 0.3, config__yaml=None)]
    page = about_groups(group([read_run(each) for each in folders]))
    assert "6 runs in 2 groups" in page.lead[0]
    paired = next(section for section in page.sections if section.title == "Paired seeds")
    assert paired.tables[0].rows[0][0] == "b"


def test_runs_that_have_nothing_in_common_can_be_compared(folder, config):
    paths = [
        folder("a/version_0", rounds__csv="round,loss\n1,2\n2,1\n", config__yaml=None),
        folder("b/version_0", participation__csv=None, environment__json=None),
        folder("c/version_0", rounds__csv="round\n1\n", config__yaml=config(model=3)),
    ]
    Page(html(about_groups(group([read_run(path) for path in paths]))))


def test_seeds_and_clients_are_names_and_what_nobody_logged_has_no_column(folder):
    files = {"rounds__csv": "round,virtual_time\n1,150\n", "config__yaml": None}
    files["participation__csv"] = "client,train_samples\n1234,1\n"
    files |= {"client_losses__csv__gz": None, "environment": {"seed": 12345}}
    runs = [read_run(folder(f"{i}/v", **files)) for i in range(2)]
    page = about_groups(group(runs))
    tables = {t.head[0]: t for section in page.sections for t in section.tables}
    assert tables["run"].head[:4] == ["run", "group", "seed", "rounds"]
    assert tables["run"].rows[0][:4] == ["0/v", "0", "12345", "1"]
    compared = dict(zip(tables["group"].head, tables["group"].rows[0], strict=True))
    assert compared["seeds"] == "12345"
    assert compared["virtual time (s)"] == "150"
    assert clients(runs[0]).tables[-1].rows[-1][0] == "1234"


@pytest.mark.usefixtures("undrawn")
def test_no_runs_and_a_place_that_cannot_be_written_to_are_errors(folder, tmp_path):
    with pytest.raises(FederationError, match="no run to report"):
        report([])
    with pytest.raises(FederationError, match=r"ends in \.html, got"):
        report(folder("a/version_0"), tmp_path / "report.txt")
    (tmp_path / "a" / "version_1").mkdir()
    text = report(tmp_path / "a", tmp_path / "page.html").read_text()
    assert "a/version_1: no round is completed" in text
    (tmp_path / "file").write_text("")
    with pytest.raises(FederationError, match="could not be written"):
        report(folder(), tmp_path / "file" / "report.html")


def test_privacy_and_backdoors_are_key_figures(folder):
    def figures(rounds, name="a"):
        return dict(about_run(read_run(folder(name, rounds__csv=rounds))).figures)

    rounds = "round,clients,epsilon,delta,backdoor_acc\n1,2,1.5,0.001,0.2\n2,2,2.5,0.001,0.25\n"
    found = figures(rounds)
    assert found["client-level epsilon with delta 0.001"] == "2.5"
    assert found["success of the backdoor"] == "25 %"
    found = figures("round,clients,epsilon,delta\n1,2,inf,0.001\n", "b")
    assert found["client-level epsilon with delta 0.001"] == "no noise, no privacy"
    assert "epsilon" not in str(figures("round,clients,epsilon\n1,2,3\n", "c"))  # of a module


@pytest.fixture
def panels(monkeypatch):
    """The lines of each picture and the labels of their horizontal axes, which are not drawn."""
    seen = []

    def picture(name, caption, drawn, groups, across=None):
        seen.append((drawn, across))
        return Picture(name, caption)

    monkeypatch.setattr("lightning_fl.report.curves.picture", picture)
    return seen


def labels(drawn):
    return {panel: [line.label for line in shown] for panel, shown in drawn.items()}


def test_one_run_has_its_columns_in_one_panel_and_groups_have_a_panel_per_column(folder, panels):
    rounds = (
        "round,clients,bytes_up,bytes_down,virtual_time,val_acc\n1,2,2e6,1e6,5,0.5\n2,2,2e6,0,9,1\n"
    )
    run = with_derived(read_run(folder(rounds__csv=rounds)), "val_acc", "max")
    cost([Group("a", [run])])
    cost([Group("a", [run]), Group("b", [run])])
    (alone, across), (several, _) = panels
    assert labels(alone) == {
        "MB so far": ["MB up", "MB up and down"],
        "virtual time (s)": ["virtual time (s)"],
        "val_acc, by traffic": ["val_acc, by traffic"],
        "val_acc, by virtual time": ["val_acc, by virtual time"],
    }
    assert list(across.values()) == ["MB up and down", "virtual time (s)"]
    assert [list(line.y) for line in alone["MB so far"]] == [[2, 4], [3, 5]]
    (by_traffic,) = alone["val_acc, by traffic"]
    assert (list(by_traffic.x), list(by_traffic.y)) == ([3, 5], [0.5, 1])
    assert labels(several)["MB up and down"] == ["a", "b"]


def test_drops_for_other_causes_are_counted(folder):
    rounds = "round,clients,dropped,late,low_battery\n1,9,3,1,2\n"
    section = participation(read_run(folder(rounds__csv=rounds)))
    assert section.text[0].startswith("Dropped updates by cause: too late 1, other causes 2.")


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["backdoor_acc", "train_acc", "val_loss"], "val_loss"),
        (["train_loss", "train_acc", "backdoor_acc"], "train_acc"),
        (["train_acc", "val_f1_acc", "val_acc"], "val_acc"),
        (["train_acc", "val_f1_acc"], "val_f1_acc"),
        (["train_loss", "val_mse_loss", "backdoor_acc"], "val_mse_loss"),
        (["backdoor_acc"], None),
    ],
)
def test_the_main_metric_is_of_the_validation_and_never_of_an_attack(columns, name):
    assert headline([Run("a", [dict.fromkeys(["round", *columns], 1.0)])])[0] == name


def test_groups_are_compared_at_equal_virtual_time_if_all_have_a_clock(folder, panels):
    def timed(name, *times):
        lines = [f"{i},2,{t},{0.1 * i:.1f}" for i, t in enumerate(times, 1)]
        table = "\n".join(["round,clients,virtual_time,val_acc", *lines]) + "\n"
        run = read_run(folder(f"{name}/version_0", rounds__csv=table))
        return Group(name, [with_derived(run, "val_acc", "max")])

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
    cost([waits, untimed])
    assert "val_acc, by virtual time" not in panels[0][0]


def test_the_values_under_the_pointer_are_those_of_the_table(folder):
    path = folder(accuracies=(0.25, "nan", 0.123456789, 1.0))
    found = charts(page_of(report(path)))
    accuracy = found["accuracy by round"]
    assert accuracy["lines"][0]["x"] == [1, 2, 3, 4]
    assert [line["n"] for line in accuracy["lines"]] == ["val_acc"]
    assert accuracy["lines"][0]["y"] == [0.25, None, 0.123457, 1]
    line = {"n": "non-finite values", "c": 4, "x": [1, 2, 3, 4], "y": [0, 0, 1, 0]}
    assert found["updates dropped by round"]["lines"] == [line]
    (samples,) = found["samples by clients in ascending order"]["lines"]
    assert (samples["y"], samples["names"]) == ([2, 3], ["client 1", "client 0"])
    traffic = found["val_acc, by traffic by MB up and down"]
    assert traffic["lines"][0]["x"] == [4, 8, 11, 15]
    classes = found["class by client"]
    assert classes["columns"] == ["client 0", "client 1"]
    assert classes["layers"] == [{"n": "samples", "v": [[3, 0], [0, 2]]}]
    left, top, right, bottom = accuracy["box"]
    assert 0 < left < right < 1
    assert 0 < top < bottom < 1


def write_by_round(path, *lines, **options):
    (path / "client_losses.csv.gz").write_bytes(by_round(*lines, **options))
    return path


def test_the_page_shows_who_participated_when(folder):
    path = write_by_round(folder(), "1,11", "2,10", "3,12", "4,31")
    page = page_of(report(path))
    chart = charts(page)["client by round"]
    assert chart["rows"] == ["client 0", "client 1"]
    assert chart["columns"] == ["round 1", "round 2", "round 3", "round 4"]
    names = ["not sampled", "arrived", "dropped out", "crashed", "too late", "non-finite values"]
    names += ["low battery"]
    assert chart["layers"] == [{"n": "", "v": [[1, 1, 1, 6], [1, 0, 2, 1]], "names": names}]
    section = clients(read_run(path))
    assert section.tables[1].head == [
        *("client", "training samples", "rounds", "dropped", "dropped out", "low battery"),
        "server",
    ]
    assert section.tables[1].rows[0] == ["1", "2", "3", "1", "1", "0", "0.5"]


def test_a_client_whose_loss_does_not_fall_is_named_and_every_loss_has_a_curve(folder):
    losses = [[2.0, 1.0, 0.5, 0.25], [0.5, 1.0, "nan", 4.0], [0.001, 0.001, 0.0009, 0.0005]]
    names = "client,train_samples,name\n0,3,north\n1,2,south\n2,2,east\n"
    files = {"participation__csv": names}
    files["client_losses__csv__gz"] = by_round(*(f"{i},111" for i in range(1, 5)), losses=losses)
    page = about_run(read_run(folder(**files)))
    (section,) = (s for s in page.sections if s.title == "Clients")
    assert section.text[-1].startswith("The loss of 1 client did not fall (")
    assert "first): client 1 (south). See" in section.text[-1]
    (table,) = section.tables
    assert table.head[:2] == ["client", "loss"]
    assert table.head[-2:] == ["first loss", "last loss"]
    rows = {row[0]: row for row in table.rows}
    assert rows["1 (south)"][-2:] == ["0.5", "4"]
    # Losses from 0.0005 to 4 are more than three decades, so the scale is logarithmic: 0.25 is at
    # log(500) / log(8000) = 0.69 of the height of 18.
    path = rows["0 (north)"][1].path
    assert path.startswith("M0 ")
    assert path.endswith("L100 8h0")
    assert rows["1 (south)"][1].path.count("M") == 2  # a gap where the loss is not finite
    assert rows["1 (south)"][1].title == "0.5 to 4"
    assert html(page).count('<svg class="curve"') == 3


def test_three_seeds_are_lines_and_five_seeds_are_a_band(folder):
    def line(count):
        runs = [read_run(folder(f"{count}-{i}/v", (0.1 * i, 0.2 * i))) for i in range(count)]
        panels = progress([Group("a", runs), Group("b", runs[:1])]).pictures[0].panels
        return panels[0].lines[0], panels[0].values()["lines"]

    few, (shown, alone) = line(3)
    assert few.seeds == [(0.0, 0.0), (0.1, 0.2), (0.2, 0.4)]
    assert list(few.y) == pytest.approx([0.1, 0.2])
    assert shown["s"] == [[0, 0], [0.1, 0.2], [0.2, 0.4]]
    assert not few.band
    assert "s" not in alone
    many, (shown, _) = line(5)
    assert not many.seeds
    assert shown["b"] == pytest.approx([2.776445 * 0.1 * (0.5**0.5) * s for s in (1, 2)], abs=1e-5)


def test_a_large_federation_fits_into_two_megabytes(folder, manifest):
    random, n, rounds = np.random.default_rng(0), 2_000, 800
    record = ClientHistory()
    sampled = [random.choice(n, 100, replace=False) for _ in range(20)]
    for i in range(rounds):
        clients = sampled[i % 20].tolist()
        losses = dict(zip(clients, random.random(100).tolist(), strict=True))
        record.add(i + 1, clients, dict.fromkeys(clients[: i % 50], "late"), losses)
    columns = "round,clients,dropped,late,lr,bytes_up,bytes_down,virtual_time,train_loss,val_acc"
    values = random.random((rounds, 2))
    table = [
        f"{i},100,{i % 50},{i % 50},{1 / i},{i * 1e6},3e6,{i},{loss},{acc}"
        for i, (loss, acc) in enumerate(values.tolist(), 1)
    ]
    counts = random.integers(0, 20, (n, 10)).tolist()
    sizes, by_class = list(map(sum, counts)), [dict(enumerate(row)) for row in counts]
    lines = [f"{i},{30 + i % 100},{i % 300},{i % 7},{random.random()}" for i in range(n)]
    files = {
        "rounds__csv": "\n".join([columns, *table]),
        "partition__json": manifest(sizes, by_class),
        "participation__csv": "\n".join(["client,train_samples,rounds,dropped,train_acc", *lines]),
    }
    path = folder(**files)
    (path / "client_losses.csv.gz").write_bytes(record.csv_gz())
    page = page_of(report(path))
    assert (path / "report.html").stat().st_size < 2_000_000
    assert "The 200 worst and the 200 best of 2,000 clients;" in page.text
    assert "cells of several clients and rounds (opacity: share sampled)" in page.text
    assert "Not every point is drawn" in page.text
    chart = charts(page)["client by round"]
    assert chart["rows"][0] == "clients 0 to 19"
    assert chart["columns"][-1] == "rounds 797 to 800"
    share = chart["layers"][0]
    assert share["n"] == "% sampled"
    codes = np.zeros((rounds, n), bool)
    for i in range(rounds):
        codes[i, sampled[i % 20]] = True
    assert share["v"][3][7] == round(100 * codes[28:32, 60:80].mean(), 1)


@pytest.mark.parametrize(
    ("machine", "changes", "words"),
    [
        ({"threads": 3}, {}, "--seed_everything=1 --threads=3"),
        ({"threads": 3}, {"threads": 1}, "--seed_everything=1"),
        (
            {"processes": 2, "device": "CPU", "threads": 1},
            {"trainer__devices": "auto", "trainer__accelerator": "auto"},
            "--seed_everything=1 --threads=1 --trainer.devices=2 --trainer.accelerator=cpu",
        ),
        ({}, {"data__init_args__seed": 7}, "--seed_everything=1 --data.init_args.seed=7"),
        ({}, {"trainer__max_epochs": 2}, "--seed_everything=1 --trainer.max_epochs=4"),
    ],
)
def test_the_command_that_repeats_a_run_has_what_the_machine_chose(
    folder, config, machine, changes, words
):
    told = {"machine": machine, "rounds": 4}
    page = about_run(read_run(folder(environment=told, config__yaml=config(**changes))))
    assert page.sections[-1].verbatim[0].content == f"lightning-fl fit --config config.yaml {words}"


def test_runs_are_paired_by_their_seeds(folder, config):
    finals = {0.1: {1: 0.1, 2: 0.2, 3: 0.3}, 1.0: {3: 0.6, 2: 0.3, 1: 0.3, 9: 0.9}}
    runs = []
    for share, by_seed in finals.items():
        for seed, last in by_seed.items():
            text = config(seed_everything=seed, federation__client_fraction=share)
            path = folder(f"{share}-{seed}/v", (0.0, last), {"seed": seed}, config__yaml=text)
            runs.append(read_run(path))
    page = about_groups(group(runs))
    (section,) = (section for section in page.sections if section.title == "Paired seeds")
    # Differences 0.2, 0.1, 0.3: mean 0.2, s = 0.1, half width 4.3027 * 0.1 / sqrt(3) = 0.2484.
    assert section.tables[0].rows == [
        ["client_fraction=1.0", "1: +0.2, 2: +0.1, 3: +0.3", "+0.2", "-0.04841 to +0.4484"]
    ]
    assert "If it contains 0" in section.text[0]


def test_best_group_has_no_alarm_and_is_separated_by_seeds_or_not(seeds):
    def compared(**folders):
        groups = [Group(name, list(map(read_run, each))) for name, each in folders.items()]
        return about_groups(groups).lead[-1].replace(NBSP, " ")

    best, low = "high has the best final val_acc", seeds("a", 0.1, 0.2, 0.3)
    near, far = seeds("b", 0.3, 0.2, 0.6), seeds("c", 0.5, 0.6, 0.71)
    # Differences 0.2, 0, 0.3: half width 0.38.
    not_separated = f"{best}, 0.37 ± 0.21. The seeds do not separate it from low."
    assert compared(low=low, high=near) == not_separated
    assert compared(low=low, high=far) == f"{best}, 0.60 ± 0.11."
    # The update of a client was dropped in half of its rounds.
    lost = seeds("d", 0.9, 0.9, 0.9, client_losses__csv__gz=by_round("1,11", "2,12"))
    left_out = f"{best}, 0.60 ± 0.11. Runs with an alarm are left out."
    assert compared(low=low, high=far, lost=lost) == left_out


def test_values_that_some_seeds_lack_are_marked(folder, config):
    runs = []
    for seed in (1, 2, 3):
        files = {"config__yaml": config(seed_everything=seed)}
        if seed > 1:
            files["test__json"] = '{"metrics": {"test_acc": 0.5}, "checkpoint": "last.ckpt"}'
        runs.append(read_run(folder(f"{seed}/v", (0.0, 0.9), **files)))
    page = about_groups(group(runs))
    (section,) = (section for section in page.sections if section.title == "Groups")
    table = section.tables[0]
    cells = dict(zip(table.head, table.rows[0], strict=True))
    assert cells["test_acc"] == "0.5 (2 of 3 seeds)"
    assert cells["final val_acc"] == "0.9"
    assert r"1 & $0.9$ & $0.5$ (2 of 3) \\" in section.verbatim[0].content
    assert "% 1/v dropped clients in more than" in section.verbatim[0].content  # an alarm


def rows_of(path):
    """The cells of a table in LaTeX."""
    lines = [line for line in path.read_text().splitlines() if line.endswith(r" \\")]
    return [line.removesuffix(r" \\").split(" & ") for line in lines]


@pytest.mark.usefixtures("undrawn")
def test_the_best_mean_of_a_table_in_latex_is_bold_if_the_seeds_separate_it(seeds, tmp_path):
    near = {"low": seeds("low", 0.1, 0.2, 0.3), "high": seeds("high", 0.3, 0.2, 0.6)}
    far = {"a": seeds("a", 0.1, 0.2, 0.31), "b": seeds("b", 0.5, 0.6, 0.71)}
    path = tmp_path / "table.tex"
    report(near, tmp_path / "page.html", latex=path)
    assert rows_of(path)[1:] == [["low", r"$0.20 \pm 0.10$"], ["high", r"$0.37 \pm 0.21$"]]
    columns = ["final val_acc", "dropped", "bytes_up", "val_acc"]
    report(far, tmp_path / "page.html", latex=path, columns=columns, percent=True)
    head, *rows = rows_of(path)
    assert head == ["group", r"final val\_acc (\%)", "dropped", r"bytes\_up", r"val\_acc (\%)"]
    bold = r"$\mathbf{60} \pm 11$"
    assert rows[0] == ["a", r"$20 \pm 11$", "$0$", r"$2{,}000{,}000$", r"$20 \pm 11$"]
    assert rows[1] == ["b", bold, "$0$", r"$2{,}000{,}000$", bold]
    text = path.read_text()
    assert text.startswith(r"% Needs \usepackage{booktabs}.")
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")
    with pytest.raises(
        FederationError, match=r"each of columns must be final val_acc, .*, got 'f1'"
    ):
        report(far, tmp_path / "page.html", latex=path, columns=["f1"])
    with pytest.raises(FederationError, match="columns and percent are for the table in LaTeX"):
        report(far, tmp_path / "page.html", percent=True)


def test_cells_that_a_spreadsheet_would_compute_are_text(seeds):
    runs = [read_run(path) for path in seeds("a", 0.5)]
    page = about_groups([Group("=1+1", runs), Group("b", runs)])
    (section,) = (section for section in page.sections if section.title == "Runs")
    assert section.verbatim[0].content.splitlines()[1].startswith("a/version_0,'=1+1,0,2,0.5,")


@pytest.mark.parametrize(
    ("name", "at", "is_warned"), [("last", 1, True), ("best", 1, False), ("last", 4, False)]
)
def test_a_test_before_the_run_was_resumed_says_so(folder, config, name, at, is_warned):
    test = {"metrics": {"test_acc": 0.5}, "checkpoint": f"{name}.ckpt", "round": at}
    text = config(checkpoint={"filename": "last"})
    page = about_run(read_run(folder(test__json=json.dumps(test), config__yaml=text)))
    assert (f"test_acc of {name}.ckpt", "0.5") in page.figures
    assert any("was tested after round 1 of 4" in each for each in page.warnings) is is_warned
