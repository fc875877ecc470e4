"""Hostile manifests, traces and checkpoints, made of bytes: what `fuzz.py` and the tests throw.

A target takes any bytes, which decide how valid content is changed, hands the file to what reads it
and returns what came of it. Everything but a clear error of this project is raised.
"""

from __future__ import annotations

import io
import json
import random
import re
import signal
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fl.aggregators import ClusteredFL, FedAdam, FedControl, Gossip
from lightning_fl.callbacks import ClientFaults, FederatedLoop, RoundCheckpoint
from lightning_fl.callbacks.faults import FAULTS, read_trace
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.partition import IID
from lightning_fl.partition.manifest import FromManifest, Manifest, checksum
from lightning_fl.policies import DiscreteGaussianReinforce, PersonalizedPolicyGradient
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError

#: What an input may take: none is large.
MOST_SECONDS = 20.0


class Choices:
    """Bytes as decisions; when they are used up, every decision is the first."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def below(self, n: int) -> int:
        """Return a number below n, of one byte, or two."""
        size = 1 if n <= 256 else 2
        piece = self.data[self.at : self.at + size]
        self.at += size
        return int.from_bytes(piece) % max(n, 1)

    def of(self, options: Any) -> Any:
        """Return one of several."""
        return options[self.below(len(options))]

    def take(self, n: int) -> bytes:
        """Return the next bytes."""
        self.at += n
        return self.data[self.at - n : self.at]


#: In the place of anything.
WILD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.0, -0.5,
    1e308, float("nan"), float("inf"), "", "0", "\x00", "\x1b[2J", "é\u202e", "../../etc",
    "s3://a/b.ckpt", "nan", "x" * 5000, [], {}, [[]], [{}], {"": None}, {"0": 0}, [1, "a", None],
    "٣", "1_0", "-0",
]  # fmt: skip


def _tensors(c: Choices, like: Any) -> Any:
    """Return what only a checkpoint can hold."""
    is_small = isinstance(like, Tensor) and like.numel() < 10**6
    base = like if is_small else torch.ones(3)
    loop: list[Any] = []
    loop.append(loop)
    laughs: list[Any] = [0]
    for _ in range(30):
        laughs = [laughs] * 10
    made: list[Callable[[], Any]] = [
        lambda: base.double() if base.is_floating_point() else base.float(),
        lambda: base.long() if base.is_floating_point() else base + 1,
        lambda: torch.full_like(base, torch.nan if base.is_floating_point() else -1),
        lambda: torch.full_like(base, 1e30 if base.is_floating_point() else 120),
        lambda: base[None],
        lambda: base.reshape(-1)[: c.below(8)],
        lambda: base.reshape(-1)[:1].expand(10**9) if base.numel() else base,
        lambda: torch.zeros(0, dtype=base.dtype),
        lambda: torch.zeros((), dtype=base.dtype),
        lambda: torch.zeros(c.below(5), c.below(5), dtype=base.dtype),
        lambda: base.to("meta"),
        lambda: base.to_sparse() if base.ndim else base,
        lambda: torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8),
        lambda: nn.Parameter(base.float()),
        lambda: base.bool(),
        lambda: base.to(torch.complex64),
        lambda: torch.Size([1, 2]),
        lambda: torch.float16,
        lambda: loop,
        lambda: laughs,
        lambda: {0: base},
        lambda: {torch.float16: base},
        lambda: {1, 2},
        lambda: b"bytes",
        lambda: 1j,
    ]
    try:
        return c.of(made)()
    except RuntimeError:  # not of every tensor
        return base


def wild(c: Choices, like: Any, tensors: bool) -> Any:
    """Return something in the place of a value."""
    if tensors and c.below(2):
        return _tensors(c, like)
    if isinstance(like, int | float) and c.below(2):
        return c.of([like + 1, like - 1, -like, like * 2, float(like), str(like)])
    if isinstance(like, str) and c.below(2):
        return c.of([like + "x", like[:-1], like.upper(), like * 2, like + "\n", "../" + like])
    return c.of(WILD)


def change(c: Choices, tree: Any, tensors: bool = False) -> Any:
    """Change one place of a tree."""
    is_tree = isinstance(tree, dict) or type(tree) in (list, tuple)  # not torch.Size
    if is_tree and len(tree) and c.below(8):
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = c.of(keys)
        what = c.below(16)
        edited: Any = dict(tree) if isinstance(tree, dict) else list(tree)
        if what == 0:
            del edited[key]
        elif what == 1 and isinstance(edited, dict):
            edited[c.of([*WILD[:26], key, f"{key}x", "load_state_dict", "step"])] = edited[key]
        elif what == 1:
            edited.insert(key, edited[key])
        elif what == 2:
            other = c.of(keys)
            edited[key], edited[other] = edited[other], edited[key]
        else:
            edited[key] = change(c, edited[key], tensors)
        return type(tree)(edited) if isinstance(tree, tuple) else edited
    return wild(c, tree, tensors)


def damage(c: Choices, content: bytes) -> bytes:
    """Change the bytes of a file."""
    at, other = (c.below(len(content) + 1) for _ in range(2))
    low, high = min(at, other), max(at, other)
    made = [
        content[:at] + bytes([c.below(256)]) + content[at + 1 :],
        content[:at] + c.take(c.below(8)) + content[at:],
        content[:low] + content[high:],
        content[:at],
        content[:low] + content[low:high] * 3 + content[high:],
        content[:at] + b"\x00" + content[at:],
        content[:at] + b"9" * 5000 + content[at:],
        content[:at] + b"[" * 20000 + content[at:],
        content[:at] + b'{"a":' * 20000,
        b"\xef\xbb\xbf" + content,
        content.decode("latin-1").encode("utf-16"),
        content.replace(b"\n", b"\r"),
        content.replace(b",", b",,", 1 + c.below(4)),
        content.replace(b",", b',"', 1),
        content + b"," * 200_000,
        content + b"\n" + content,
        content[:at] + b"\xff" + content[at:],
        content[:at] + b"-" + content[at:],
        content[:at] + b"e999" + content[at:],
    ]
    return made[c.below(len(made))]


@contextmanager
def _timed() -> Iterator[None]:
    """End what takes too long."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"it took more than {MOST_SECONDS:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="hostile-"))


