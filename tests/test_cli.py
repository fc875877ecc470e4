import csv
import inspect
import json
import os
import shlex
import shutil
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

import extras
import quick_cli
from forks import Started
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.cli.federated import RUN_FOLDER, FederatedCLI, create_folder
from lightning_fl.partition import Manifest
from lightning_fl.report.run import read_run, version_folders
from lightning_fl.strategies import ClientParallelStrategy
from lightning_fl.types import FederationError

ROOT = Path(__file__).parent.parent
DIGITS = str(ROOT / "configs" / "digits.yaml")
#: Where the first run leaves its files, in the folder of a test.
RUN = Path("runs", "digits", "version_0")
pytestmark = pytest.mark.usefixtures("quick_pictures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder in which ``FIT`` was called, and a copy of what it has left."""
    place, copied = (tmp_path_factory.mktemp("fitted") / name for name in ("here", "copied"))
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch, quick_cli.no_pictures():
        patch.chdir(place)
        quick_cli.call(*FIT)
        os.environ.pop("PL_GLOBAL_SEED", None)
    shutil.copytree(place, copied)
    return place, copied


@pytest.fixture
def fitted(cli, finished, monkeypatch):
    """A finished run, as ``FIT`` leaves it in the folder where the test is; returns its folder.

    Always the same folder: a run that has moved is resumed with a warning.
    """
    place, copied = finished
    shutil.rmtree(place)
    shutil.copytree(copied, place)
    monkeypatch.chdir(place)
    return place / RUN


def rounds(folder):
    return list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))


def config_of(folder, name="config.yaml"):
    return yaml.safe_load((folder / name).read_text())


