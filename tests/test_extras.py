"""The package without the packages of its extras."""

import sys

import pytest
import torch

import try_release
from child import python
from lightning_fl import FederationError, callbacks, datamodules, partition
from lightning_fl.extras import imported

#: Names that come with the extra ``all``; Pillow comes with torchvision and matplotlib.
ALL = ("PIL", "matplotlib", "sklearn", "torchaudio", "torchvision")
#: A process in which the packages are missing, also for packages that ask for their versions.
WITHOUT = f"""
import sys
from importlib.metadata import Distribution, PackageNotFoundError

missing, found = {{*{ALL}, "pillow", "scikit-learn"}}, Distribution.from_name

def from_name(name):
    if name in missing:
        raise PackageNotFoundError(name)
    return found(name)

Distribution.from_name = from_name
sys.modules |= dict.fromkeys(missing)
"""
EVERY_NAME = """
import lightning_fl
for name in (*lightning_fl.__all__, *lightning_fl._PACKAGES):
    getattr(lightning_fl, name)
"""
COMMAND = """
from lightning_fl.cli import main
main(["fit", "--config", "digits.yaml"])
"""


def test_a_module_of_ones_own_trains_without_the_extras(tmp_path):
    code = try_release.own_module()
    code = code.replace("from sklearn.datasets import load_digits\n", "")
    load = "(torch.as_tensor(a) for a in load_digits(return_X_y=True))"
    assert load in code
    code = code.replace(load, "16 * torch.rand(400, 64), torch.arange(400) % 10")
    assert not any(name in code for name in ALL)
    done = python("-c", WITHOUT + EVERY_NAME + code, cwd=tmp_path)
    assert 0 <= float(done.stdout.splitlines()[-1]) <= 1


def test_the_command_line_names_its_extra_in_one_line(tmp_path):
    done = python("-c", WITHOUT + COMMAND, cwd=tmp_path, expect=2)
    assert done.stderr == (
        "lightning-fl: error: lightning_fl.report requires the package matplotlib, which is not"
        ' installed: pip install "lightning_fl[report]"\n'
    )


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("matplotlib", "report", callbacks.RunReport),
        ("matplotlib", "report", lambda: partition.plot([torch.arange(2)], torch.arange(2))),
        ("sklearn.datasets", "sklearn", lambda: datamodules.Digits().setup("fit")),
        ("sklearn.datasets", "sklearn", lambda: datamodules.Newsgroups().setup("fit")),
        ("torchvision.datasets", "vision", lambda: datamodules.MNIST().setup("fit")),
        ("torchvision.datasets", "vision", lambda: datamodules.FashionMNIST().setup("fit")),
        ("torchvision.datasets", "vision", lambda: datamodules.CIFAR10().setup("fit")),
        ("torchaudio.transforms", "audio", datamodules.SpokenDigits),
        ("torchaudio.transforms", "audio", datamodules.SpeechCommands),
    ],
)
def test_what_needs_an_extra_says_how_to_install_it(module, extra, use, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    said = rf'requires the package {package}, which is not installed: pip install "lightning_fl\['
    with pytest.raises(FederationError, match=rf'^[\w.]+ {said}{extra}\]"$'):
        use()


def test_an_error_of_a_package_that_an_extra_needs_is_its_own(monkeypatch, tmp_path):
    (tmp_path / "needy.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        imported("needy", "It", "hf")