def _kind_of(error: Exception, path: Path) -> str:
    """Return the words of an error, without what is different each time."""
    text = str(error).replace(str(path), "")
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[.*?\]|\{.*?\}|0x\w+|\w*\d\w*", "_", text)
    if "\n" in str(error) or not str(error).isprintable():
        raise AssertionError(f"the message is not one printable line: {error!r}") from error
    if len(str(error)) > 2000:
        raise AssertionError(f"the message has {len(str(error))} characters") from error
    return " ".join(text.split()[:12])


# --- manifests and traces -------------------------------------------------------------------------

LABELS = torch.arange(12) % 3


def manifest(data: bytes) -> str:
    """Read a manifest; what is accepted is a split, and comes back as it was."""
    c = Choices(data)
    tree = _manifest()
    for _ in range(c.below(3)):
        tree = change(c, tree)
    if c.below(2):  # a stranger knows how to make a checksum
        try:
            tree["checksum"] = checksum([torch.tensor(part) for part in tree["clients"]])
        except Exception:  # not of everything
            c.at += 1
    text = json.dumps(tree) if c.below(8) else json.dumps([tree, tree])
    content = text.encode("utf-8", "surrogatepass")
    for _ in range(c.below(3)):
        content = damage(c, content)
    path = _folder() / "split.json"
    path.write_bytes(content)
    try:
        with _timed():
            found = Manifest.read(path)
            parts = FromManifest(path)(LABELS, 3, torch.Generator())
    except FederationError as error:
        return _kind_of(error, path)
    again = path.with_name("again.json")
    found.write(again)
    assert Manifest.read(again) == found, "it does not come back as it was"
    assert torch.cat(parts).sort().values.tolist() == list(range(12)), "it is no split"
    return "accepted"


