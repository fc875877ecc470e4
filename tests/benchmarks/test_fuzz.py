"""The script counts outcomes, keeps what should not have happened, and survives it."""

import json
import os
from types import SimpleNamespace

import pytest


@pytest.fixture
def fuzz(script, monkeypatch):
    module = script("fuzz")
    monkeypatch.setattr(module, "find_spec", lambda name: None)  # atheris is slow to start

    def throw(target, inputs=(b"a", b"b", b"a", b"b")):
        stub = SimpleNamespace(TARGETS={"trace": target}, noise=lambda seed: inputs)
        monkeypatch.setattr(module, "_hostile", lambda follow: stub)

    module.throw = throw
    return module


def test_outcomes_are_counted(fuzz, tmp_path, capsys):
    fuzz.throw(lambda data: {b"a": "accepted", b"b": "no"}[data], [b"a", b"b"] * 10**6)
    given = ["--minutes", "0.002", "--target", "trace", "--out", str(tmp_path)]
    assert fuzz.main(given) == 0
    report = json.loads((tmp_path / "trace.json").read_text())
    assert report["runs"] == sum(report["outcomes"].values())
    assert report["outcomes"].keys() == {"accepted", "no"}
    assert "refused in 1 ways" in capsys.readouterr().out


def test_what_is_no_clear_error_is_kept_once_and_runs_again(fuzz, tmp_path, capsys):
    fuzz.throw(lambda data: str(1 // (data != b"b")), [b"a", b"b"] * 10**6)
    given = ["--minutes", "0.002", "--target", "trace", "--out", str(tmp_path)]
    assert fuzz.main(given) == 1
    (found,) = tmp_path.glob("trace-*")
    assert found.read_bytes() == b"b"
    assert "1 findings" in (out := capsys.readouterr().out)
    assert "ZeroDivisionError" in out
    with pytest.raises(ZeroDivisionError):
        fuzz.main(["--replay", str(found)])


def test_what_ends_the_process_is_kept(fuzz, tmp_path, capsys):
    fuzz.throw(lambda data: "no" if data == b"a" else os._exit(7))
    assert fuzz.main(["--target", "trace", "--out", str(tmp_path)]) == 1
    (found,) = tmp_path.glob("trace-*")
    assert found.read_bytes() == b"b"
    assert "the process ended with status" in capsys.readouterr().out
