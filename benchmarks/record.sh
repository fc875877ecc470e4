#!/usr/bin/env bash
# Measure the workloads beside the bare loop and the libraries in .peers, and add the result to
# benchmarks/records/README.md. This takes three hours. Nothing else should run meanwhile.
# benchmarks/peers/install.sh installs the libraries.
#
#     benchmarks/record.sh [WORKLOAD ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
peers=()
for peer in flower fedjax drjax pfl blazefl fluke nvflare; do
    if [[ -x ${LIGHTNING_FL_PEERS:-.peers}/$peer/bin/python ]]; then peers+=("$peer"); fi
done
workloads=("$@")
[[ $# -gt 0 ]] || workloads=(W1 W2 W4 W3 W5 pfl femnist blazefl)
"$python" benchmarks/speed.py rounds --record --repeats "${REPEATS:-5}" \
    --workloads "${workloads[@]}" \
    --contestants "bare loop, 1 thread" "bare loop, 2 threads" "library, plain module" \
    "auto" "2 processes, auto" ${peers:+--peer "${peers[@]}"}
