"""Manifests and traces from strangers: data, never code; refused in clear words.

Checkpoints are tested in ``tests/federation/test_checkpoints.py``.
"""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl import files
from lightning_fl.partition import IID
from lightning_fl.partition.manifest import Manifest
from lightning_fl.samplers.durations import read_durations
from lightning_fl.types import FederationError

# --- manifests and traces -------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    path, labels = tmp_path / "split.json", torch.arange(6) % 2
    Manifest.of(IID(), [torch.arange(3), torch.arange(3, 6)], labels, seed=0).write(path)
    return path


def test_large_files_are_not_read(written, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", written.stat().st_size)
    Manifest.read(written)
    written.write_text(written.read_text() + " ")
    for read in (Manifest.read, read_durations):
        for path in (written, "/dev/zero"):
            with pytest.raises(FederationError, match=r"more than the \d+ bytes that .*MOST_BYTES"):
                read(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("\u0663,1", r"line 2 .* must contain a client"),
        ("1" * 10**6 + ",1", "field limit|line 2"),
        ("1,1" + "," * 10**6, "line 2"),
        ("1,1\x00", "line 2"),
        ('1,"1', "unexpected end of data"),
        ("1,\x1b[2J", "line 2"),
        ("-1,1", "line 2"),
        ("1.0,1", "line 2"),
    ],
)
def test_tricks_in_a_trace_are_refused(tmp_path, line, words):
    (tmp_path / "trace.csv").write_text("client,seconds\n" + line, encoding="utf-8")
    with pytest.raises(FederationError, match=words) as error:
        read_durations(tmp_path / "trace.csv")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


def test_a_trace_from_a_spreadsheet_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes("\ufeffclient,seconds\r\n1,2\r\n".encode())
    assert read_durations(path) == {1: [2.0]}


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.binary(max_size=40)
    | st.tuples(st.integers(-1, 3), st.floats() | st.sampled_from(["x", "é"])).map(
        lambda line: ",".join(map(str, line)).encode()
    ),
    st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\x00"]),
)
def test_no_trace_is_more_than_refused(tmp_path_factory, content, end):
    path = tmp_path_factory.getbasetemp() / "trace.csv"
    path.write_bytes(b"client,seconds" + end + b"1,0.5" + end + content)
    found = {}
    with suppress(FederationError):
        found = read_durations(path)
    for client, seconds in found.items():
        assert client >= 0
        assert all(0 < each < float("inf") for each in seconds)
