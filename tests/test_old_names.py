"""Names that were replaced are gone everywhere: in code, configurations, tests and pages."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: What may hold a name: the changelog tells of renamings.
TEXTS = [
    path
    for folder in ("lightning_fl", "callbacks", "datamodules", "configs", "docs", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".yaml", ".html", ".ipynb"} and "_build" not in path.parts
]
TEXTS += [path for path in (ROOT / "tests").rglob("*.py") if path.name != Path(__file__).name]
TEXTS += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
OLD = {
    "Lanes": r"\bLanes\b|\bStackedLanes\b|\bModuleLane\b|\bLaneHost\b|\blane_host\b",
    "--lanes": r"--lanes\b|^lanes:",
    "lightning_fl.lanes": r"lightning_fl[./]lanes\b",
    "participation": r"\bparticipation ?[=:] ?[\d{]|--federation\.participation",
    "client_memory": r"\bclient_memory\b",
    "transforms of the loop": r"federation\.transforms|FederatedLoop\([^)]*\btransforms=",
    "arrivals": r"\barrivals\b|\.arrive\(",
    "rotations": r"(?<!client_)\brotations\b",
    "ByKey": r"\bByKey\b",
    "Side": r"\bSide\(",
    "Chain": r"\bChain\(|lightning_fl[./]chain\b",
    "MoreauEnvelope": r"\bMoreauEnvelope\b",
    "sigma2": r"\bsigma2\b|\bsigma02\b",
    "figures() of rules": r"def figures\(self|def figure\(self|aggregator\.figures?\(",
    "withdraw, publish": r"\.withdraw\(|def withdraw\(|aggregator\.publish\(",
    "joined": r"self\.joined\(",
    "skip": r"def skip\(self",
    "server_for": r"\bserver_for\b",
    "flags of rules": r"\bneeds_losses\b|\breplaces_network\b|\bleast_clients\b|\bneeds_credits\b",
    "flags of policies": r"\bneeds_val_loss\b|\bhears_clients\b",
    "nobody": r"plan\.nobody|nobody=",
    "takes_part": r"\btakes_part\b",
    "plan.values": r"\bplan\.values\b(?!\()",
    "credits": r"\bcredits\b",
    "HyperParameterPolicy": r"HyperParameterPolicy",
    "Purpose": r"\bPurpose\b",
    "blamed": r"\bblamed\(",
    "British spelling": r"\b[cC]entred?\b|\bnormalis|\boptimis(?:e|ed|er|ers|ing)\b|\b[bB]ehaviour",
    "h_min": r"\bh_min\b",
    "hyper_lr": r"\bhyper_lr\b",
    "faults": r"\bexplode=|\bslowness\b|ClientFaults\([^)]*\bspread=",
    "skipped_clients": r"\bskipped_clients\b",
    "attributes of a module": r"federated_(?:adapt|discard_losses|knows_weights|record)\b"
    r"|federated_(?:hyperparameter_limits|loss|mean|sample_weight|uses_client)\b",
    "options of the loop": r"\bcsv_name\b|\bon_client_error\b|\bclient_state_memory_gb\b"
    r"|\bexchange_frozen: (?:true|false)|--federation\.(?:phases|monitor|lean_steps)\b|lean_steps=",
}


@cache
def content(path):
    return path.read_text()


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_is_gone(name):
    pattern = re.compile(OLD[name], re.M)
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for path in TEXTS
        for text in [content(path)]
        for match in pattern.finditer(text)
    ]
    assert not found
