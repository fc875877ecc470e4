"""Tables of clients by round, written by hand."""

import gzip


def by_round(*lines, legend="0=not_sampled 1=arrived 2=dropped_out 3=low_battery", losses=()):
    """The table of clients by round: ``2,10`` is round 2, in which client 0 arrived."""
    names = dict(entry.split("=", 1) for entry in legend.split())
    rows = ["round,client,outcome,loss,score"]
    for line in lines:
        at, codes = line.split(",")
        for client, code in enumerate(codes):
            loss = losses[client][int(at) - 1] if losses else ""
            rows += [f"{at},{client},{names[code]},{loss},"] if code != "0" else []
    return gzip.compress("\n".join(rows).encode() + b"\n", mtime=0)