def _manifest() -> Any:
    parts = IID()(LABELS, 3, torch.Generator().manual_seed(0))
    path = _folder() / "valid.json"
    if not path.exists():
        Manifest.of(IID(), parts, LABELS, seed=0).write(path)
    return json.loads(path.read_text())


def trace(data: bytes) -> str:
    """Read a trace; what is accepted is rounds, clients and faults."""
    c = Choices(data)
    rows: list[list[Any]] = [["round", "client", "fault"]]
    rows += [[c.below(6), c.below(6), c.of(FAULTS)] for _ in range(c.below(6))]
    for _ in range(c.below(4)):
        changed = change(c, rows)
        changed = changed if isinstance(changed, list) else [changed]
        rows = [row if isinstance(row, list) else [row] for row in changed]
    lines = (c.of([",", ",", ", ", ";"]).join(map(str, row)) for row in rows)
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    for _ in range(c.below(3)):
        content = damage(c, content)
    path = _folder() / "trace.csv"
    path.write_bytes(content)
    try:
        with _timed():
            found = read_trace(path)
    except FederationError as error:
        return _kind_of(error, path)
    for (round, client), fault in found.items():
        assert 1 <= round < 10**15, "it is no round"
        assert 0 <= client < 10**15, "it is no client"
        assert fault in FAULTS, "it is no fault"
    return "accepted"


# --- checkpoints ----------------------------------------------------------------------------------


