import pytest


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Work in a folder of its own: FromManifest finds split.json there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("partition"))
        yield
