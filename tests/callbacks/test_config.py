"""The configuration in the folder of a run."""

from types import SimpleNamespace

from lightning_fl.callbacks.config import RunConfig


def test_a_configuration_that_is_a_link_is_replaced_and_not_followed(tmp_path):
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("a: 1\n")
    folder.mkdir()
    (folder / "config.yaml").symlink_to(target)
    RunConfig("a: 2\n", folder).on_train_start(SimpleNamespace(is_global_zero=True), None)
    assert target.read_text() == "a: 1\n"
    assert not (folder / "config.yaml").is_symlink()
    assert (folder / "config.yaml").read_text() == "a: 2\n"
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
