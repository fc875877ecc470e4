"""Which runs belong together, how groups are named, mean and spread by hand."""

import math
from dataclasses import replace

import pytest

from lightning_fl.functional.intervals import t_interval
from lightning_fl.partition import Manifest
from lightning_fl.report import Run, group
from lightning_fl.report.groups import Group, common_time, curve, value_at
from lightning_fl.report.run import values_of


def run(name="a/version_0", column=(), **config):
    rows = [{"round": float(i), "val_acc": value} for i, value in enumerate(column, 1)]
    return Run(name, rows, config=values_of({k.replace("__", "."): v for k, v in config.items()}))


def names(*runs):
    return [(each.name, len(each.runs)) for each in group(runs)]


def test_runs_that_differ_in_seeds_and_places_are_a_group():
    runs = [
        run(seed_everything=i, trainer__default_root_dir=f"r{i}", data__seed=i, ckpt_path=f"{i}")
        for i in range(3)
    ]
    assert names(*runs) == [("a", 3)]


def test_groups_are_named_by_what_differs():
    one, other = {"federation__client_fraction": 1.0}, {"federation__client_fraction": 0.1}
    assert names(run(**one), run(**other), run(**one, seed_everything=7)) == [
        ("client_fraction=1.0", 2),
        ("client_fraction=0.1", 1),
    ]


def test_a_group_is_named_by_what_sets_it_apart_from_most():
    base = {"federation__client_fraction": 1.0, "data__batch_size": 32}
    assert names(
        run(**base), run(**base | {"data__batch_size": 8}), run(**base | {"federation__lr": 2})
    ) == [("base", 1), ("batch_size=8", 1), ("lr=2", 1)]


def rule(name, **options):
    return {"federation": {"aggregator": {"class_path": f"x.{name}", "init_args": options}}}


def test_a_rule_is_named_without_its_options_where_that_is_enough():
    found = names(run(**rule("Krum", f=1)), run(**rule("FedProx", mu=2)))
    assert [name for name, _ in found] == ["aggregator=Krum", "aggregator=FedProx"]
    found = names(run(**rule("Krum", f=1)), run(**rule("Krum", f=2)))
    assert [name for name, _ in found] == ["f=1", "f=2"]


def test_null_is_the_rule_that_it_stands_for():
    assert names(run(federation={"aggregator": None}), run(**rule("FedAvg"))) == [("a", 2)]


def from_python(name, seed, **environment):
    known = {"seed": seed, "state": "finished", "machine": {"threads": seed}, **environment}
    return Run(name, [{"round": 1.0}], environment=known)


def test_runs_without_a_config_are_grouped_by_folder():
    runs = [
        from_python(f"{rule.lower()}/version_{i}", i, aggregator=rule)
        for rule in ("FedAvg", "Scaffold")
        for i in range(3)
    ]
    assert names(*runs) == [("fedavg", 3), ("scaffold", 3)]


def test_runs_of_a_folder_with_other_partitions_are_no_group():
    splits = [
        Manifest(rule, parameters, seed, 4, [[0, 1], [2, 3]], [], "")
        for rule, parameters in (("IID", {}), ("Dirichlet", {"alpha": 0.5}))
        for seed in range(3)
    ]
    runs = [
        replace(from_python(f"a/version_{i}", split.seed), partition=split)
        for i, split in enumerate(splits)
    ]
    assert [len(each.runs) for each in group(runs)] == [3, 3]


def test_runs_of_a_folder_with_other_rules_or_equal_seeds_are_no_group():
    other_rule = [from_python("a/version_0", 1, aggregator="FedAvg"), from_python("a/version_1", 2)]
    assert len(group(other_rule)) == 2
    equal_seeds = [from_python(f"a/version_{i}", i % 2) for i in range(4)]
    assert [len(each.runs) for each in group(equal_seeds)] == [1, 1, 1, 1]
    unknown_seeds = [Run(f"a/version_{i}", [{"round": 1.0}]) for i in range(2)]
    assert len(group(unknown_seeds)) == 2


def test_a_list_that_is_empty_elsewhere_is_named_by_its_entries():
    term = {"class_path": "x.Proximal", "init_args": {"mu": 0.1}}
    base, prox = run(model={"terms": []}), run(model={"terms": [term]})
    scaffold = run(model={"terms": []}, **rule("Scaffold", option="II"))
    assert names(base, prox, scaffold) == [
        ("base", 1),
        ("terms.0=Proximal", 1),
        ("aggregator=Scaffold", 1),
    ]


def test_names_that_would_be_too_long_are_folders():
    many = [{f"option_{i}": i * k for i in range(1, 20)} for k in (1, 2)]
    found = names(run("a/version_0", **many[0]), run("b/version_3", **many[1]))
    assert [name for name, _ in found] == ["a/version_0", "b/version_3"]
    found = names(run("a/version_0", x="y" * 70), run("b/version_3", x=1))
    assert [name for name, _ in found] == ["a/version_0", "x=1"]


def test_mean_and_spread_by_hand():
    """Of 0.2, 0.4, 0.9: mean 0.5, s² = (0.09 + 0.01 + 0.16) / 2 = 0.13, and t = 4.30265."""
    (each,) = group(
        [run(column=[0.1, v], seed_everything=i) for i, v in enumerate((0.2, 0.4, 0.9))]
    )
    (_, first), (at, values) = each.values("val_acc")
    assert first == [0.1] * 3
    assert at == 2
    mean, half = t_interval(values)
    assert mean == pytest.approx(0.5)
    assert half == pytest.approx(4.30265 * math.sqrt(0.13 / 3), rel=1e-5)


def test_a_band_goes_as_far_as_all_runs_went():
    (each,) = group([run(column=[0.1] * n, seed_everything=n) for n in (3, 1, 2)])
    assert [at for at, _ in each.values("val_acc")] == [1]


def test_means_over_rounds_are_those_of_rounds_that_all_runs_have():
    rows = [[0.1, math.nan, 0.3], [0.2, 0.4, 0.6]]
    runs = [
        Run("a", [{"round": i, "loss": y} for i, y in enumerate(r, 1) if not math.isnan(y)])
        for r in rows
    ]
    expected = [(1, [0.1, 0.2]), (3, [0.3, 0.6])]
    assert Group("a", runs).values("loss") == expected
    assert Group("a", runs[::-1]).values("loss") == [(x, y[::-1]) for x, y in expected]


def test_curves_over_virtual_time_meet_at_equal_times():
    """Rounds of two runs last differently long; the third has no clock."""
    columns = [[(2, 0.1), (4, 0.3), (9, 0.5)], [(3, 0.2), (8, 0.6)]]
    runs = [
        Run("a", [{"round": i, "virtual_time": t, "val_acc": v} for i, (t, v) in enumerate(c, 1)])
        for c in columns
    ]
    # At 2 the second run has no value yet; at 9 it has ended.
    assert Group("a", runs).values("val_acc", "virtual_time") == [(4, [0.3, 0.2])]
    alone = Group("a", runs[:1]).values("val_acc", "virtual_time")
    assert alone == [(x, [y]) for x, y in columns[0]]
    assert common_time(runs) == 8
    assert [value_at(curve(each, "val_acc", "virtual_time"), 8) for each in runs] == [0.3, 0.6]
    assert common_time([*runs, run(column=[0.5])]) is None
