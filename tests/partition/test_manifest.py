"""Manifests: what they say, how they come back, and every way in which a file can be wrong."""

import hashlib
import json
import struct
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.partition import ByLabel, Dirichlet, FromManifest, Manifest, checksum
from lightning_fl.types import FederationError
from numbered import lists, rng

data = st.lists(st.integers(-3, 3), min_size=8, max_size=40).map(torch.tensor)
LABELS = torch.tensor([3, 3, 8, 8, 8, 3])


def manifest(labels=LABELS, rule=ByLabel(), clients=2):  # noqa: B008  # rules do not change
    return Manifest.of(rule, rule(labels, clients, rng(5)), labels, seed=5)


def test_the_checksum_is_sha256_of_sizes_and_indices():
    numbers = struct.pack("<5q", 2, 1, 0, 2, 1)
    parts = [torch.tensor([0, 2]), torch.tensor([1])]
    assert checksum(parts) == hashlib.sha256(numbers).hexdigest()
    assert checksum(parts[::-1]) != checksum(parts)


def test_a_manifest_says_what_was_done():
    found = manifest()
    assert (found.rule, found.parameters) == ("ByLabel", {"classes_per_client": 1})
    assert (found.seed, found.num_samples) == (5, 6)
    assert found.clients == [[0, 1, 5], [2, 3, 4]]
    assert found.class_counts == [{3: 3}, {8: 3}]
    assert found.checksum == checksum([torch.tensor(c) for c in found.clients])


@settings(max_examples=20, deadline=None)
@given(labels=data, num_clients=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_a_manifest_comes_back_as_it_was_written(labels, num_clients, seed):
    rule = Dirichlet()
    parts = rule(labels, num_clients, rng(seed))
    written = Manifest.of(rule, parts, labels, seed)
    written.write("there_and_back.json")
    assert Manifest.read("there_and_back.json") == written
    again = FromManifest("there_and_back.json")(labels, num_clients, rng())
    assert lists(again) == lists(parts)


def test_the_path_of_a_manifest_is_a_parameter_like_any_other(tmp_path):
    manifest().write(tmp_path / "a.json")
    found = manifest(rule=FromManifest(tmp_path / "a.json"))
    found.write(tmp_path / "b.json")
    assert found.parameters == {"path": str(tmp_path / "a.json")}
    assert Manifest.read(tmp_path / "b.json") == found


def test_people_can_read_the_file(tmp_path):
    manifest(LABELS.flip(0), ByLabel(2)).write(tmp_path / "m.json")
    lines = (tmp_path / "m.json").read_text().splitlines()
    assert '  "parameters": {"classes_per_client": 2},' in lines
    assert '    {"3": 2, "8": 2},' in lines
    assert sum(line.startswith("    [") for line in lines) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format="lightning_fl partition 2"), r"format must be .*1'"),
        (lambda m: m.pop("format"), r"format must be "),
        (lambda m: m.pop("seed"), r"'seed'"),
        (lambda m: m.update(num_samples=5), r"gets sample 5, which is not in \[0, 4\]"),
        (lambda m: m.update(num_samples=10**30), r"RuntimeError|OverflowError"),
        (lambda m: m.update(clients=[]), r"there are no clients"),
        (lambda m: m["clients"].append([]), r"client 2 gets no sample"),
        (lambda m: m["clients"].append(7), r"'int' object is not iterable"),
        (lambda m: m["clients"][1].append(0), r"sample 0 is assigned to client 0 and to client 1"),
        (lambda m: m["clients"][1].append(-1), r"client 1 gets sample -1, which is not in"),
        (lambda m: m["clients"][1].append("x"), r"invalid literal for int"),
        (lambda m: m["clients"].reverse(), r"the indices were edited"),
        (lambda m: m["clients"][0].append(m["clients"][1].pop()), r"the indices were edited"),
        (lambda m: m["clients"][0].pop(), r"the indices were edited"),
        (lambda m: m.update(checksum="0" * 64), r"the indices were edited"),
        (lambda m: m.update(local_tests=[[0], [2]]), r"the indices were edited"),
        (lambda m: m.update(local_tests=["x"]), r"too many dimensions 'str'|invalid|TypeError"),
        (lambda m: m["class_counts"].pop(), r"class_counts has 1 entries for 2 clients"),
        (lambda m: m["class_counts"][0].update({"x": 3}), r"invalid literal for int"),
    ],
)
def test_a_changed_file_is_refused_by_name(tmp_path, change, words):
    path = tmp_path / "m.json"
    manifest().write(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(FederationError, match=words) as error:
        Manifest.read(path)
    assert str(path) in str(error.value)
    assert "create it again" in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FederationError, match=r"absent.json .*: .* No such file"):
        Manifest.read(tmp_path / "absent.json")
    with pytest.raises(FederationError, match=r"Is a directory"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b'{"format": NaN}', b"3"]
)
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / "m.json").write_bytes(text)
    with pytest.raises(FederationError, match=r"m.json \(restore it, or create it again\): "):
        Manifest.read(tmp_path / "m.json")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from([field.name for field in fields(Manifest)]),
    where=st.sampled_from([(), (0,), (0, 0), (1, -1), (0, "3")]),
    value=anything,
)
def test_a_file_with_one_wild_value_is_refused_or_harmless(name, where, value):
    rule, tests = ByLabel(), [torch.tensor([5]), torch.tensor([2, 4])]
    original = Manifest.of(
        rule, rule(LABELS, 2, rng(5)), LABELS, seed=5, local_tests=tests, unseen_clients=1
    )
    original.write("fuzz.json")
    with open("fuzz.json", encoding="utf-8") as file:
        content = json.load(file)
    spot, key = content, name
    for step in where:
        if not isinstance(spot[key], dict if isinstance(step, str) else list):
            break
        spot, key = spot[key], step
    spot[key] = value
    with open("fuzz.json", "w", encoding="utf-8") as file:
        json.dump(content, file)
    try:
        found = Manifest.read("fuzz.json")
    except FederationError:
        return
    assert (found.clients, found.checksum) == (original.clients, original.checksum)
    assert lists(FromManifest("fuzz.json").local_tests()) == original.local_tests


def test_manifest_of_another_number_of_samples_is_refused(tmp_path):
    manifest().write(tmp_path / "m.json")
    with pytest.raises(FederationError, match=r"for 6 samples that clients hold, but the run has"):
        FromManifest(tmp_path / "m.json")(LABELS.repeat(2), 2, rng())