def files(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


#: The options that the other commands compare with a run's are the config's own.
SHIPPED = (
    *("fit", "--config", DIGITS),
    *("--trainer.max_epochs=2", "--trainer.enable_model_summary=false"),
)
FIT = (*SHIPPED, "--federation.policy.init_args.num_steps=2")


def test_a_fit_leaves_a_table_a_checkpoint_and_pictures(cli, pictures):
    out = cli(*FIT)
    assert f"Written to {RUN}" in out
    assert "round 2/2 · val_acc" in out
    for name in ("rounds.csv", "last.ckpt", "rounds.png", "partition.png", "partition.json"):
        assert (RUN / name).stat().st_size > 0
    assert (RUN / "csv" / "version_0" / "metrics.csv").is_file()
    assert list(RUN.glob("events.out.tfevents.*"))
    assert config_of(RUN)["federation"]["client_fraction"] is None
    rows = rounds(RUN)
    assert [row["round"] for row in rows] == ["1", "2"]
    assert {"val_acc", "val_loss", "train_loss", "lr", "clients"} <= rows[0].keys()


def test_a_report_is_made_of_runs(cli, fitted):
    assert cli("report", RUN) == f"Written to {RUN}/report.html\n"
    assert "own training samples" in (fitted / "report.html").read_text()
    out = cli("report", f"A={RUN}", "--title=Both", "--output=both.html")
    assert out == "Written to both.html\n"
    assert "<title>Both</title>" in Path("both.html").read_text()
    message = "lightning-fl: error: nowhere has no completed round: pass the folder of a run"
    assert cli("report", "nowhere", expect=2).startswith(message)


def test_a_report_of_the_users_own_is_the_only_one(cli):
    cli(*FIT, "--trainer.callbacks+=RunReport", "--trainer.callbacks.client_samples=0")
    table = RUN / "participation.csv"
    assert table.read_text().splitlines()[0] == "client,train_samples,rounds,dropped"


def test_last_goes_on_from_the_newest_checkpoint_of_the_newest_folder(cli, fitted):
    cli(*FIT, "--trainer.default_root_dir=whole", "--trainer.max_epochs=4")
    (fitted / "last.ckpt").rename(fitted / "hpc_ckpt_1.ckpt")  # as Lightning's handler of SLURM
    (fitted / "last.ckpt").write_bytes(b"older")
    os.utime(fitted / "last.ckpt", (1, 1))
    (fitted / "config.yaml").write_bytes(b"\xff\xfe\x00")  # damaged, which is no obstacle
    out = cli(*FIT, "--trainer.max_epochs=4", "--ckpt_path=last")
    assert f"Resuming from {RUN}/hpc_ckpt_1.ckpt" in out
    whole = Path("whole", "version_0")
    assert (whole / "rounds.csv").read_text() == (fitted / "rounds.csv").read_text()
    a, b = (torch.load(p / "last.ckpt", weights_only=True)["state_dict"] for p in (whole, fitted))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert [p.name for p in fitted.parent.iterdir()] == ["version_0"]
    assert (fitted / "config_resumed_1.yaml").is_file()
    # Figures that were logged before are still there.
    assert len(list(fitted.glob("csv/version_*/metrics.csv"))) == 2


def test_a_finished_run_says_that_there_is_nothing_to_train(cli, fitted):
    before = (fitted / "rounds.csv").read_text()
    (fitted / "rounds.csv").unlink()  # as if it was killed between checkpoint and table
    out = cli(*FIT, f"--ckpt_path={fitted / 'last.ckpt'}")
    assert "Nothing to train: the checkpoint is of round 2; increase --trainer.max_epochs" in out
    assert (fitted / "rounds.csv").read_text() == before


def test_last_without_a_checkpoint_is_a_new_run_which_has_the_same_figures(cli, fitted):
    with pytest.warns(UserWarning, match=r"no checkpoint in new/version_0: starting a new run"):
        cli(*FIT, "--ckpt_path=last", "--trainer.default_root_dir=new", "--trainer.max_epochs=1")
    (fitted / "last.ckpt").rename(fitted / "other.ckpt")
    before = (fitted / "rounds.csv").read_text()
    with pytest.warns(UserWarning, match=r"no checkpoint in \S+/version_0: starting a new run"):
        out = cli(*FIT, "--ckpt_path=last")
    assert "Written to runs/digits/version_1" in out
    for run in ("version_0", "version_1"):
        assert (fitted.parent / run / "rounds.csv").read_text() == before
    nowhere = ("--config", DIGITS, "--trainer.default_root_dir=nowhere")
    assert "run fit first" in cli("test", *nowhere, expect=2)


def test_fits_that_start_at_once_get_a_folder_each_and_processes_of_a_fit_one(
    tmp_path, monkeypatch
):
    for name in ("LOCAL_RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    together = threading.Barrier(8)

    def start(_):
        together.wait()
        return create_folder(tmp_path / "runs")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(start, range(8)))
    assert sorted(found) == [(tmp_path / "runs" / f"version_{i}", True) for i in range(8)]
    last = Path(os.environ[f"{RUN_FOLDER}_{os.getpid()}"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    with monkeypatch.context() as child:  # as Lightning starts the other processes
        child.setattr(os, "getppid", os.getpid)
        assert create_folder(tmp_path / "runs") == (last, False)
    # torchrun starts all processes, even from one that has fitted before.
    assert create_folder(tmp_path / "runs") == (tmp_path / "runs" / "version_8", False)
    assert not (tmp_path / "runs" / "version_8").exists()


@pytest.mark.filterwarnings("ignore:(dropped|round|the global model)")
def test_a_fit_without_a_usable_update_has_an_exit_code(cli):
    lost = ("--trainer.callbacks+=ClientFaults", "--trainer.callbacks.dropout=1.0")
    out = cli(*FIT, *lost, expect=3)
    assert f"Written to {RUN}\n" in out
    assert out.endswith(
        "lightning-fl: error: no update was usable in all 2 rounds, so the model has learned"
        " nothing: see the first warning for the cause\n"
    )
    assert len(rounds(RUN)) == 2


def test_the_other_commands_read_the_last_checkpoint(cli):
    cli(*SHIPPED, "--trainer.max_epochs=1")
    assert "test_acc" in cli("test", "--config", DIGITS)
    out = cli("validate", "--config", DIGITS, "--ckpt_path=null")  # not random parameters
    assert str(float(rounds(RUN)[-1]["val_acc"]))[:8] in out
    for folder in (RUN / "best", Path("elsewhere")):
        folder.mkdir()
        shutil.copy(RUN / "last.ckpt", folder / "x.ckpt")
    cli("test", "--config", DIGITS, "--ckpt_path", RUN / "best" / "x.ckpt")
    assert json.loads((RUN / "test.json").read_text())["checkpoint"] == "x.ckpt"
    config = (RUN / "config.yaml").read_bytes()
    out = cli("predict", "--config", DIGITS, "--ckpt_path=elsewhere/x.ckpt")
    assert (RUN / "config.yaml").read_bytes() == config
    assert "Written to elsewhere/predictions.pt" in out
    assert sum(map(len, torch.load("elsewhere/predictions.pt"))) == 359
    # They write nothing else.
    assert len(list(RUN.glob("csv/*"))) == 1


def test_a_test_leaves_the_config_of_the_fit_alone(cli):
    cli(*SHIPPED, "--federation.aggregator=CoordinateMedian", "--trainer.max_epochs=1")
    before = (RUN / "config.yaml").read_bytes()
    assert "CoordinateMedian" in before.decode()
    with pytest.warns(UserWarning, match="options of the test differ from the fit: data"):
        out = cli("test", "--config", DIGITS, "--data.init_args.batch_size=16")
    assert (RUN / "config.yaml").read_bytes() == before
    found = json.loads((RUN / "test.json").read_text())
    assert str(found["metrics"]["test_acc"])[:8] in out
    assert (found["checkpoint"], found["round"]) == ("last.ckpt", 1)
    assert found["differing options"] == {
        "data.batch_size": [32, 16],
        "federation.aggregator": ["CoordinateMedian", None],
    }
    cli("report", RUN)
    page = (RUN / "report.html").read_text()
    assert "test_acc of last.ckpt" in page
    assert "data.batch_size is 16, was 32; federation.aggregator is None" in page
    # The file serves fit and test: the same run in a new folder, and a test that does not differ.
    again, other = ("--config", RUN / "config.yaml"), RUN.with_name("version_1")
    assert f"Written to {other}" in cli("fit", *again)
    for name in ("rounds.csv", "config.yaml"):
        assert (other / name).read_bytes() == (RUN / name).read_bytes()
    (RUN / "test.json").unlink()
    cli("test", *again)  # the run of the config, not the newest
    found = json.loads((RUN / "test.json").read_text())
    assert (found["differing options"], len(found["metrics"])) == ({}, 2)
    out = cli("fit", *again, "--trainer.max_epochs=2", "--ckpt_path=last")
    assert f"Written to {RUN}" in out
    assert len(rounds(RUN)) == 2


def test_a_fit_from_a_checkpoint_of_no_run_is_a_new_run(cli, fitted):
    shutil.copy(fitted / "last.ckpt", "backup.ckpt")
    options = ("--ckpt_path=backup.ckpt", "--checkpoint.dirpath=kept", "--trainer.max_epochs=3")
    with pytest.warns(UserWarning, match="dirpath has changed"):
        assert "Written to runs/digits/version_1" in cli(*FIT, *options)
    other = fitted.with_name("version_1")
    assert (len(rounds(fitted)), len(rounds(other))) == (2, 3)
    cli("test", "--config", other / "config.yaml")
    assert json.loads((other / "test.json").read_text())["round"] == 3


def test_metrics_of_a_test_without_a_value_are_null(cli, fitted, monkeypatch):
    @wraps(Trainer.test)
    def test(*args, **kwargs):
        return [{"test_acc": 0.5, "test_f1": float("nan")}]

    monkeypatch.setattr(Trainer, "test", test)
    cli("test", "--config", fitted / "config.yaml")
    found = json.loads((fitted / "test.json").read_text(), parse_constant=pytest.fail)
    assert found["metrics"] == {"test_acc": 0.5, "test_f1": None}


def test_a_resumed_fit_leaves_the_config_of_the_first_alone(cli):
    cli(*FIT, "--trainer.max_epochs=1")
    before = (RUN / "config.yaml").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other options
        for min_clients, max_epochs in ((1, 1), (3, 2)):
            options = [f"--federation.min_clients={min_clients}", "--ckpt_path=last"]
            cli(*FIT, *options, f"--trainer.max_epochs={max_epochs}")
    assert (RUN / "config.yaml").read_bytes() == before
    assert config_of(RUN, "config_resumed_1.yaml")["federation"]["min_clients"] == 3
    assert not (RUN / "config_resumed_2.yaml").exists()
    (resumed,) = read_run(RUN).resumed
    assert resumed == "resumed with federation.min_clients=3 (config_resumed_1.yaml)"


def test_another_logger_leaves_the_rest_in_the_folder_of_the_run(cli, tmp_path):
    logger = ("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=elsewhere")
    cli(*FIT, "--trainer.max_epochs=1", *logger)
    expected = {"config.yaml", "rounds.csv", "last.ckpt", "environment.json", "partition.json"}
    assert expected <= {*files(RUN)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "runs"]
    assert len(list(tmp_path.glob("elsewhere/**/metrics.csv"))) == 1


def test_two_files_merge_and_flags_reach_the_loop_and_the_checkpoint(cli):
    more = "federation: {client_fraction: 0.5}\ncheckpoint: {filename: final}\n"
    Path("more.yaml").write_text(more)
    cli(*FIT, "--config=more.yaml", "--federation.policy.init_args.num_steps=3")
    assert (RUN / "final.ckpt").is_file()
    assert [(row["clients"], row["num_steps"]) for row in rounds(RUN)] == [("5", "15")] * 2


def test_a_single_callback_needs_no_list(cli):
    cli(*FIT, "--trainer.callbacks=ClientFaults", "--trainer.default_root_dir=null")
    (found,) = config_of(Path("version_0"))["trainer"]["callbacks"]
    assert found["class_path"].endswith(".ClientFaults")


def test_a_folder_of_checkpoints_that_is_a_file_is_an_error(cli, tmp_path):
    (tmp_path / "x.ckpt").touch()
    out = cli(*FIT, "--checkpoint.dirpath=x.ckpt", expect=2)
    assert out.endswith("/x.ckpt: File exists: choose another folder\n")
    assert files(tmp_path) == ["x.ckpt"]


def test_the_number_of_lines_and_files_does_not_depend_on_the_number_of_clients(cli, tmp_path):
    seen = []
    for clients in (10, 100):
        root = Path(f"Runs{clients}")  # not the name of a class
        options = [f"--trainer.default_root_dir={root}", "--data.init_args.partition=IID"]
        out = cli(*FIT, *options, f"--data.init_args.num_clients={clients}")
        seen.append((len(out.splitlines()), len(files(root))))
    assert seen[0] == seen[1]


def test_vectorized_clients_and_threads_have_options(cli, monkeypatch):
    seen, threads, init = [], [], VectorizedClients.__init__
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    @wraps(init)
    def noted(self, module, **options):
        seen.append(options)
        init(self, module, **options | {"compile": False})

    monkeypatch.setattr(VectorizedClients, "__init__", noted)
    tiny = (*FIT, "--trainer.fast_dev_run=true")
    cli(*tiny, "--vectorize.group_size=3", "--vectorize.compile=false", "--threads=3")
    Path("more.yaml").write_text("vectorize: {group_size: auto, compile: true}")
    cli(*tiny, "--config=more.yaml")
    assert seen == [{"group_size": 3, "compile": False}, {"group_size": "auto", "compile": True}]
    assert threads[0] == 3


@pytest.mark.parametrize(
    ("device", "kind", "by_default"),
    [
        ("cpu", SingleDeviceStrategy, False),
        ("cuda", SingleDeviceStrategy, True),
        ("cuda", DDPStrategy, False),  # processes share samples
        ("cuda", ClientParallelStrategy, True),
    ],
)
def test_clients_are_vectorized_on_a_gpu_unless_told_otherwise(device, kind, by_default):
    strategy = mock.Mock(kind, root_device=torch.device(device))
    for given, is_wrapped in (("on_gpu", by_default), (None, False), (4, True)):
        model = ClientModule(torch.nn.Linear(1, 1))
        made = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy), model=model)
        FederatedCLI._vectorize(made, given)
        assert isinstance(made.model, VectorizedClients) == is_wrapped
        assert is_wrapped or made.model is model
    # A vectorized model of a configuration is left as it is.
    made.model = model = VectorizedClients(model, group_size=3)
    FederatedCLI._vectorize(made, "on_gpu")
    assert made.model is model


def test_help_of_fit_begins_with_ten_options_that_exist_and_explains_all(cli, monkeypatch):
    head, rest = cli("fit", "--help").split("  --federation CONFIG", 1)
    lines = [line.split()[:2] for line in head.splitlines() if line.startswith("  --")]
    assert len(lines) == 10
    values = {option: value for option, value in lines if option != "--ckpt_path"}
    printed = yaml.safe_load(cli("fit", *[w for o in values.items() for w in o], "--print_config"))
    assert printed["federation"]["aggregator"]["class_path"].endswith("FedAvgM")
    for option in inspect.signature(FederatedLoop).parameters:
        assert f"--federation.{option}" in rest
    assert "Each fit has a new folder version_N in it." in " ".join(rest.split())


def test_help_of_other_commands_has_their_options_only(cli):
    out = cli("test", "--help")
    words = " ".join(out.split())
    assert "last: the checkpoint of the newest run." in words
    assert "Further options are those of fit" in words
    assert "--federation." not in out
    assert len(out.splitlines()) < 40


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("config", extras.marked(CONFIGS), ids=lambda p: p.stem)
def test_every_config_parses(cli, config):
    printed = yaml.safe_load(cli("fit", "--config", config, "--print_config"))
    assert printed["data"]["class_path"].startswith("lightning_fl.")


@pytest.mark.slow
@pytest.mark.parametrize("config", extras.marked(CONFIGS), ids=lambda p: p.stem)
def test_every_config_runs_one_tiny_round(cli, tmp_path, config, request):
    args = []
    if "digits" not in config.stem and config.stem != "lora_text":
        args = ["--data.init_args.root", request.getfixturevalue("data_root")]
    cli("fit", "--config", config, "--trainer.fast_dev_run=true", *args)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_every_config_opens_with_its_command_and_its_result(config):
    first, second, *_ = config.read_text().splitlines()
    assert first.startswith(f"# lightning-fl fit --config configs/{config.name}")
    assert "acc" in second


RULE, TERM = "--federation.aggregator", "--model.init_args.terms"
#: Options by what the message says of them.
MISTAKES = {
    "got 1.5": "--federation.client_fraction=1.5",
    "lr must be a finite number of at least 0, got -1": f"{RULE}=FedAvgM {RULE}.lr=-1",
    "mixing_matrix has 1 clients, the federation": f"{RULE}=Gossip {RULE}.mixing_matrix=[[1.0]]",
    "MLPClassifier has 9 outputs, and the largest label is 9: set 10 outputs, or number": (
        "--model.init_args.net.init_args.sizes=[64,9]"
    ),
    "use its whole name, such as --federation.policy.init_args.lr": "--lr=0.1",
    "EarlyStopping': the following arguments are": "--trainer.callbacks+=EarlyStopping",
    "loggers.CometLogger': Requirement 'comet-ml": "--trainer.logger=CometLogger",
    "write {class_path: Dirichlet, init_args": "'--data.init_args.partition=Dirichlet(0.5)'",
    "Expected 'os.system' to be a function that": "--model.init_args.optimizer=os.system",
    "mu must be": f"{TERM}+=Proximal {TERM}.init_args.mu=-1",
    "--federation.nonsense": "--federation.nonsense=1",
    "--max_epochs is not an option: use --trainer.max_epochs": "--max_epochs=1",
    "--aggregator is not an option: use --federation.aggregator": "--aggregator FedAvgM",
    "nowhere.yaml": "--config=nowhere.yaml",
    "trainer is empty in the configuration": "'--config={trainer: null}'",
    "threads": "--threads=0",
    "group_size": "--vectorize.group_size=0",
    "width": "--vectorize.width=3",
    "num_clients must be an integer in [1, 1294], got 5000": "--data.init_args.num_clients=5000",
    "use Schedule(num_steps=...)": "--trainer.limit_train_batches=3",
    "checkpoint . is not a file: set --ckpt_path to a file or last": "--ckpt_path=.",
    "download=true": "--data=MNIST --data.init_args.root=nowhere",
    "client_paralel": "--trainer.strategy=client_paralel",
    "-1 is not in bounds": "--seed_everything=-1",
    "seed must be an integer of at least 0, or None, got -1": "--data.init_args.seed=-1",
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_users_mistake_ends_with_a_message_and_leaves_nothing(cli, tmp_path, message):
    out = cli(*FIT, *shlex.split(MISTAKES[message]), expect=2)
    assert message in out
    assert "Traceback" not in out
    assert out.count("\n") == 1
    if "must be" in message:  # the words of a constructor, without those of the parser
        assert out.startswith(f"lightning-fl: error: {message}")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("option", "name", "nearest"),
    [
        (f"{RULE}=Scafold", "Scafold", "Scaffold"),
        ("--federation.policy Shedule", "Shedule", "Schedule"),
        (f"{TERM}+=Proximl", "Proximl", "Proximal"),
        ("--trainer.callbacks+=EarlyStoping", "EarlyStoping", "EarlyStopping"),
        ("--config=typed.yaml", "Dirichle", "Dirichlet"),
    ],
)
def test_the_nearest_class_is_named_instead_of_an_unknown_one(cli, option, name, nearest):
    Path("typed.yaml").write_text("data: {init_args: {partition: {class_path: Dirichle}}}\n")
    first, second = cli(*FIT, *option.split(), expect=2).splitlines()
    assert first.endswith(f": there is no class {name}")
    assert second.startswith(f"The nearest name is {nearest};")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: torch.save({"state_dict": {}}, path), "not a checkpoint of Lightning"),
        (lambda path: path.write_text("hello"), "damaged, or not a checkpoint"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_an_error(cli, tmp_path, write, message):
    write(tmp_path / "x.ckpt")
    command = ("test", "--config", DIGITS) if message.startswith("no") else FIT
    assert message in cli(*command, "--ckpt_path=x.ckpt", expect=2)
    assert files(tmp_path) == ["x.ckpt"]


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("fit --config", b"", "it is empty"),
        ("fit", b"trainer:\n\tmax_epochs: 3\n", ""),
        ("partition", b"\xff\xfe", ""),
        ("fit", b"a: " + b"[" * 3000, "maximum recursion depth"),
        ("export flower", b"a: {b: 1}\nc: 2\na: {b: 2}\n", "duplicate key a"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(cli, tmp_path, command, content, message):
    (tmp_path / "X.yaml").write_bytes(content)
    out = cli(*command.split(), "X.yaml", expect=2)
    assert f"config X.yaml cannot be read: {message}" in out
    assert "Traceback" not in out


# --- in processes of their own --------------------------------------------------------------------


def command(*args):
    """What ``lightning-fl`` does, in a process that forks.py has made."""
    # Ctrl-C works as in a terminal, also if these tests run in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    quick_cli.call(*args)


def start(folder, *args):
    few = ["--trainer.max_epochs=6", "--federation.policy.init_args.num_steps=3"]
    options = [*few, f"--trainer.default_root_dir={folder}", *args]
    return Started(1, f"{folder}.txt", command, "fit", "--config", DIGITS, *options)


def finish(run):
    (code,), out = run.finish(timeout=300)
    assert code == 0, out
    return out


@pytest.mark.parametrize(("sent", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_with_its_exit_code_and_says_how_to_go_on(tmp_path, sent, expected):
    root = tmp_path / "runs"
    run = start(root, "--trainer.max_epochs=100000")
    while run.processes[0].is_alive() and not (root / "version_0" / "last.ckpt").exists():
        time.sleep(0.1)
    run.send(sent)
    (code,), out = run.finish(timeout=120)
    assert code == expected, out
    assert out.rstrip().endswith("interrupted; resume with --ckpt_path last")
    assert "Traceback" not in out


@pytest.mark.slow
def test_a_run_that_was_killed_four_times_resumes_bit_equal(tmp_path):
    random = torch.Generator().manual_seed(int(os.environ.get("KILL_SEED", "0")))
    Started(1, tmp_path / "out", print).finish()  # the server has imported everything
    began = time.monotonic()
    out = finish(start(tmp_path / "whole"))
    length = time.monotonic() - began
    assert "warn" not in out.lower()
    for moment in torch.rand(4, generator=random).tolist():
        run = start(tmp_path / "killed", "--ckpt_path=last")
        time.sleep(moment * length)
        run.send(signal.SIGKILL)
        run.finish()
    finish(start(tmp_path / "killed", "--ckpt_path=last"))
    whole, killed = (version_folders(tmp_path / name)[-1] for name in ("whole", "killed"))
    assert (whole / "rounds.csv").read_bytes() == (killed / "rounds.csv").read_bytes()
    a, b = (torch.load(p / "last.ckpt", weights_only=True) for p in (whole, killed))
    assert all(torch.equal(a["state_dict"][k], b["state_dict"][k]) for k in a["state_dict"])
    assert a["callbacks"]["FederatedLoop"]["rows"] == b["callbacks"]["FederatedLoop"]["rows"]
    assert not list(killed.glob("*.ckpt.*"))


# --- configs that merge ---------------------------------------------------------------------------

MOSTAFA = ROOT / "configs" / "mostafa2019"


@pytest.mark.parametrize(
    ("names", "partition", "terms", "policy"),
    [
        ("cifar10 noniid fa_wd", "ByLabel", ["WeightDivergence"], "Schedule"),
        ("kws iid fa_rm", "IID", ["RepresentationMatching"], "Schedule"),
        ("mnist noniid fa_ah", "ByLabel", [], "DiscreteGaussianReinforce"),
    ],
)
def test_task_split_and_method_merge(cli, names, partition, terms, policy):
    files = [MOSTAFA / f"{name}.yaml" for name in names.split()]
    options = [option for file in files for option in ("--config", file)]
    out = cli("fit", *options, "--federation.client_fraction=0.5", "--print_config")
    config = yaml.safe_load(out)
    found = [term["class_path"].split(".")[-1] for term in config["model"]["init_args"]["terms"]]
    assert found == ["EntropyRegularizer", *terms]
    assert config["federation"]["policy"]["class_path"].endswith(policy)
    assert config["data"]["init_args"]["partition"]["class_path"].endswith(partition)
    assert config["federation"]["client_fraction"] == 0.5


def test_an_error_in_a_local_step_names_round_and_client(cli, monkeypatch):
    def fails(*args):
        raise FederationError("no such batch")

    monkeypatch.setattr(ClientModule, "training_step", fails)
    assert "error: no such batch\nIn round 1, client 0, local step 1\n" in cli(*FIT, expect=2)


def test_a_checkpoint_that_holds_objects_is_read_where_the_command_says_so(cli, fitted):
    last = fitted / "last.ckpt"
    torch.save({**torch.load(last, weights_only=True), "own": torch.nn.Linear(1, 1)}, last)
    args = (*FIT, "--trainer.max_epochs=3", "--ckpt_path=last")
    assert "--weights_only=false" in cli(*args, expect=2)
    assert "Written to" in cli(*args, "--weights_only=false")


def test_the_data_of_a_config_is_split_without_training(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(FederatedCLI, "instantiate_trainer", None)  # there is no Trainer
    words = ["digits.yaml", "--output", "out", "--data.init_args.num_clients=20"]
    shown = cli("partition", *words, "--data.init_args.batch_size=8")
    assert "clients             20\n" in shown
    assert "label drift         0.9" in shown
    assert "Written to out/partition.json\nWritten to out/partition.png\n" in shown
    assert len(Manifest.read("out/partition.json").clients) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_partition_without_a_config_says_so(cli):
    assert "--config FILE" in cli("partition", "--output=out", expect=2)
    assert "without training" in cli("partition", "--help")