class Model(L.LightningModule):
    """A network with a state of its own that clients keep, an optimiser and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def federated_losses(self, batch: Any) -> Tensor:
        """Return each sample's."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss."""
        return self.federated_losses(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.federated_losses(batch).mean())

    def configure_optimizers(self) -> Any:
        """Return what has a state, and a scheduler that has one, too."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


#: Federations with all kinds of states.
LOOPS: list[Callable[[], FederatedLoop]] = [
    lambda: FederatedLoop(0.5, buffers="average"),
    lambda: FederatedLoop(
        aggregator=FedAdam(),
        buffers="local",
        optimizer_state="keep",
        transforms=[TopK(0.5)],
        policy=DiscreteGaussianReinforce({"lr": [0.01, 0.1]}),
    ),
    lambda: FederatedLoop(
        aggregator=ClusteredFL(0.0, 0.0, warmup=0, min_size=2),
        buffers="server",
        policy=PersonalizedPolicyGradient(
            [{"num_steps": 1}, {"num_steps": 2}], "reward", monitor="val_loss"
        ),
    ),
    lambda: FederatedLoop(aggregator=FedControl(), buffers="average"),
    lambda: FederatedLoop(aggregator=Gossip(), buffers="average"),
]


def _fit(which: int, folder: Path, rounds: int, path: Path | None = None) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 3, generator=generator), torch.arange(24) % 2)
    callbacks = [
        RoundCheckpoint(str(folder)),
        ModelCheckpoint(str(folder / "best"), "{epoch}", "val_loss", save_top_k=2),
        EarlyStopping("val_loss", patience=9, check_finite=False),
        ClientFaults(nan=0.1, dropout=0.1),
    ]
    trainer = L.Trainer(
        max_epochs=rounds,
        callbacks=[LOOPS[which](), *callbacks],
        accelerator="cpu",
        logger=False,
        default_root_dir=str(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    datamodule = FederatedDataModule(data, data, num_clients=4, batch_size=4)
    trainer.fit(Model(), datamodule=datamodule, ckpt_path=path)


@cache
def _checkpoint(which: int) -> bytes:
    folder = _folder() / str(which)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _fit(which, folder, 2)
    return (folder / "last.ckpt").read_bytes()


def checkpoint(data: bytes) -> str:
    """Resume a federation for a round; a checkpoint that is refused leaves everything as it was."""
    c = Choices(data)
    which = c.below(len(LOOPS))
    content, kind = _checkpoint(which), c.below(8)
    if kind == 0:
        for _ in range(1 + c.below(2)):
            content = damage(c, content)
    elif kind == 1:
        content = _repacked(c, content)
    else:
        tree = torch.load(io.BytesIO(content), weights_only=True)
        for _ in range(1 + c.below(2)):
            spot = c.below(4)
            if spot == 0:
                tree = change(c, tree, tensors=True)
            elif isinstance(tree, dict) and isinstance(tree.get("callbacks"), dict):
                # Where most of the state is that is this project's own.
                key = c.of(list(tree["callbacks"])) if spot == 1 else "FederatedLoop"
                if key in tree["callbacks"]:
                    tree["callbacks"][key] = change(c, tree["callbacks"][key], tensors=True)
        buffer = io.BytesIO()
        torch.save(tree, buffer)
        content = buffer.getvalue()
    folder = _folder() / str(which)
    path = folder / "hostile.ckpt"
    path.write_bytes(content)
    before = _listing(folder)
    try:
        with _timed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _fit(which, folder, 3, path)
    except FederationError as error:
        assert _listing(folder) == before, "a checkpoint that was refused has changed files"
        return _kind_of(error, path)
    except RuntimeError as error:
        if "loading state_dict" not in str(error):  # torch's own clear error, of a module's tensors
            raise
        return "torch: loading state_dict"
    except Exception as error:
        if "You restored a checkpoint with current_epoch" not in str(error):  # Lightning's own
            raise
        return "Lightning: current_epoch"
    finally:
        _put_back(folder, which)
    return "accepted"


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = {str(p): p.stat() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def _put_back(folder: Path, which: int) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("last.ckpt", "epoch=0.ckpt", "epoch=1.ckpt"):
            path.unlink()
    (folder / "last.ckpt").write_bytes(_checkpoint(which))


def _repacked(c: Choices, content: bytes) -> bytes:
    """Change what is in the archive, so that its own checksums are right."""
    made = io.BytesIO()
    with ZipFile(io.BytesIO(content)) as old, ZipFile(made, "w") as new:
        names = old.namelist()
        chosen = names[0] if c.below(4) else c.of(names)  # the first is the pickle
        for name in names:
            inside = old.read(name)
            if name == chosen:
                for _ in range(1 + c.below(3)):
                    at = c.below(len(inside) + 1)
                    piece = c.of(PICKLED) if c.below(2) else c.take(1 + c.below(4))
                    inside = inside[:at] + piece + inside[at + c.of([0, 1, len(piece)]) :]
            new.writestr(name, inside)
            if c.below(64) == 63:
                new.writestr(f"{name}x", inside, compress_type=8)
    return made.getvalue()


#: Pieces of pickles: numbers, marks, references, globals.
PICKLED = [
    b"N", b"\x88", b"\x89", b"K\x00", b"J" + struct.pack("<i", -1), b"\x8a\x10" + b"\x7f" * 16,
    b"(", b"t", b"]", b"}", b"s", b"u", b"a", b"e", b"0", b"2", b".", b"h\x00", b"q\x00", b"R",
    b"b", b"Q", b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nSize\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"X\x01\x00\x00\x00x",
    b"G" + struct.pack(">d", float("nan")),
]  # fmt: skip

TARGETS: dict[str, Callable[[bytes], str]] = {
    "manifest": manifest,
    "trace": trace,
    "checkpoint": checkpoint,
}


def noise(seed: int) -> Iterator[bytes]:
    """Return inputs without end."""
    draw = random.Random(seed)
    while True:
        yield draw.randbytes(draw.randint(0, 96))
